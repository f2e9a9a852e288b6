"""`BaseConfig`: dataclasses of settings that also read like a mapping."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class BaseConfig(Mapping[str, Any]):
    """Base class of a program's own config dataclasses: attributes, `config["name"]` and `config.get("name", default)`."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dict__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))
