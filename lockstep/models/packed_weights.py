"""Weights of linear layers with the same input, adjacent in memory: one product serves q, k and v, another gate and up, another
the projections of a layer with a state.

`kernels/packed.py` sees adjacent weights as one tensor; weights that are apart are concatenated on every call.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lockstep.kernels.linear import linear_and_adapter
from lockstep.kernels.packed import packed_view
from lockstep.models.known_models import KNOWN_MIXERS

PACKED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    *dict.fromkeys(form.projections for form in KNOWN_MIXERS.values()),
)
"""Linear layers of one module with the same input."""


@torch.no_grad()
def pack_weights(model: nn.Module) -> None:
    """Make the parameters that `PACKED` names adjacent in memory, module by module; the parameter objects stay."""
    for group in _groups(model):
        _pack(group)


def in_packed_order(model: nn.Module) -> list[nn.Parameter]:
    """All parameters once, those that `pack_weights` packs next to each other."""
    grouped = [p for group in _groups(model) for p in group if isinstance(p, nn.Parameter)]
    return list(dict.fromkeys([*grouped, *model.parameters()]))


def _groups(model: nn.Module) -> Iterator[Sequence[torch.Tensor | None]]:
    """Tensors to be adjacent in memory."""
    for module in model.modules():
        for names in PACKED:
            children = [getattr(module, name, None) for name in names]
            found = [linear_and_adapter(child) for child in children if child is not None]
            pairs = [pair for pair in found if pair is not None]
            if len(pairs) == len(names):
                yield [linear.weight for linear, _ in pairs]
                yield [linear.bias for linear, _ in pairs]
                yield [adapter.a for _, adapter in pairs if adapter is not None]


def _pack(parameters: Sequence[torch.Tensor | None]) -> None:
    own = [parameter for parameter in parameters if parameter is not None and not parameter.is_meta]
    if not own or len(own) < len(parameters) or packed_view(own) is not None:
        return
    joint = torch.cat([parameter.data for parameter in own])
    for parameter, part in zip(own, joint.split([len(parameter) for parameter in own])):
        parameter.data = part
