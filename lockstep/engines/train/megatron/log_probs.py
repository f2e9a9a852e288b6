"""Log-probs and entropy of chosen tokens if each tensor-parallel rank has a part of the vocabulary.

    hidden (N, H) ── chunk ──► logits (C, V') of this rank ──► maximum, sum of exponentials and target's logit over ranks ──► (C)

The same statistics as `models/log_probs.py`, in chunks that are recomputed in the backward pass. A sum over ranks is followed by
values that all ranks have, so its gradient is theirs; a value that all ranks have and use for their own entries gets the sum of
their gradients.
"""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region as to_own_entries,
    reduce_from_tensor_model_parallel_region as sum_over_ranks,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.kernels.linear import linear_float32
from lockstep.models.log_probs import CHUNK_ELEMENTS, LEAST_LOG_PROB


def vocabulary_parallel_log_probs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    entropy_gradient: bool = True,
) -> dict[str, Tensor]:
    """Statistics (N) in float32 of p = softmax(logits / temperature), see `token_log_probs`.

    weight:     (V', H) this rank's rows of the head.
    vocab_size: rows of all ranks beyond it are padding, which has no probability.
    """
    first = ps.get_tensor_model_parallel_rank() * len(weight)
    num_real = real_entries(first, len(weight), vocab_size)

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = linear_float32(h, weight)[:, :num_real] / temperature
        log_total = _log_sum_exp(logits)
        is_here = (y >= first) & (y < first + num_real)
        place = torch.where(is_here, y - first, 0)
        chosen = logits.gather(-1, place[:, None]).squeeze(-1) if num_real else logits.sum(-1)
        out = [sum_over_ranks(torch.where(is_here, chosen, 0.0)) - log_total]
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            log_p = logits - to_own_entries(log_total)[:, None]
            if with_entropy:
                out.append(sum_over_ranks(-(log_p.exp() * log_p.clamp_min(LEAST_LOG_PROB)).sum(-1)))
            if with_sum_pi_squared:
                out.append(sum_over_ranks((2 * log_p).exp().sum(-1)))
        return tuple(out)

    names = ["log_probs"] + ["entropy"] * with_entropy + ["sum_pi_squared"] * with_sum_pi_squared
    size = max(1, CHUNK_ELEMENTS // len(weight))
    if len(hidden) <= size:
        return dict(zip(names, chunk(hidden, targets)))
    again = partial(checkpoint, chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk
    pieces = [again(h, y) for h, y in zip(hidden.split(size), targets.split(size))]
    return {name: torch.cat(parts) for name, parts in zip(names, zip(*pieces))}


def real_entries(first: int, num_rows: int, vocab_size: int) -> int:
    """How many of a rank's rows, which start at entry `first`, are not padding."""
    return max(0, min(num_rows, vocab_size - first))


def _log_sum_exp(logits: Tensor) -> Tensor:
    """(C, V') of each rank -> (C) over all ranks."""
    with torch.no_grad():
        shape = logits.shape[:1]
        largest = logits.amax(-1) if logits.shape[1] else torch.full(shape, -torch.inf, device=logits.device)
        if len(largest):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ps.get_tensor_model_parallel_group())
    return largest + sum_over_ranks((logits - largest[:, None]).exp().sum(-1)).log()
