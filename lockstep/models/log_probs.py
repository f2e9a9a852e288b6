"""Log-probs and entropy of chosen tokens from hidden states, one chunk of positions at a time: the full logits never exist.

    hidden (N, H) ── chunk ──► head ──► logits (C, V) / temperature ──► log p(target) (C), entropy (C)

Each chunk is recomputed in the backward pass, so that memory is one chunk's logits. A linear head in half precision on CUDA is
served by `kernels/linear_log_prob.py`, which computes the same from float32 logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lockstep.kernels.exact import same_mode_again
from lockstep.kernels.linear import is_plain, linear_float32
from lockstep.kernels.ops import HALF

LogitsFn = Callable[[Tensor], Tensor]
"""Hidden states (C, H) -> logits (C, V)."""

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once: 64 Mi entries are 256 MB in float32."""

LEAST_LOG_PROB = -80.0
"""Smaller log-probs count as this one in the entropy: times its probability it is nothing, and -inf would give NaN."""


HEADS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bert", "ernie", "roc_bert"), ("cls",)),
    "electra": ("generator_predictions", "generator_lm_head"),
    "modernbert-decoder": ("lm_head", "decoder"),
}
"""Model types whose head is more than the output embeddings -> the modules of the causal LM that hidden states pass."""

MULTIPLIED = ("hyperclovax",)
"""Model types whose logits are multiplied by `logits_scaling`; those of all others are divided."""


@dataclass(frozen=True)
class VocabularyHead:
    """Hidden states -> float32 logits: cap * tanh(factor * module(hidden) / divisor / cap), each step only if it is set.

    before: modules that the hidden states pass first, in order.
    """

    module: nn.Module
    factor: float | None = None
    divisor: float | None = None
    cap: float | None = None
    before: tuple[nn.Module, ...] = ()

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = self.enter(hidden)
        plain = is_plain(self.module) and self.module.bias is None
        out: Tensor = linear_float32(hidden, self.module.weight) if plain else self.module(hidden).float()  # type: ignore[arg-type]
        if self.factor is not None:
            out = out * self.factor
        if self.divisor is not None:
            out = out / self.divisor
        return out if self.cap is None else torch.tanh(out / self.cap) * self.cap

    def enter(self, hidden: Tensor) -> Tensor:
        """The input of `module`, in the dtype of its weight: Mamba's residual stream is in float32."""
        for module in self.before:
            hidden = module(hidden)
        weight = getattr(self.module, "weight", None)  # a block of several modules (BERT) has none
        return hidden.to(weight.dtype) if isinstance(weight, Tensor) and weight.is_floating_point() else hidden

    def is_fused_for(self, hidden: Tensor) -> bool:
        """Whether `kernels/linear_log_prob.py` serves this head; one with an adapter is called as a module."""
        return hidden.is_cuda and type(self.module) is nn.Linear and self.module.weight.dtype in HALF


def vocabulary_head(model: PreTrainedModel) -> VocabularyHead:
    """Hidden states -> float32 logits, with the final soft-capping or scaling that some architectures apply."""
    config = model.config.get_text_config()
    scaling = getattr(config, "logits_scaling", None)
    multiplies = config.model_type in MULTIPLIED
    names = HEADS.get(config.model_type)
    *before, last = [getattr(model, name) for name in names] if names else [model.get_output_embeddings()]
    return VocabularyHead(
        last,
        factor=scaling if multiplies else getattr(config, "logit_scale", None),
        divisor=None if multiplies else scaling,
        cap=getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),
        before=tuple(before),
    )


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

    log_probs: log p[target]; entropy: -Σ p log p; sum_pi_squared: Σ p². The last two only if asked for, without gradients if
    `entropy_gradient` is false.
    """
    if isinstance(logits_fn, VocabularyHead) and logits_fn.is_fused_for(hidden):
        log_probs, entropy, squares = _fused(hidden, targets, logits_fn, temperature)
        statistics = {"log_probs": log_probs}
        if not entropy_gradient:
            entropy, squares = entropy.detach(), squares.detach()
        statistics |= {"entropy": entropy} if with_entropy else {}
        return statistics | ({"sum_pi_squared": squares} if with_sum_pi_squared else {})

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        log_p = torch.log_softmax(logits_fn(h) / temperature, -1)
        out = [log_p.gather(-1, y[:, None]).squeeze(-1)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            if with_entropy:
                out.append(-(log_p.exp() * log_p.clamp_min(LEAST_LOG_PROB)).sum(-1))
            if with_sum_pi_squared:
                out.append((2 * log_p).exp().sum(-1))
        return tuple(out)

    names = ["log_probs"] + ["entropy"] * with_entropy + ["sum_pi_squared"] * with_sum_pi_squared
    size = _chunk_rows(hidden, logits_fn)
    if len(hidden) <= size:
        return dict(zip(names, chunk(hidden, targets)))
    again = (
        partial(checkpoint, chunk, use_reentrant=False, context_fn=same_mode_again)
        if torch.is_grad_enabled()
        else chunk
    )
    pieces = [again(h, y) for h, y in zip(hidden.split(size), targets.split(size))]
    return {name: torch.cat(parts) for name, parts in zip(names, zip(*pieces))}


def _fused(hidden: Tensor, targets: Tensor, head: VocabularyHead, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    from lockstep.kernels.linear_log_prob import LogitForm, linear_log_prob

    assert isinstance(head.module, nn.Linear)
    factor = 1.0 if head.factor is None else head.factor
    factor = factor if head.divisor is None else factor / head.divisor
    return linear_log_prob(
        head.enter(hidden), head.module.weight, head.module.bias, targets, LogitForm(temperature, factor, head.cap)
    )


def _chunk_rows(hidden: Tensor, logits_fn: LogitsFn) -> int:
    weight = getattr(logits_fn.module, "weight", None) if isinstance(logits_fn, VocabularyHead) else None
    if isinstance(weight, Tensor):
        vocabulary = weight.shape[0]
    else:
        with torch.no_grad():
            vocabulary = logits_fn(hidden[:1]).shape[-1]
    return max(1, CHUNK_ELEMENTS // vocabulary)
