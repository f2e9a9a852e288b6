"""Dataset settings from a plain mapping, for scripts that build a dataset directly."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf

from lockstep.config.errors import ConfigError
from lockstep.config.schema import build, unknown_keys

logger = logging.getLogger(__name__)

C = TypeVar("C")


def from_mapping(cls: type[C], config: Mapping[str, Any], **defaults: Any) -> C:
    """Build `cls` from `config`, then `defaults`, then its own defaults; unknown keys are ignored with a warning."""
    given: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    built, problems = build(cls, defaults | given)
    if problems:
        raise ConfigError(problems)
    ignored = [name for name, _ in unknown_keys(cls, given)]
    if ignored:
        logger.warning("%s ignores these settings: %s", cls.__name__, ", ".join(ignored))
    return built
