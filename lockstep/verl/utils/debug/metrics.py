"""verl.utils.debug.metrics"""

import torch

from lockstep.protocol import DataProto

STATISTICS = (
    *(f"training/rollout_probs_diff_{name}" for name in ("max", "mean", "std")),
    "training/rollout_actor_probs_pearson_corr",
)


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How the rollout's probabilities of the sampled tokens differ from the trainer's, over the response mask.

    Reads rollout_log_probs, old_log_probs and one of response_mask, loss_mask and attention_mask. Without a token in the mask the
    statistics are NaN.
    """
    tensors = data.tensors
    masks = [tensors[name] for name in ("response_mask", "loss_mask", "attention_mask") if name in tensors.keys()]  # noqa: SIM118
    if not masks:
        raise KeyError("calculate_debug_metrics needs response_mask, loss_mask or attention_mask")
    mask = masks[0][:, -tensors["old_log_probs"].shape[1] :]
    rollout, actor = (tensors[name][mask.bool()].float().exp() for name in ("rollout_log_probs", "old_log_probs"))
    if not len(rollout):
        return {"training/rollout_probs_diff_valid": 0, **dict.fromkeys(STATISTICS, float("nan"))}
    difference = (actor - rollout).abs()
    correlation = torch.corrcoef(torch.stack((actor, rollout)))[0, 1]
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std().item() if len(difference) > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": correlation.item(),
    }
