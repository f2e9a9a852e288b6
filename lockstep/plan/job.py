"""A configuration as work for devices: the models, where they run, and how many tokens each phase gives them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import FSDPEngineConfig, sequence_parallel_size
from lockstep.config.placement import needed_models, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.plan.batch_units import BatchUnits, Lengths, batch_units, micro_limits
from lockstep.plan.hardware import Device
from lockstep.plan.model_shape import ModelShape

_ITEMSIZE = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


@dataclass(frozen=True)
class Model:
    """One model on the ranks of its pool.

    master, compute: bytes per parameter of the master weights and of what computes.
    shards:          ranks that a copy of it is distributed over.
    update, forward: units of an optimizer step and of a pass without gradient; None if there is none.
    updates:         optimizer steps in a training step.
    decodes:         whether it generates the rollouts.
    """

    role: str
    pool: str
    ranks: int
    shape: ModelShape
    master: int
    compute: int
    shards: int
    engine: FSDPEngineConfig
    checkpointing: bool
    update: BatchUnits | None
    forward: BatchUnits | None
    updates: int = 0
    decodes: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.ranks > 1 or self.engine.offload_policy


@dataclass(frozen=True)
class Rollout:
    """Of one rank.

    concurrent:   most sequences that decode together.
    cache_tokens: size of the KV cache for all of them; the device may have room for fewer.
    utilization:  share of the device's memory that weights and KV cache may use.
    """

    sequences: int
    concurrent: int
    cache_tokens: int
    prefill_tokens: int
    utilization: float


@dataclass(frozen=True)
class Job:
    """old_log_probs: whether they take a separate pass."""

    device: Device
    lengths: Lengths
    prompts: int
    samples: int
    models: list[Model]
    rollout: Rollout
    old_log_probs: bool

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def model(self, role: str) -> Model:
        return next(model for model in self.models if model.role == role)


def job_of(config: PPOConfig, device: Device, lengths: Lengths, shape_of: Callable[[str, str], ModelShape]) -> Job:
    """shape_of: (path, config section) -> the model's sizes."""
    policy, data = config.actor_rollout_ref, config.data
    actor, rollout = policy.actor, policy.rollout
    roles = needed_models(config)
    pools = pools_of(config, roles)
    prompts, samples = data.train_batch_size, rollout.n
    sequences = prompts * samples
    mini = min(actor.ppo_mini_batch_size * samples, sequences)
    updates = math.ceil(sequences / mini) * actor.ppo_epochs
    shape = shape_of(policy.model.path, "actor_rollout_ref.model")
    old_log_probs = _needs_old_log_probs(config, updates)

    def units(num_rows: int, role: str, section: Any, packed: bool, **limits: Any) -> BatchUnits:
        return batch_units(
            num_rows,
            samples=samples,
            lengths=lengths,
            ranks=pools.world_size(role),
            sequence_parallel=sequence_parallel_size(section),
            packed=packed,
            **limits,
        )

    def model(role: str, shape: ModelShape, section: Any, engine: FSDPEngineConfig, **more: Any) -> Model:
        ranks = pools.world_size(role)
        master, compute = (_itemsize(name, device) for name in (engine.model_dtype, engine.dtype))
        shards = ranks if engine.fsdp_size == -1 else engine.fsdp_size
        return Model(role, pools.role_pools[role], ranks, shape, master, compute, shards, engine, **more)

    packed = policy.model.use_remove_padding
    own_pool = "rollout" in pools.role_pools
    role = "actor" if own_pool else "actor_rollout"
    dynamic = micro_limits(actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu)
    passes = micro_limits(
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
    )
    models = [
        model(
            role,
            shape,
            actor,
            actor.fsdp_config,
            checkpointing=policy.model.enable_gradient_checkpointing,
            update=units(mini, role, actor, packed, **dynamic),
            forward=units(sequences, role, actor, packed, **passes) if old_log_probs else None,
            updates=updates,
            decodes=not own_pool,
        )
    ]
    frozen: dict[str, Any] = {"checkpointing": False, "update": None}
    if own_pool:
        models.append(model("rollout", shape, actor, actor.fsdp_config, forward=None, decodes=True, **frozen))
    if "ref" in roles:
        ref = policy.ref
        limits = micro_limits(
            ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu
        )
        forward = units(sequences, "ref", ref, packed, **limits)
        models.append(model("ref", shape, ref, ref.fsdp_config, forward=forward, **frozen))
    if "critic" in roles:
        models.append(_critic(config, shape_of, model, units, sequences))
    if "rm" in roles:
        reward = config.reward_model
        limits = micro_limits(
            reward.micro_batch_size_per_gpu, reward.use_dynamic_bsz, reward.forward_max_token_len_per_gpu
        )
        forward = units(sequences, "rm", reward, reward.model.use_remove_padding, **limits)
        shape = shape_of(reward.model.path, "reward_model.model")
        models.append(model("rm", shape, reward, reward.model.fsdp_config, forward=forward, **frozen))
    per_rank = math.ceil(sequences / pools.world_size("rollout" if own_pool else role))
    return Job(device, lengths, prompts, samples, models, _rollout(rollout, per_rank, lengths, device), old_log_probs)


def _needs_old_log_probs(config: PPOConfig, updates: int) -> bool:
    """Whether a pass computes them: not if the rollout's are used, nor if the only update can."""
    correction = config.algorithm.rollout_correction
    read_before = config.algorithm.use_kl_in_reward or correction.rollout_is is not None
    always = config.actor_rollout_ref.actor.old_log_prob_pass == "always"
    return not correction.bypass_mode and (updates > 1 or read_before or always)


def _rollout(config: RolloutConfig, sequences: int, lengths: Lengths, device: Device) -> Rollout:
    """sequences: of one rank."""
    concurrent = min(config.max_num_seqs, sequences)
    longest = config.max_model_len or config.prompt_length + config.response_length
    block = config.kv_block_size
    cache = (concurrent if device.is_cpu else config.max_num_seqs) * (math.ceil(longest / block) + 1) * block
    prefill = min(config.max_num_batched_tokens, sequences * lengths.prompt)
    return Rollout(sequences, concurrent, cache, prefill, config.gpu_memory_utilization)


def _critic(config: PPOConfig, shape_of: Any, model: Any, units: Any, sequences: int) -> Model:
    critic = config.critic
    packed, mini = critic.model.use_remove_padding, min(critic.ppo_mini_batch_size * critic.rollout_n, sequences)
    update = micro_limits(critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu)
    forward = micro_limits(
        critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu
    )
    found: Model = model(
        "critic",
        shape_of(critic.model.path, "critic.model"),
        critic,
        critic.model.fsdp_config,
        checkpointing=critic.model.enable_gradient_checkpointing,
        update=units(mini, "critic", critic, packed, **update),
        forward=units(sequences, "critic", critic, packed, **forward),
        updates=math.ceil(sequences / mini) * critic.ppo_epochs,
    )
    return found


def _itemsize(name: str, device: Device) -> int:
    return (4 if device.is_cpu else 2) if name == "auto" else _ITEMSIZE[name]
