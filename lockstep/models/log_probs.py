"""Log-probs and entropy of chosen tokens from hidden states, a chunk of positions at a time: the full logits never exist.

    hidden (N, H) ── chunk ──► head ──► logits (C, V) / temperature ──► log p(target) (C), entropy (C)

Each chunk is recomputed in the backward pass, so that memory is one chunk's logits forward and backward. A linear head in half
precision on CUDA is served by `kernels/linear_log_prob.py`, which computes the same from logits in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LogitsFn = Callable[[Tensor], Tensor]
"""Hidden states (C, H) -> logits (C, V)."""

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once: 64 Mi entries are 256 MB in float32."""


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

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = _Statistics.apply(
            logits_fn(h).float(), y, temperature, with_entropy, with_sum_pi_squared
        )
        return out if entropy_gradient else (out[0], *(more.detach() for more in out[1:]))

    size = _chunk_rows(hidden, logits_fn)
    pieces = []
    for h, y in zip(hidden.split(size), targets.split(size)):
        if torch.is_grad_enabled() and len(hidden) > size:
            pieces.append(checkpoint(chunk, h, y, use_reentrant=False))
        else:
            pieces.append(chunk(h, y))
    names = ["log_probs"] + ["entropy"] * with_entropy + ["sum_pi_squared"] * with_sum_pi_squared
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

    In few passes over the vocabulary, since the gradients are known: 1[target] - p, -p (log p + H) and 2 p (p - S).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, with_squares: bool
    ) -> tuple[Tensor, ...]:
        log_p = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
        out = [log_p.gather(-1, targets[:, None]).squeeze(-1)]
        if with_entropy:
            out.append(-log_p.exp().mul_(log_p).sum(-1))
        if with_squares:
            out.append((2 * log_p).exp_().sum(-1))
        ctx.save_for_backward(log_p, targets, *out[1:])
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_chosen: Tensor | None, *for_more: Tensor | None) -> tuple[Tensor | None, ...]:
        log_p, targets, *sums = ctx.saved_tensors
        if for_chosen is None:
            for_chosen = log_p.new_zeros(len(log_p))
        for_chosen = for_chosen[:, None] / ctx.temperature
        slope = None
        for number, (incoming, total) in enumerate(zip(for_more, sums)):
            if incoming is not None:
                factor, total = incoming[:, None] / ctx.temperature, total[:, None]
                is_entropy = ctx.with_entropy and number == 0
                own = factor * (-log_p - total) if is_entropy else 2 * factor * (log_p.exp() - total)
                slope = own if slope is None else slope + own
        p = log_p.exp_()  # nobody else holds it
        grad = p.mul_(-for_chosen if slope is None else slope - for_chosen)
        return grad.scatter_add_(1, targets[:, None], for_chosen), None, None, None, None


def _chunk_rows(hidden: Tensor, logits_fn: LogitsFn) -> int:
    weight = getattr(logits_fn.module, "weight", None) if isinstance(logits_fn, VocabularyHead) else None
    if isinstance(weight, Tensor):
        vocabulary = weight.shape[0]
    else:
        with torch.no_grad():
            vocabulary = logits_fn(hidden[:1]).shape[-1]
    return max(1, CHUNK_ELEMENTS // vocabulary)
