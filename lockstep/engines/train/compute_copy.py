"""Mixed precision in one process: master weights for the optimizer, and a copy of the module in the compute type.

    compute copy: forward, backward ─► float32 gradients move to the masters ─► optimizer step ─► weights are copied back

The copy's tensors keep their addresses, so the rollout can decode with them and capture them in CUDA graphs.
"""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from lockstep.models.four_bit import is_4bit

M = TypeVar("M", bound=nn.Module)


def copy_in(model: M, dtype: torch.dtype) -> M:
    """A copy with parameters in `dtype`; trained ones accumulate float32 gradients. Buffers keep their type.

    Frozen parameters that are in `dtype` already (the base of a LoRA adapter) or in 4 bits are shared, not copied.
    """
    cast: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad and (parameter.dtype == dtype or is_4bit(parameter)):
            cast[id(parameter)] = parameter
            continue
        compute = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            compute.grad_dtype = torch.float32
            parameter.grad_dtype = None  # bfloat16 masters take float32 gradients too
        cast[id(parameter)] = compute
    return copy.deepcopy(model, cast)


def copied_parameters(masters: nn.Module, compute: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The pairs of a master and its copy, without the parameters that both share."""
    return [pair for pair in zip(masters.parameters(), compute.parameters()) if pair[0] is not pair[1]]


def hand_gradients(compute: nn.Module, masters: nn.Module) -> None:
    """Move the copy's accumulated gradients to the masters."""
    for master, parameter in copied_parameters(masters, compute):
        master.grad, parameter.grad = parameter.grad, None


@torch.no_grad()
def refresh(compute: nn.Module, masters: nn.Module) -> None:
    """Copy the masters' values to the compute copy."""
    pairs = copied_parameters(masters, compute)
    if pairs:
        copied: Sequence[Tensor] = [parameter for _, parameter in pairs]
        torch._foreach_copy_(list(copied), [master.detach() for master, _ in pairs])
