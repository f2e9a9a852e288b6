"""verl.utils.debug.metrics"""

import torch

from lockstep.protocol import DataProto


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How the rollout's probabilities of the sampled tokens differ from the trainer's, over the response mask.

    Reads rollout_log_probs, old_log_probs and response_mask (or attention_mask).
    """
    tensors = data.tensors
    mask = tensors.get("response_mask", None)
    if mask is None:
        mask = tensors["attention_mask"][:, -tensors["responses"].shape[1] :]
    rollout, actor = (tensors[name][mask.bool()].float().exp() for name in ("rollout_log_probs", "old_log_probs"))
    if not len(rollout):
        return {"training/rollout_probs_diff_valid": 0}
    difference = (actor - rollout).abs()
    correlation = torch.corrcoef(torch.stack((actor, rollout)))[0, 1]
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std().item() if len(difference) > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": correlation.item(),
    }
