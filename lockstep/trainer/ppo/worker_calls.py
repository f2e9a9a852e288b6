"""What a step asks of the workers: forward passes and updates, started on all groups before the first result is waited for.

batch ─► input columns, balanced over the ranks ─► log-probs, values ─► columns of the batch
batch ─► mini-batches, laid out for the ranks ─► update ─► metrics
"""

from collections.abc import Mapping
from typing import Any, Literal

from lockstep.config.old_log_probs import OldLogProbs, old_log_probs_source
from lockstep.config.placement import need_critic
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.protocol.columns import names_of
from lockstep.protocol.tokens import image_keys
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.mini_batches import Balanced, lay_out, loss_preparation, mini_batches_of
from lockstep.utils.audit import Audits
from lockstep.utils.metrics import reduced_over_ranks
from lockstep.utils.timing import marked_timer

Pass = Literal["old_log_prob", "ref", "values"]
PASSES: dict[Pass, tuple[str, str]] = {
    "old_log_prob": ("actor", "compute_log_prob"),
    "ref": ("ref", "compute_ref_log_prob"),
    "values": ("critic", "compute_values"),
}
"""Timer of each forward pass -> mesh, method."""
Trained = Literal["critic", "actor"]


def critic_warmup(config: PPOConfig) -> int:
    """Steps at the start of the run that update the critic alone."""
    return config.trainer.critic_warmup if need_critic(config) else 0


def old_log_probs_of(batch: DataProto, config: PPOConfig, step: int) -> OldLogProbs:
    """Where the old log-probs of the step come from."""
    actor = config.actor_rollout_ref.actor
    is_one_update = (
        step > critic_warmup(config)
        and actor.ppo_epochs == 1
        and forks.num_conversations(batch) <= actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    )
    return old_log_probs_source(config, is_one_update=is_one_update)


def forward_passes(
    batch: DataProto, groups: Mapping[Pass, Any], config: PPOConfig, timing: dict[str, float], audits: Audits
) -> DataProto:
    """The batch with the outputs of the passes. groups: the worker group of each pass; None skips it. audits: get the findings."""
    names = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
    routes = ["routed_experts"] if "routed_experts" in batch.tensors else []  # which only the actor reads
    waiting = {}
    balanced: dict[tuple[int, bool], Balanced] = {}  # by the number of data-parallel ranks, with and without routes
    for name, group in groups.items():
        if group is None:
            continue
        mesh, method = PASSES[name]
        own_routes = routes if mesh == "actor" else []
        with marked_timer(name, timing):
            num_ranks = group.mesh(mesh).dp_size if config.trainer.balance_batch else 1
            key = (num_ranks, bool(own_routes))
            if key not in balanced:
                rows = batch.select([*names, *own_routes], image_keys(batch))
                rows.meta_info["audit"] = audits.levels
                balanced[key] = Balanced.over(rows, num_ranks)
            waiting[name] = balanced[key].call(getattr(group, method))
    for name, outputs in waiting.items():
        with marked_timer(name, timing):
            columns = outputs()
            audits.add(columns.meta_info.pop("findings", {}))
            batch = batch.union(columns)
    return batch


def update_models(
    batch: DataProto,
    groups: Mapping[Trained, Any],
    config: PPOConfig,
    step: int,
    timing: dict[str, float],
    audits: Audits,
) -> dict[str, float]:
    """The metrics of the updates. groups: the worker group of each model to update; None skips it. audits: get the findings."""
    waiting = {}
    for role, group in groups.items():
        if group is None:
            continue
        with marked_timer(f"update_{role}", timing):
            laid_out = update_batch(batch, role, config, step, group.mesh(role).dp_size)
            waiting[role] = getattr(group, f"update_{role}")(laid_out)
    metrics: dict[str, float] = {}
    for role, output in waiting.items():
        with marked_timer(f"update_{role}", timing):
            meta_info = output.get().meta_info
            audits.add(meta_info.get("findings", {}))
            metrics |= reduced_over_ranks(meta_info["metrics"])
    return metrics


def update_batch(batch: DataProto, role: Trained, config: PPOConfig, step: int, num_ranks: int) -> DataProto:
    """The batch in mini-batches, laid out for the ranks."""
    actor = config.actor_rollout_ref.actor
    num_samples = config.actor_rollout_ref.rollout.n
    rule = mini_batches_of(config.critic, num_samples, step)
    if role == "actor":
        rule = mini_batches_of(actor, num_samples, step, loss_preparation(actor, step))
    else:
        batch = batch.select([name for name in names_of(batch.batch) if name != "routed_experts"], image_keys(batch))
    return lay_out(batch, rule, num_ranks, balance=config.trainer.balance_batch)
