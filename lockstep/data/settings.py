"""Settings of a dataset given as a plain mapping, as scripts that build a dataset by hand do."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf

from lockstep.config.errors import ConfigError
from lockstep.config.schema import build, unknown_keys

logger = logging.getLogger(__name__)

C = TypeVar("C")


def from_mapping(cls: type[C], config: Mapping[str, Any], **defaults: Any) -> C:
    """`config` over `defaults` over those of `cls`; a key that `cls` has not is passed over with a warning."""
    given: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    built, problems = build(cls, defaults | given)
    if problems:
        raise ConfigError(problems)
    passed_over = [name for name, _ in unknown_keys(cls, given)]
    if passed_over:
        logger.warning("%s does not use these settings: %s", cls.__name__, ", ".join(passed_over))
    return built
