"""A registry of Lockstep as programs on verl use it: a dictionary that they also change."""

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from lockstep.registry import Registry

T = TypeVar("T")


class RegistryView(MutableMapping[str, T]):
    """`view[name]`, `view[name] = entry`, `view.copy()`, `view.clear()`, ...; what is changed is the registry itself."""

    def __init__(self, registry: Registry[T]) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> T:
        if name not in self._registry:
            raise KeyError(name)
        return self._registry.get(name)

    def __setitem__(self, name: str, entry: T) -> None:
        self._registry._entries.pop(name, None)
        self._registry.register(name)(entry)

    def __delitem__(self, name: str) -> None:
        del self._registry._entries[name]
        self._registry._names.discard(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(list(self._registry))

    def copy(self) -> dict[str, T]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(self.copy())
