"""Ulysses sequence parallelism: several ranks share one packed row (Jacobs et al. 2023, arXiv 2309.14509).

    rank s holds T/size tokens ──► all layers except attention compute on these alone
    attention: (H heads, T/size tokens) ─ all-to-all ─► (H/size heads, T tokens) ─► attend ─ all-to-all ─► (H heads, T/size tokens)
    results: each rank fills in those of its own tokens ─ all-reduce ─► every rank has all of them

Every rank of the group then computes the same loss from the same results. The gradient of a rank is the part of its own tokens, and
the gradients of the group sum to the whole: so the backward of the all-reduce passes the gradient through unchanged.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.models.attention import AttentionContext
from lockstep.models.layer_options import LayerOptions
from lockstep.models.state_rows import StateCore


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share a packed row: `rank` of `size` in `group`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce; differentiable, for a loss that every rank of the group computes."""
        total: Tensor = _SumOnce.apply(values, self.group)
        return total

    def exchange(self, parts: Tensor) -> Tensor:
        """Part i of `parts` (size, ...) goes to rank i; part i of the result came from rank i. Differentiable."""
        received: Tensor = _Exchange.apply(parts, self.group)
        return received


def check_heads(num_heads: int, size: int) -> None:
    if num_heads % size:
        fits = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"ulysses_sequence_parallel_size={size}: the model's {num_heads} attention heads do not divide among {size} "
            f"ranks; set it to one of {fits}"
        )


class UlyssesAttention:
    """An attention context for ranks that each hold a slice of the tokens.

    whole: the context of all T tokens; it is given this rank's share of the heads.
    """

    def __init__(self, whole: AttentionContext, sequence: SequenceGroup) -> None:
        self.whole = whole
        self.sequence = sequence

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        rank, size = self.sequence.rank, self.sequence.size
        if options.index is not None:
            raise ValueError(
                f"{type(layer).__name__} picks keys by an index, which ranks that share a sequence cannot do"
            )
        check_heads(query.shape[1], size)
        # copies make the number of key heads divisible by `size`; they divide the queries per key, as the query heads are divisible
        copies = size // gcd(key.shape[1], size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = self._all_tokens(query, key, value)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(size)[rank])
        return self._all_heads(self.whole.attend(layer, query, key, value, options))

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        raise ValueError(f"{type(layer).__name__} has a state, which ranks that share a sequence cannot compute")

    def _all_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Each (1, H, T/size, D) -> (1, H/size, T, D), in one exchange."""
        size = self.sequence.size
        parts = [t.reshape(size, -1) for t in tensors]
        received = self.sequence.exchange(torch.cat(parts, 1)).split([p.shape[1] for p in parts], 1)
        out = []
        for tensor, pieces in zip(tensors, received):
            _, heads, num_tokens, width = tensor.shape
            by_head = pieces.reshape(size, heads // size, num_tokens, width).transpose(0, 1)
            out.append(by_head.reshape(1, heads // size, size * num_tokens, width))
        return out

    def _all_heads(self, output: Tensor) -> Tensor:
        """(1, T, H/size, D) -> (1, T/size, H, D)."""
        size = self.sequence.size
        _, num_tokens, heads, width = output.shape
        received = self.sequence.exchange(output.reshape(size, num_tokens // size, heads, width))
        return received.transpose(0, 1).reshape(1, num_tokens // size, size * heads, width)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts; its backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None


class _SumOnce(torch.autograd.Function):
    """Sum over ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
