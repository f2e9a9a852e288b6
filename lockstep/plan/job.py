"""A configuration as work for devices: the models, where they run, and how many tokens each phase gives them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.actor_rollout_ref import SERVER_ENGINES, RolloutConfig
from lockstep.config.model import FSDPEngineConfig, sequence_parallel_size
from lockstep.config.placement import need_reference_policy, needed_models, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.plan.adapters import Adapters, FourBitBase, adapters_of, four_bit_base
from lockstep.plan.batch_units import BatchUnits, Lengths, batch_units, log_prob_limits, micro_limits
from lockstep.plan.hardware import Device
from lockstep.plan.model_shape import ModelShape

_ITEMSIZE = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


@dataclass(frozen=True)
class Model:
    """One model on the ranks of its pool.

    machines:        that the ranks are on.
    master, compute: bytes per parameter of the master weights and of what computes.
    shards:          ranks that a copy of it is distributed over.
    update:          units of an optimizer step; None for a model that is not trained.
    passes:          phase without gradient -> its units.
    updates:         optimizer steps in a training step.
    decodes:         whether it generates the rollouts.
    adapters:        trained instead of its parameters.
    four_bit:        the part of the frozen parameters that is in 4 bits.
    """

    role: str
    pool: str
    ranks: int
    machines: int
    shape: ModelShape
    master: int
    compute: int
    shards: int
    engine: FSDPEngineConfig
    checkpointing: bool
    update: BatchUnits | None
    passes: dict[str, BatchUnits]
    updates: int = 0
    decodes: bool = False
    adapters: Adapters | None = None
    four_bit: FourBitBase | None = None

    @property
    def is_sharded(self) -> bool:
        return self.ranks > 1 or self.engine.offload_policy

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient and moments."""
        if self.update is None:
            return 0
        return self.shape.parameters if self.adapters is None else self.adapters.parameters

    @property
    def num_frozen(self) -> int:
        return self.shape.parameters if self.update is None or self.adapters is not None else 0

    @property
    def num_adapters(self) -> int:
        """Parameters of the adapters."""
        return 0 if self.adapters is None else self.adapters.parameters

    @property
    def four_bit_bytes(self) -> float:
        """Of the weights in 4 bits, which are not sharded."""
        return 0.0 if self.four_bit is None else self.four_bit.bytes

    @property
    def num_wide(self) -> int:
        """Parameters that are not in 4 bits, without adapters."""
        return self.shape.parameters - (0 if self.four_bit is None else self.four_bit.parameters)

    def layer_bytes(self, num_tokens: int) -> int:
        """What the forward of one layer keeps for the backward."""
        entries = 0 if self.adapters is None else self.adapters.layer_entries
        if self.four_bit is not None:  # its modules keep the activated gate and its product with up, too
            entries += 2 * self.shape.active_experts * self.shape.inner
        return self.shape.activation_bytes(num_tokens, self.compute) + num_tokens * entries * self.compute


@dataclass(frozen=True)
class Rollout:
    """Of one engine: `tensor_parallel` ranks, which share its weights and KV cache.

    concurrent:   most sequences that decode together.
    cache_tokens: size of the KV cache for all of them; the devices may have room for fewer.
    utilization:  share of a device's memory that weights and KV cache may use.
    is_vllm:      has its own copy of the weights, and reserves its share of the memory.
    is_remote:    servers generate, which are not part of the plan.
    sleeps:       vLLM's memory is free while it does not generate.
    """

    tensor_parallel: int
    sequences: int
    concurrent: int
    cache_tokens: int
    prefill_tokens: int
    utilization: float
    is_vllm: bool = False
    is_remote: bool = False
    sleeps: bool = False


@dataclass(frozen=True)
class Job:
    device: Device
    lengths: Lengths
    prompts: int
    samples: int
    models: list[Model]
    rollout: Rollout

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def model(self, role: str) -> Model:
        return next(model for model in self.models if model.role == role)


