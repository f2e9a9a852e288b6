"""Mixed precision in one process: the optimizer's float32 master weights, and a module in the compute type beside them.

    compute copy: forward, backward ─► its gradients, summed in float32, become the masters' ─► optimizer step ─► copied back

The copy's tensors stay where they are, so that the rollout decodes with them and may keep what it captured of them.
"""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def copy_in(model: M, dtype: torch.dtype) -> M:
    """The model with its parameters in `dtype`, those that are trained with float32 gradients; buffers stay as they are."""
    cast: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        compute = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            compute.grad_dtype = torch.float32
        cast[id(parameter)] = compute
    return copy.deepcopy(model, cast)


def _pairs(masters: nn.Module, compute: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [pair for pair in zip(masters.parameters(), compute.parameters()) if pair[0].requires_grad]


def hand_gradients(compute: nn.Module, masters: nn.Module) -> None:
    """Give the masters the gradients that the copy has summed up."""
    for master, parameter in _pairs(masters, compute):
        master.grad, parameter.grad = parameter.grad, None


@torch.no_grad()
def refresh(compute: nn.Module, masters: nn.Module) -> None:
    """Bring the copy's values up to the masters'."""
    pairs = list(zip(masters.parameters(), compute.parameters()))
    if pairs:
        copied: Sequence[Tensor] = [parameter for _, parameter in pairs]
        torch._foreach_copy_(list(copied), [master.detach() for master, _ in pairs])
