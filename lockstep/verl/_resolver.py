"""The interpolation `${lockstep.default:CONFIG,KEY}` of configs, known to every process that imports `lockstep.verl`."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.verl._names import RESOLVER


def _resolve(config: str, name: str, *, _root_: DictConfig) -> Any:
    from lockstep.verl._config import default_of

    return default_of(config, name, _root_)


def register_resolver() -> None:
    OmegaConf.register_new_resolver(RESOLVER, _resolve, replace=True)
