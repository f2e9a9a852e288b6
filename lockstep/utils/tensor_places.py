"""A module's tensors by name without a walk through its submodules, which takes milliseconds."""

from collections.abc import Iterator
from typing import Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn

Kind = Literal["parameters", "all parameters", "buffers"]
"""all parameters: tied ones under each of their names."""
Place = tuple[str, dict[str, Tensor], str]
"""The name of a tensor, its submodule's tensors and its name there."""

_known: WeakKeyDictionary[nn.Module, dict[Kind, list[Place]]] = WeakKeyDictionary()


def named(module: nn.Module, kind: Kind) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are now. The names are those of the first call: submodules must stay what they are."""
    known = _known.setdefault(module, {})
    if kind not in known:
        known[kind] = _places(module, kind)
    return ((name, tensors[leaf]) for name, tensors, leaf in known[kind])


def _places(module: nn.Module, kind: Kind) -> list[Place]:
    names = (
        module.named_buffers() if kind == "buffers" else module.named_parameters(remove_duplicate=kind == "parameters")
    )
    places = []
    for name, _ in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((name, vars(owner)["_buffers" if kind == "buffers" else "_parameters"], leaf))
    return places
