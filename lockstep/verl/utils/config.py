"""verl.utils.config"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from lockstep.registry import load_object
from lockstep.verl._config import typed_config


def omega_conf_to_dataclass(config: Any, dataclass_type: Any = None) -> Any:
    """A section as a dataclass: of the given type, or of the one that its `_target_` names; nested sections too."""
    if config is None or is_dataclass(config):
        return config
    plain: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    if dataclass_type is None:
        if "_target_" not in plain:
            raise ValueError("omega_conf_to_dataclass needs a dataclass, or a section with _target_")
        return _targets(plain)
    known = {field.name for field in fields(dataclass_type)}
    unknown = sorted(set(plain) - known - {"_target_"})
    if unknown:
        raise ValueError(f"{dataclass_type.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    hints = get_type_hints(dataclass_type)
    return dataclass_type(**{name: _section(value, hints[name]) for name, value in plain.items() if name != "_target_"})


def _section(value: Any, hint: Any) -> Any:
    """A mapping as an object of its `_target_`, or of the dataclass that the field has; other values unchanged."""
    if not isinstance(value, Mapping) or "_target_" in value:
        return _targets(value)
    inner = next(
        (choice for choice in (hint, *get_args(hint)) if isinstance(choice, type) and is_dataclass(choice)), None
    )
    return _targets(value) if inner is None else omega_conf_to_dataclass(value, inner)


def _targets(value: Any) -> Any:
    """Sections with `_target_` as objects of that class."""
    if not isinstance(value, Mapping):
        return value
    arguments = {name: _targets(item) for name, item in value.items() if name != "_target_"}
    if "_target_" not in value:
        return arguments
    module, _, name = value["_target_"].rpartition(".")
    return load_object(f"{module}:{name}")(**arguments)


def validate_config(config: Any, use_reference_policy: bool | None = None, use_critic: bool | None = None) -> None:
    """ConfigError with every problem of the config. The other arguments follow from it."""
    typed_config(config)
