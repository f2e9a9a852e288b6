"""Log-probs and entropy of chosen tokens from hidden states, a chunk of positions at a time: the full logits never exist.

    hidden (N, H) ── chunk ──► head ──► logits (C, V) / temperature ──► log p(target) (C), entropy (C)

Each chunk is recomputed in the backward pass, so that memory is one chunk's logits forward and backward. A linear head in half
precision on CUDA is served by `kernels/linear_log_prob.py`, which computes the same from logits in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LogitsFn = Callable[[Tensor], Tensor]
"""Hidden states (C, H) -> logits (C, V)."""

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once: 64 Mi entries are 256 MB in float32."""

BLOCK_ELEMENTS = 1 << 18
"""Logits that stay in the cores' caches while their statistics are computed: 1 MB in float32."""

SMALLEST = 1e-37
"""Probabilities below it count as it in a logarithm; times themselves they are nothing."""


@dataclass(frozen=True)
class VocabularyHead:
    """Hidden states -> logits: cap * tanh(factor * module(hidden) / divisor / cap), each step only where it is set."""

    module: nn.Module
    factor: float | None = None
    divisor: float | None = None
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.module(hidden)
        if self.factor is not None:
            out = out * self.factor
        if self.divisor is not None:
            out = out / self.divisor
        return out if self.cap is None else torch.tanh(out / self.cap) * self.cap

    def weight_in(self, dtype: torch.dtype) -> Tensor | None:
        """The matrix of a head that is nothing but a product in this type; None for any other."""
        bare = type(self.module) is nn.Linear and self.module.bias is None
        if not bare or (self.factor, self.divisor, self.cap) != (None, None, None):
            return None
        assert isinstance(self.module, nn.Linear)
        weight = self.module.weight
        return weight if weight.dtype == dtype else None

    def is_fused_for(self, hidden: Tensor) -> bool:
        """Whether `kernels/linear_log_prob.py` serves this head; a wrapped one (LoRA, say) must compute for itself."""
        half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)
        return half and type(self.module) is nn.Linear and self.module.weight.dtype == hidden.dtype


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    logits_fn: LogitsFn,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    entropy_gradient: bool = True,
) -> dict[str, Tensor]:
    """Statistics (N) in float32 of the distributions p = softmax(logits / temperature).

    log_probs: log p[target]; entropy: -Σ p log p; sum_pi_squared: Σ p². The last two only where asked for, and without
    gradients where `entropy_gradient` is false.
    """
    if isinstance(logits_fn, VocabularyHead) and logits_fn.is_fused_for(hidden):
        log_probs, entropy, squares = _fused(hidden, targets, logits_fn, temperature)
        statistics = {"log_probs": log_probs}
        statistics |= {"entropy": entropy if entropy_gradient else entropy.detach()} if with_entropy else {}
        return statistics | ({"sum_pi_squared": squares} if with_sum_pi_squared else {})

    weight = None
    if isinstance(logits_fn, VocabularyHead) and hidden.dtype == torch.float32:
        weight = logits_fn.weight_in(torch.float32)

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = logits_fn(h).float() if weight is None else h
        out: tuple[Tensor, ...] = _Statistics.apply(h, weight, y, temperature, with_entropy, with_sum_pi_squared)
        return out if entropy_gradient else (out[0], *(more.detach() for more in out[1:]))

    names = ["log_probs"] + ["entropy"] * with_entropy + ["sum_pi_squared"] * with_sum_pi_squared
    size = _chunk_rows(hidden, logits_fn)
    if len(hidden) <= size:
        return dict(zip(names, chunk(hidden, targets)))
    again = partial(checkpoint, chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk
    pieces = [again(h, y) for h, y in zip(hidden.split(size), targets.split(size))]
    return {name: torch.cat(parts) for name, parts in zip(names, zip(*pieces))}


def _fused(hidden: Tensor, targets: Tensor, head: VocabularyHead, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    from lockstep.kernels.linear_log_prob import LogitForm, linear_log_prob

    assert isinstance(head.module, nn.Linear)
    factor = 1.0 if head.factor is None else head.factor
    factor = factor if head.divisor is None else factor / head.divisor
    return linear_log_prob(
        hidden, head.module.weight, head.module.bias, targets, LogitForm(temperature, factor, head.cap)
    )


class _Statistics(torch.autograd.Function):
    """log p[target], H = -Σ p log p and S = Σ p² of p = softmax(z), z = logits / temperature; the last two where asked for.

    inputs are the logits or, with a weight, what it multiplies to logits. A block of rows at a time goes through all passes over
    the vocabulary, so that each finds in the cache what the one before has left. The gradients are known: 1[target] - p,
    -p (log p + H) and 2 p (p - S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, ...]:
        size = inputs.shape[1] if weight is None else len(weight)
        rows = _block_rows(inputs, size)
        exps = inputs.new_empty(len(inputs), size)  # of the gap between a logit and the largest of its row
        shape = min(rows, len(inputs)), size
        room = inputs.new_empty(shape) if with_entropy or with_squares else None  # else the gap ends with its exp
        blocks = []
        for x, y, exp in zip(inputs.split(rows), targets.split(rows), exps.split(rows)):
            gap = exp if room is None else room[: len(x)]
            z = x if weight is None else torch.mm(x, weight.t(), out=gap)
            torch.sub(z, z.amax(-1, keepdim=True), out=gap)
            if temperature != 1.0:
                gap /= temperature
            of_target = gap.gather(-1, y[:, None]).squeeze(-1)
            total = torch.exp(gap, out=exp).sum(-1)
            log_total = total.log()
            found = [total, of_target - log_total]
            if with_entropy:
                found.append(log_total - gap.mul_(exp).sum(-1) / total)
            if with_squares:
                found.append(torch.mul(exp, exp, out=gap).sum(-1) / total.square())
            blocks.append(found)
        totals, *out = map(torch.cat, zip(*blocks))
        ctx.save_for_backward(inputs if weight is not None else None, weight, exps, totals, targets, *out[1:])
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_chosen: Tensor | None, *for_more: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, weight, exps, totals, targets, *sums = ctx.saved_tensors
        if for_chosen is None:
            for_chosen = torch.zeros_like(totals)
        for_chosen, totals = for_chosen[:, None] / ctx.temperature, totals[:, None]
        if all(incoming is None for incoming in for_more):
            grad = exps.mul_(-for_chosen / totals)  # nobody else holds them
        else:
            p, slope = exps.div_(totals), -for_chosen
            for number, (incoming, total) in enumerate(zip(for_more, sums)):
                if incoming is not None:
                    factor, total = incoming[:, None] / ctx.temperature, total[:, None]
                    is_entropy = ctx.with_entropy and number == 0
                    log_p = p.clamp_min(SMALLEST).log_() if is_entropy else None
                    slope = slope + (2 * factor * (p - total) if log_p is None else -factor * (log_p + total))
            grad = p.mul_(slope)
        grad.scatter_add_(1, targets[:, None], for_chosen)
        if weight is None:
            return grad, None, None, None, None, None
        for_inputs, for_weight = ctx.needs_input_grad[:2]
        of_inputs, of_weight = grad @ weight if for_inputs else None, grad.t() @ inputs if for_weight else None
        return of_inputs, of_weight, None, None, None, None


def _block_rows(inputs: Tensor, vocabulary: int) -> int:
    """Rows of logits that the caches hold; where they are too few for a good product, and on CUDA, all."""
    rows = BLOCK_ELEMENTS // vocabulary
    return rows if rows >= 64 and not inputs.is_cuda else CHUNK_ELEMENTS


def _chunk_rows(hidden: Tensor, logits_fn: LogitsFn) -> int:
    weight = getattr(logits_fn.module, "weight", None) if isinstance(logits_fn, VocabularyHead) else None
    if isinstance(weight, Tensor):
        vocabulary = weight.shape[0]
    else:
        with torch.no_grad():
            vocabulary = logits_fn(hidden[:1]).shape[-1]
    return max(1, CHUNK_ELEMENTS // vocabulary)
