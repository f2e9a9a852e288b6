"""The loss functions that workers pass to their engines, composed from `algorithms`."""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.losses.aggregate import agg_loss, mini_batch_counts
from lockstep.algorithms.losses.policy import PolicyLossFn, get_policy_loss_fn, policy_loss_mode, with_loss_settings
from lockstep.algorithms.losses.value import compute_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.critic import CriticConfig
from lockstep.engines.train.train_engine import LossFn, TrainEngine
from lockstep.engines.train.trial import SplitCheck
from lockstep.protocol.columns import Batch
from lockstep.protocol.tokens import entries
from lockstep.registry import defined_at, describe
from lockstep.utils.rollout_gap import RolloutGap
from lockstep.workers.updates import token_share


def actor_loss_fn(
    config: ActorConfig,
    info: dict[str, Any],
    prepared: Iterable[str] = (),
    gap: RolloutGap | None = None,
    check: SplitCheck | None = None,
    load: "ExpertLoad | None" = None,
) -> LossFn:
    """Policy loss, minus the entropy bonus, plus the KL to the reference, plus the load-balance loss of experts.

    prepared: names of the columns from `prepare_policy_loss`.
    gap: collects the difference between the rollout's log-probs and the current policy's.
    check: of the loss, on the first micro-batch that has a gradient.
    load: collects how often each expert computed.

    Rows have no `old_log_probs` if the update is the only one of its step: the current log-probs are the old ones then.
    """
    policy_loss = get_policy_loss_fn(policy_loss_mode(config))
    prepared = tuple(prepared)
    seen = with_loss_settings(config)
    object.__setattr__(seen, "global_batch_info", info)  # where losses that were written for verl read the counts

    def loss_of(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask, log_probs = rows["response_mask"], outputs["log_probs"]
        result = policy_loss(
            old_log_prob=rows["old_log_probs"] if "old_log_probs" in rows else log_probs.detach(),
            log_prob=log_probs,
            advantages=rows["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=seen,
            rollout_is_weights=rows.get("rollout_is_weights", None),
            **(seen.policy_loss.loss_kwargs | {name: rows[name] for name in prepared}),
        )
        loss, token_means = _checked(result, policy_loss)
        if log_probs.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode: the loss of {defined_at(policy_loss)} has no gradient, so nothing "
                "would be learned. Is `log_prob` detached, or the loss computed under torch.no_grad()?"
            )
        share = token_share(mask, info)
        metrics = {name: share * value for name, value in token_means.items()}  # a user's loss may return plain numbers
        metrics["actor/pg_loss"] = loss
        if "entropy" in outputs:
            entropy = agg_loss(outputs["entropy"], mask, config.loss_agg_mode)
            metrics["actor/entropy"] = entropy
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = kl_penalty(log_probs, rows["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(kl, mask, config.loss_agg_mode)
            metrics["actor/kl_loss"] = kl_loss
            loss = loss + config.kl_loss_coef * kl_loss
        if "route_mismatch" in outputs:
            metrics["actor/route_mismatch"] = agg_loss(outputs["route_mismatch"], mask, "token-mean")
        if "router_aux_loss" in outputs:
            per_row = outputs["router_aux_loss"][:, None].expand_as(log_probs)
            router_loss = agg_loss(per_row, mask, "seq-mean-token-mean")
            metrics["actor/router_aux_loss"] = router_loss
            loss = loss + config.router_aux_loss_coef * router_loss
        return loss, metrics

    @mini_batch_counts(info)
    def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        if gap is not None and "rollout_log_probs" in rows:
            mismatch = outputs.get("route_mismatch")
            gap.add(rows["rollout_log_probs"], outputs["log_probs"], rows["response_mask"], mismatch)
        if load is not None:
            load.add(outputs["router_load"])
        if check is not None:
            check(loss_of, outputs, rows, f"policy loss {defined_at(policy_loss)}")
        return loss_of(outputs, rows)

    def restart() -> None:
        if gap is not None:
            gap.restart()
        if load is not None:
            load.restart()

    loss_fn.restart = restart  # type: ignore[attr-defined]
    return loss_fn


def has_advantages(rows: Batch) -> bool:
    """Whether a token has an advantage that is not zero."""
    advantages, mask = entries(rows, "advantages", "response_mask")
    return bool((advantages * mask).any())


class ExpertLoad:
    """How often each expert computes a token of a response, summed over parts of an update."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._kept: Tensor | None = None

    @torch.no_grad()
    def add(self, load: Tensor) -> None:
        """(B, layers, experts) of one part."""
        part = load.sum(0).double()
        self._sum = part if self._sum is None else self._sum + part

    def keep(self) -> None:
        """The mini-batch is complete."""
        self._kept = self._sum

    def restart(self) -> None:
        """Drop the parts since the last `keep`: they are computed again."""
        self._sum = self._kept

    def metrics(self, engine: TrainEngine) -> dict[str, float]:
        """The largest load of an expert relative to the mean, averaged over layers; collective."""
        if self._sum is None:
            return {}
        total = torch.tensor(engine.global_sum(*self._sum.flatten().tolist())).view_as(self._sum)
        mean = total.mean(-1).clamp_min(1e-9)
        return {"actor/expert_load_max": float((total.amax(-1) / mean).mean())}


def _checked(result: Any, policy_loss: PolicyLossFn) -> tuple[Tensor, dict[str, Any]]:
    """The loss and metrics that a policy loss returned; ValueError if they are something else."""
    if isinstance(result, tuple) and len(result) == 2:
        loss, metrics = result
        if isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(metrics, dict):
            return loss.reshape(()), metrics
    raise ValueError(
        f"actor_rollout_ref.actor.policy_loss.loss_mode: {defined_at(policy_loss)} must return (loss, metrics), a scalar "
        f"tensor and a dict; it returned {describe(result)}"
    )


def critic_loss_fn(config: CriticConfig, info: dict[str, Any]) -> LossFn:
    """Squared error between values and returns, clipped around the old values."""

    @mini_batch_counts(info)
    def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask = rows["response_mask"]
        loss, clip_fraction = compute_value_loss(
            vpreds=outputs["values"],
            returns=rows["returns"],
            values=rows["values"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
        )
        share = token_share(mask, info)
        mean_value = (outputs["values"] * mask).sum() / max(info["batch_num_tokens"], 1)
        return loss, {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": share * clip_fraction,
            "critic/vpred_mean": mean_value,
        }

    return loss_fn
