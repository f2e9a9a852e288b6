"""Log-probs and entropy of chosen tokens from hidden states, a chunk of positions at a time: the full logits never exist.

    hidden (N, H) ── chunk ──► head ──► logits (C, V) / temperature ──► log p(target) (C), entropy (C)

Each chunk is recomputed in the backward pass, so that memory is one chunk's logits forward and backward. A linear head in half
precision on CUDA is served by `kernels/linear_log_prob.py`, which computes the same from logits in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
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
) -> dict[str, Tensor]:
    """Statistics (N) in float32 of the distributions p = softmax(logits / temperature).

    log_probs: log p[target]; entropy: -Σ p log p; sum_pi_squared: Σ p². The last two only where asked for.
    """
    if isinstance(logits_fn, VocabularyHead) and logits_fn.is_fused_for(hidden):
        log_probs, entropy, squares = _fused(hidden, targets, logits_fn, temperature)
        statistics = {"log_probs": log_probs}
        statistics |= {"entropy": entropy} if with_entropy else {}
        return statistics | ({"sum_pi_squared": squares} if with_sum_pi_squared else {})

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = logits_fn(h).float()
        if temperature != 1.0:
            logits = logits / temperature
        # shifted so that the largest is 0: sums over a large vocabulary of large logits would lose digits of the entropy
        logits = logits - logits.detach().amax(-1, keepdim=True)
        log_total = logits.logsumexp(-1)
        out = [logits.gather(-1, y[:, None]).squeeze(-1) - log_total]
        if with_entropy or with_sum_pi_squared:
            weights = logits.exp()
            total = weights.sum(-1)
        if with_entropy:
            out.append(log_total - (weights * logits).sum(-1) / total)
        if with_sum_pi_squared:
            out.append((weights**2).sum(-1) / total**2)
        return tuple(out)

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


def _chunk_rows(hidden: Tensor, logits_fn: LogitsFn) -> int:
    with torch.no_grad():
        vocabulary = logits_fn(hidden[:1]).shape[-1]
    return max(1, CHUNK_ELEMENTS // vocabulary)
