"""Turn a matrix of token losses into one number: `agg_loss`, and the counts that make it independent of the split.

A mini-batch is cut into micro-batches and spread over `dp_size` ranks. Each micro-batch calls `agg_loss` with the
counts of the whole mini-batch (`count_batch`), the micro losses are added up, and the ranks' gradients are averaged,
which `dp_size` undoes. The sum then equals the loss of the undivided mini-batch.
"""

from typing import Any

from torch import Tensor

from lockstep.registry import did_you_mean
from lockstep.utils.masked import masked_mean, masked_sum

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """One number from `loss_mat` (B, R) over the tokens that `loss_mask` (B, R) selects.

    token-mean               sum of all tokens / number of tokens
    token-sum                sum of all tokens
    seq-mean-token-sum       mean over sequences of each one's sum
    seq-mean-token-mean      mean over sequences of each one's mean
    seq-mean-token-sum-norm  seq-mean-token-sum / loss_scale_factor (Dr.GRPO; the response width R where it is None)

    dp_size, batch_num_tokens, global_batch_size: the whole mini-batch's ranks, tokens and sequences (see
    `count_batch`); without counts, those of this call. A sequence without any token counts as none. An empty mask
    gives 0.
    """
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
    """The counts of one rank's mini-batch, as keyword arguments of `agg_loss` and as `global_batch_info` of a config.

    With several ranks, batch_num_tokens and global_batch_size must be summed over them before use.
    """
    return {
        "dp_size": dp_size,
        "batch_num_tokens": int(response_mask.bool().sum()),
        "global_batch_size": int(response_mask.bool().any(dim=-1).sum()),
        "loss_scale_factor": response_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor,
    }


def _global_count(name: str, given: int | None, here: Tensor, dp_size: int) -> int | Tensor:
    """The count to divide by, at least 1: a mini-batch without tokens has loss 0, not NaN."""
    if given is not None:
        return max(given, 1)
    if dp_size > 1:
        raise ValueError(f"agg_loss: {name} of the whole mini-batch is needed with dp_size={dp_size}")
    return here.clamp(min=1)
