"""verl.base_config: dataclasses of settings that also read like a mapping, and whose fields are frozen unless listed.

BaseConfig           base of a program's own dataclasses
assignable(fields)   decorator of a class that derives from DictLike and one of Lockstep's sections
dict_like(section)   one of Lockstep's sections as such an object, those inside too
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class DictLike(Mapping[str, Any]):
    """`config["name"]`, `config.get("name", default)` and `**config` for a dataclass."""

    _mutable_fields: ClassVar[frozenset[str] | set[str]] = frozenset()
    """Fields that may be assigned after construction."""

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]  # a dataclass derives from this

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            allowed = ", ".join(sorted(self._mutable_fields)) or "none"
            raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be assigned (mutable fields: {allowed})")
        object.__setattr__(self, name, value)


@dataclass
class BaseConfig(DictLike):
    """Base class of a program's own config dataclasses. `_mutable_fields`: a set of the fields that may be assigned."""


_DICT_LIKE: dict[type, type] = {}
"""Lockstep's section -> the class here that derives from it."""


def assignable(*names: str) -> Callable[[type[T]], type[T]]:
    """Decorator over `@dataclass(frozen=True)`: the named fields may be assigned."""

    def adapt(cls: type[T]) -> type[T]:
        del cls.__setattr__, cls.__delattr__  # those of a frozen dataclass; DictLike's take their place
        cls._mutable_fields = frozenset(names)  # type: ignore[attr-defined]
        section = next(base for base in cls.__mro__[1:] if is_dataclass(base))
        _DICT_LIKE.setdefault(section, cls)
        BaseConfig.register(cls)
        return cls

    return adapt


def dict_like(section: Any) -> Any:
    """A copy of one of Lockstep's sections that reads like a mapping, with all sections inside."""
    if isinstance(section, DictLike):
        return section
    copied: Any = object.__new__(_class_for(type(section)))
    copied.__dict__.update(section.__dict__)
    adapt_sections(copied)
    return copied


def adapt_sections(section: Any) -> None:
    """Replace the sections inside by dictionary-like ones."""
    for name, value in vars(section).items():
        if is_dataclass(value) and not isinstance(value, DictLike):
            section.__dict__[name] = dict_like(value)


def _class_for(section: type) -> type:
    return _DICT_LIKE.get(section) or _made_class(section)


@cache
def _made_class(section: type) -> type:
    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(__module__=section.__module__, __doc__=section.__doc__, __reduce__=_reduce)

    return types.new_class(section.__name__, (DictLike, section), exec_body=fill)


def _reduce(config: Any) -> tuple[Any, ...]:
    """Pickled as Lockstep's section: other processes cannot import a class that was made here."""
    plain: Any = object.__new__(type(config).__bases__[1])
    plain.__dict__.update(config.__dict__)
    return dict_like, (plain,)