def job_of(config: PPOConfig, device: Device, lengths: Lengths, shape_of: Callable[[str, str], ModelShape]) -> Job:
    """shape_of: (path, config section) -> the model's sizes."""
    policy, data = config.actor_rollout_ref, config.data
    actor, rollout = policy.actor, policy.rollout
    shape = shape_of(policy.model.path, "actor_rollout_ref.model")
    adapters, four_bit = adapters_of(policy.model, shape), four_bit_base(policy.model, shape)
    roles = needed_models(config)
    pools = pools_of(config, roles)
    prompts, samples = data.train_batch_size, rollout.n
    sequences = prompts * samples
    mini = min(actor.ppo_mini_batch_size * samples, sequences)
    updates = math.ceil(sequences / mini) * actor.ppo_epochs
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
        pool = pools.role_pools[role]
        return Model(role, pool, ranks, len(pools.spec[pool]), shape, master, compute, shards, engine, **more)

    packed = policy.model.use_remove_padding
    own_pool, is_remote = "rollout" in pools.role_pools, rollout.name in SERVER_ENGINES
    role = "actor" if own_pool else "actor_rollout"
    dynamic = micro_limits(actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu)
    passes = {}
    if old_log_probs:
        passes["old log-probs"] = units(sequences, role, actor, packed, **log_prob_limits(rollout))
    if adapters is not None and need_reference_policy(config):  # the same model without its adapters
        passes["reference log-probs"] = units(sequences, role, actor, packed, **log_prob_limits(policy.ref))
    models = [
        model(
            role,
            shape,
            actor,
            actor.fsdp_config,
            checkpointing=policy.model.enable_gradient_checkpointing,
            update=units(mini, role, actor, packed, **dynamic),
            passes=passes,
            updates=updates,
            decodes=not own_pool and not is_remote,
            adapters=adapters,
            four_bit=four_bit,
        )
    ]
    frozen: dict[str, Any] = {"checkpointing": False, "update": None}
    if own_pool and not is_remote:
        own = {"adapters": adapters, "four_bit": None if rollout.name == "vllm" else four_bit, **frozen}
        models.append(model("rollout", shape, actor, actor.fsdp_config, passes={}, decodes=True, **own))
    if "ref" in roles:
        forward = units(sequences, "ref", policy.ref, packed, **log_prob_limits(policy.ref))
        passes = {"reference log-probs": forward}
        models.append(model("ref", shape, policy.ref, policy.ref.fsdp_config, passes=passes, **frozen))
    if "critic" in roles:
        models.append(_critic(config, shape_of, model, units, sequences))
    if "rm" in roles:
        reward = config.reward_model
        limits = micro_limits(
            reward.micro_batch_size_per_gpu, reward.use_dynamic_bsz, reward.forward_max_token_len_per_gpu
        )
        forward = units(sequences, "rm", reward, reward.model.use_remove_padding, **limits)
        shape = shape_of(reward.model.path, "reward_model.model")
        passes = {"reward model": forward}
        models.append(model("rm", shape, reward, reward.model.fsdp_config, passes=passes, **frozen))
    num_engines = max(1, pools.world_size("rollout" if own_pool else role) // rollout.tensor_model_parallel_size)
    engine = _rollout(rollout, math.ceil(sequences / num_engines), lengths, device)
    return Job(device, lengths, prompts, samples, models, engine)


def _needs_old_log_probs(config: PPOConfig, updates: int) -> bool:
    """Whether a pass computes them: not if the rollout's are used, nor if the only update can."""
    correction = config.algorithm.rollout_correction
    read_before = config.algorithm.use_kl_in_reward or correction.rollout_is is not None
    always = config.actor_rollout_ref.actor.old_log_prob_pass == "always"
    return not correction.bypass_mode and (updates > 1 or read_before or always)


def _rollout(config: RolloutConfig, sequences: int, lengths: Lengths, device: Device) -> Rollout:
    """sequences: of one engine."""
    concurrent = min(config.max_num_seqs, sequences)
    longest = config.max_model_len or config.prompt_length + config.response_length
    block = config.kv_block_size
    cache = (concurrent if device.is_cpu else config.max_num_seqs) * (math.ceil(longest / block) + 1) * block
    prefill = min(config.max_num_batched_tokens, sequences * lengths.prompt)
    return Rollout(
        tensor_parallel=config.tensor_model_parallel_size,
        sequences=sequences,
        concurrent=concurrent,
        cache_tokens=cache,
        prefill_tokens=prefill,
        utilization=config.gpu_memory_utilization,
        is_vllm=config.name == "vllm",
        is_remote=config.name in SERVER_ENGINES,
        sleeps=config.free_cache_engine and not device.is_cpu,
    )


def _critic(config: PPOConfig, shape_of: Any, model: Any, units: Any, sequences: int) -> Model:
    critic = config.critic
    packed, mini = critic.model.use_remove_padding, min(critic.ppo_mini_batch_size * critic.rollout_n, sequences)
    update = micro_limits(critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu)
    forward = micro_limits(
        critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu
    )
    shape = shape_of(critic.model.path, "critic.model")
    found: Model = model(
        "critic",
        shape,
        critic,
        critic.model.fsdp_config,
        checkpointing=critic.model.enable_gradient_checkpointing,
        update=units(mini, "critic", critic, packed, **update),
        passes={"values": units(sequences, "critic", critic, packed, **forward)},
        updates=math.ceil(sequences / mini) * critic.ppo_epochs,
        adapters=adapters_of(critic.model, shape),
        four_bit=four_bit_base(critic.model, shape),
    )
    return found


def _itemsize(name: str, device: Device) -> int:
    return (4 if device.is_cpu else 2) if name == "auto" else _ITEMSIZE[name]
