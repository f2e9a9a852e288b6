"""verl.utils.ulysses: sequence parallelism between the ranks of a group, for a program's own forward pass.

    set_ulysses_sequence_parallel_group(group)
    ids, positions, padding = ulysses_pad_and_slice_inputs(ids, positions, sp_size)     each rank has its part of the tokens
    … attention: gather_seq_scatter_heads(q), … , gather_heads_scatter_seq(output) …
    log_probs = gather_outputs_and_unpad(log_probs, 0, 0, padding)                      each rank has all of them

Lockstep's workers do this themselves: `actor.ulysses_sequence_parallel_size`.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.ulysses import check_heads

Group = dist.ProcessGroup

_group: Group | None = None


def set_ulysses_sequence_parallel_group(group: Group | None) -> None:
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> Group | None:
    return _group


def get_ulysses_sequence_parallel_world_size(group: Group | None = None) -> int:
    group = group or _group
    return 1 if group is None else dist.get_world_size(group)


def get_ulysses_sequence_parallel_rank(group: Group | None = None) -> int:
    group = group or _group
    return 0 if group is None else dist.get_rank(group)


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int) -> None:
    """AssertionError if the heads do not divide among the ranks."""
    try:
        check_heads(num_heads, ulysses_sequence_size)
    except ValueError as error:
        raise AssertionError(str(error)) from error


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: Group | None = None
) -> Tensor:
    """All tokens of this rank's heads from this rank's tokens of all heads. unpadded_dim_size: tokens without padding."""
    group = group or _group
    if group is None:
        return x
    whole = all_to_all_tensor(x, head_dim, seq_dim, group)
    return whole.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size else whole


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: Group | None = None) -> Tensor:
    """This rank's tokens of all heads from all tokens of this rank's heads; tokens that do not divide are padded."""
    group = group or _group
    if group is None:
        return x
    return all_to_all_tensor(
        _padded(x, seq_dim, -x.shape[seq_dim] % dist.get_world_size(group)), seq_dim, head_dim, group
    )


def all_to_all_tensor(local_input: Tensor, scatter_dim: int, gather_dim: int, group: Group | None = None) -> Tensor:
    """Part i along `scatter_dim` goes to rank i; the parts received are joined along `gather_dim`. Differentiable."""
    group = group or _group
    assert group is not None, "set_ulysses_sequence_parallel_group first"
    out: Tensor = _AllToAll.apply(local_input, scatter_dim, gather_dim, group)
    return out


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: Group | None = None) -> Tensor:
    """This rank's part of `x` along `dim`."""
    size, rank = get_ulysses_sequence_parallel_world_size(group), get_ulysses_sequence_parallel_rank(group)
    return _padded(x, dim, -x.shape[dim] % size if padding else 0).chunk(size, dim)[rank].contiguous()


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    """(1, T) tokens and their positions padded so that T divides among the ranks, and the number of tokens added."""
    pad_size = -input_ids_rmpad.shape[-1] % max(sp_size, 1)
    if not pad_size:
        return input_ids_rmpad, position_ids_rmpad, 0
    ids = F.pad(input_ids_rmpad, (0, pad_size), value=pad_value)
    if position_ids_rmpad is None:
        return ids, None, pad_size
    new = torch.arange(pad_size, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
    new = new.expand(*position_ids_rmpad.shape[:-1], pad_size)
    return ids, torch.cat((position_ids_rmpad, new), -1), pad_size


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: int = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """This rank's part of (1, T) tokens and positions, and the number of tokens that were added to divide them.

    skip_position_ids_rmpad: positions stay those of all tokens.
    """
    ids, positions, pad_size = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size, pad_value)
    ids = slice_input_tensor(ids, -1, padding=False)
    if positions is not None and not skip_position_ids_rmpad:
        positions = slice_input_tensor(positions, -1, padding=False)
    return ids, positions, pad_size


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: Group | None = None,
) -> Tensor:
    """The parts of all ranks along `gather_dim`, without the last `padding_size` along `unpad_dim`; unchanged without a group.

    grad_scaler: multiply the gradient by the number of ranks, for a loss that is averaged over them.
    """
    group = group or _group
    if group is None:
        return x
    whole: Tensor = _Gather.apply(x, gather_dim, grad_scaler, group)
    if unpad_dim is None or not padding_size:
        return whole
    return whole.narrow(unpad_dim, 0, whole.shape[unpad_dim] - padding_size)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    shape = [*x.shape]
    shape[dim] = size
    return torch.cat((x, x.new_zeros(shape)), dim) if size else x


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter_dim: int, gather_dim: int, group: Group) -> Tensor:
        ctx.scatter_dim, ctx.gather_dim, ctx.group = scatter_dim, gather_dim, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), scatter_dim)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(list(received), gather_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grads[0], ctx.gather_dim, ctx.scatter_dim, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, scale: bool, group: Group) -> Tensor:
        size = dist.get_world_size(group)
        ctx.dim, ctx.rank, ctx.size, ctx.factor = dim, dist.get_rank(group), size, size if scale else 1
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].chunk(ctx.size, ctx.dim)[ctx.rank] * ctx.factor, None, None, None
