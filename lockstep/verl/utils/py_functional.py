"""verl.utils.py_functional"""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf

from lockstep.protocol import list_of_dict_to_dict_of_list

__all__ = [
    "append_to_dict",
    "convert_to_regular_types",
    "list_of_dict_to_dict_of_list",
    "rename_dict",
    "temp_env_var",
    "union_two_dict",
]


def append_to_dict(data: MutableMapping[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value to the list under `prefix + name`; a list is appended item by item."""
    for name, value in new_data.items():
        data.setdefault(f"{prefix}{name}", []).extend(value if isinstance(value, list) else [value])


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the items of `dict2` to `dict1`; shared keys must have equal values."""
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise AssertionError(f"union_two_dict: {key!r} is {dict1[key]!r} and {value!r}")
        dict1[key] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in data.items()}


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's containers as dicts and lists, at any depth."""
    if OmegaConf.is_config(obj):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return [convert_to_regular_types(item) for item in obj] if isinstance(obj, list | tuple) else obj


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
