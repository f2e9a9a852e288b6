"""Aggregate token losses to a scalar (`agg_loss`), with the counts that make it independent of the split.

A mini-batch is split into micro-batches over `dp_size` ranks. Each micro-batch calls `agg_loss` inside `mini_batch_counts`, with
the counts of the whole mini-batch (`count_batch`). The micro-batch losses are summed, and the ranks' gradients are averaged,
which the factor `dp_size` undoes. The sum then equals the loss of the whole mini-batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, get_args

from torch import Tensor

from lockstep.config.actor_rollout_ref import LossAggMode
from lockstep.registry import did_you_mean
from lockstep.utils.masked import masked_mean, masked_sum

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)

_COUNTS: ContextVar[dict[str, Any] | None] = ContextVar("mini_batch_counts", default=None)


@contextmanager
def mini_batch_counts(counts: dict[str, Any]) -> Iterator[None]:
    """Losses inside are parts of a mini-batch with these counts: the one place where a loss gets them from."""
    token = _COUNTS.set(counts)
    try:
        yield
    finally:
        _COUNTS.reset(token)


def batch_counts(config: Any) -> dict[str, Any]:
    """Counts of the mini-batch that this call is a part of, empty if it is the whole; a program of verl has them in its config."""
    counts = _COUNTS.get()
    return getattr(config, "global_batch_info", {}) if counts is None else counts


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A scalar from `loss_mat` (B, R) over the tokens selected by `loss_mask` (B, R).

    token-mean               sum of all tokens / number of tokens
    token-sum                sum of all tokens
    seq-mean-token-sum       mean over sequences of their sums
    seq-mean-token-mean      mean over sequences of their means
    seq-mean-token-sum-norm  seq-mean-token-sum / loss_scale_factor (Dr.GRPO; R if None)

    dp_size, batch_num_tokens, global_batch_size: ranks, tokens and sequences of the whole mini-batch (see `count_batch`);
    by default those of `mini_batch_counts` or, outside of it, of this call. Sequences without tokens are not counted. An
    empty mask gives 0.
    """
    if batch_num_tokens is None and global_batch_size is None and (counts := _COUNTS.get()) is not None:
        dp_size = counts.get("dp_size", 1)
        batch_num_tokens = counts.get("batch_num_tokens")
        global_batch_size = counts.get("global_batch_size")
        loss_scale_factor = counts.get("loss_scale_factor") if loss_scale_factor is None else loss_scale_factor
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}: no such mode. "
            f"{did_you_mean(loss_agg_mode, LOSS_AGG_MODES)}"
        )
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        num_tokens = _global_count("batch_num_tokens", batch_num_tokens, loss_mask.bool().sum(), dp_size)
        return masked_sum(loss_mat, loss_mask) / num_tokens * dp_size
    per_sequence = masked_mean if loss_agg_mode == "seq-mean-token-mean" else masked_sum
    loss_B = per_sequence(loss_mat, loss_mask, axis=-1)
    num_sequences = _global_count("global_batch_size", global_batch_size, loss_mask.bool().any(dim=-1).sum(), dp_size)
    loss = loss_B.sum() / num_sequences * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        loss = loss / (loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return loss


def count_batch(response_mask: Tensor, dp_size: int = 1, loss_scale_factor: float | None = None) -> dict[str, Any]:
    """Counts of one rank's mini-batch, for `mini_batch_counts` or as keyword arguments of `agg_loss`.

    With several ranks, sum batch_num_tokens and global_batch_size over them before use.
    """
    return {
        "dp_size": dp_size,
        "batch_num_tokens": int(response_mask.bool().sum()),
        "global_batch_size": int(response_mask.bool().any(dim=-1).sum()),
        "loss_scale_factor": response_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor,
    }


def _global_count(name: str, given: int | None, here: Tensor, dp_size: int) -> int | Tensor:
    """The divisor, at least 1, so that a mini-batch without tokens has loss 0 instead of NaN."""
    if given is not None:
        return max(given, 1)
    if dp_size > 1:
        raise ValueError(f"agg_loss needs {name} of the whole mini-batch with dp_size={dp_size}")
    return here.clamp(min=1)
