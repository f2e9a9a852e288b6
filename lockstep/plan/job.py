"""A configuration as work for devices: the models, where they run, and how many tokens each phase gives them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engines import ROLLOUT_ENGINES, RolloutEngineInfo
from lockstep.config.model import FSDPEngineConfig, HFModelConfig, TrainEngineConfig
from lockstep.config.old_log_probs import old_log_probs_source
from lockstep.config.placement import need_reference_policy, needed_models, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import sections_of
from lockstep.config.train_engines import engine_settings, ranks_per_row, ranks_per_sequence
from lockstep.plan.adapters import adapters_of, four_bit_base
from lockstep.plan.batch_units import BatchUnits, Lengths, batch_units, log_prob_limits, micro_limits
from lockstep.plan.hardware import Device
from lockstep.plan.layouts import layout_of
from lockstep.plan.model import Model
from lockstep.plan.model_shape import ModelShape

ShapeOf = Callable[[str, str], ModelShape]
"""(path, config section) -> the model's sizes."""

_ITEMSIZE = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


@dataclass(frozen=True)
class Rollout:
    """One rollout engine: `tensor_parallel` ranks, which share its weights and KV cache.

    concurrent:   most sequences that decode together.
    step_rows:    most rows whose logits a decode step computes: with drafts a sequence has several.
    cache_tokens: size of the KV cache for all of them; the devices may have room for fewer.
    utilization:  share of a device's memory that weights and KV cache may use.
    engine:       what it can do.
    sleeps:       the memory of an engine with its own copy of the weights is free while it does not generate.
    quantizes:    it keeps copies of the linear layers' weights in 8 bits.
    fp8_cache:    its KV cache is in 8 bits.
    """

    tensor_parallel: int
    sequences: int
    concurrent: int
    step_rows: int
    cache_tokens: int
    prefill_tokens: int
    utilization: float
    engine: RolloutEngineInfo
    sleeps: bool = False
    quantizes: bool = False
    fp8_cache: bool = False


NO_ROLLOUT = Rollout(
    tensor_parallel=1,
    sequences=0,
    concurrent=0,
    step_rows=0,
    cache_tokens=0,
    prefill_tokens=0,
    utilization=0.0,
    engine=RolloutEngineInfo(),
)
"""Of a job that does not generate."""


@dataclass(frozen=True)
class Job:
    """samples: sequences of each of the `prompts`, or of each row."""

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

    def kv_bytes(self, model: Model) -> int:
        """KV cache of one token on a rank of the rollout."""
        itemsize = 1 if self.rollout.fp8_cache else model.compute
        expanded = model.four_bit is not None
        return model.shape.kv_bytes(itemsize, self.rollout.tensor_parallel, expanded=expanded)


def job_of(config: PPOConfig, device: Device, lengths: Lengths, shape_of: ShapeOf) -> Job:
    roles = _Roles(config, device, lengths, shape_of)
    needed = needed_models(config)
    models = [roles.actor()]
    models += [roles.rollout()] if roles.has_rollout_pool and not roles.rollout_engine.is_remote else []
    models += [roles.reference()] if "ref" in needed else []
    models += [roles.critic()] if "critic" in needed else []
    models += [roles.reward_model()] if "rm" in needed else []
    engine = _rollout(config.actor_rollout_ref.rollout, roles.sequences_per_engine(), lengths, device)
    return Job(device, lengths, config.data.train_batch_size, config.actor_rollout_ref.rollout.n, models, engine)


class _Roles:
    """Models of RL by role."""

    def __init__(self, config: PPOConfig, device: Device, lengths: Lengths, shape_of: ShapeOf) -> None:
        self.config, self.device, self.lengths, self.shape_of = config, device, lengths, shape_of
        self.policy = config.actor_rollout_ref
        self.pools = pools_of(config, needed_models(config))
        self.sequences = config.data.train_batch_size * self.policy.rollout.n
        self.has_rollout_pool = "rollout" in self.pools.role_pools
        self.rollout_engine = ROLLOUT_ENGINES.info(self.policy.rollout.name)
        self.actor_role = "actor" if self.has_rollout_pool else "actor_rollout"

    def actor(self) -> Model:
        policy, actor = self.policy, self.policy.actor
        mini = min(actor.ppo_mini_batch_size * policy.rollout.n, self.sequences)
        updates = math.ceil(self.sequences / mini) * actor.ppo_epochs
        limits = micro_limits(
            actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
        )
        role, passes = self.actor_role, {}
        if old_log_probs_source(self.config, is_one_update=updates == 1) == "pass":
            passes["old log-probs"] = self._units(role, actor, policy.model, log_prob_limits(policy.rollout))
        if policy.model.lora_rank and need_reference_policy(self.config):  # the same model without its adapters
            passes["reference log-probs"] = self._units(role, actor, policy.model, log_prob_limits(policy.ref))
        return self._model(
            role,
            policy.model,
            engine_settings(actor),
            update=self._units(role, actor, policy.model, limits, mini),
            passes=passes,
            updates=updates,
            decodes=not self.has_rollout_pool and not self.rollout_engine.is_remote,
        )

    def rollout(self) -> Model:
        trained = engine_settings(self.policy.actor)
        engine = FSDPEngineConfig(model_dtype=trained.model_dtype, dtype=trained.dtype)  # it is not trained
        found = self._model("rollout", self.policy.model, engine, decodes=True)
        return found if self.rollout_engine.takes_adapters else replace(found, four_bit=None)

    def reference(self) -> Model:
        ref = self.policy.ref
        units = self._units("ref", ref, self.policy.model, log_prob_limits(ref))
        found = self._model("ref", self.policy.model, engine_settings(ref), passes={"reference log-probs": units})
        return replace(found, adapters=None, four_bit=None)

    def critic(self) -> Model:
        critic = self.config.critic
        mini = min(critic.ppo_mini_batch_size * self.policy.rollout.n, self.sequences)
        dynamic = critic.use_dynamic_bsz
        update = micro_limits(critic.ppo_micro_batch_size_per_gpu, dynamic, critic.ppo_max_token_len_per_gpu)
        forward = micro_limits(critic.forward_micro_batch_size_per_gpu, dynamic, critic.forward_max_token_len_per_gpu)
        return self._model(
            "critic",
            critic.model,
            engine_settings(critic),
            update=self._units("critic", critic, critic.model, update, mini),
            passes={"values": self._units("critic", critic, critic.model, forward)},
            updates=math.ceil(self.sequences / mini) * critic.ppo_epochs,
            is_scalar=True,
        )

    def reward_model(self) -> Model:
        reward = self.config.reward_model
        limits = micro_limits(
            reward.micro_batch_size_per_gpu, reward.use_dynamic_bsz, reward.forward_max_token_len_per_gpu
        )
        passes = {"reward model": self._units("rm", reward, reward.model, limits)}
        found = self._model("rm", reward.model, engine_settings(reward), passes=passes, is_scalar=True)
        return replace(found, adapters=None, four_bit=None)

    def sequences_per_engine(self) -> int:
        ranks = self.pools.world_size("rollout" if self.has_rollout_pool else self.actor_role)
        ranks = ranks if self.has_rollout_pool else self.policy.rollout.n_gpus or ranks
        return math.ceil(self.sequences / max(1, ranks // self.policy.rollout.tensor_model_parallel_size))

    def _units(
        self, role: str, section: Any, model: HFModelConfig, limits: dict[str, Any], sequences: int | None = None
    ) -> BatchUnits:
        """sequences: of a mini-batch; None is all of a step. section: of the role."""
        return batch_units(
            self.sequences if sequences is None else sequences,
            samples=self.policy.rollout.n,
            lengths=self.lengths,
            ranks=self.pools.world_size(role),
            row_ranks=ranks_per_row(section),
            sequence_parallel=ranks_per_sequence(section),
            packed=model.use_remove_padding,
            **limits,
        )

    def _model(self, role: str, section: HFModelConfig, engine: TrainEngineConfig, **more: Any) -> Model:
        pool = self.pools.role_pools[role]
        shape = self.shape_of(section.path, sections_of(role).model)
        ranks, machines = self.pools.world_size(role), len(self.pools.spec[pool])
        return model_of(role, pool, ranks, machines, shape, section, engine, self.device, **more)


def model_of(
    role: str,
    pool: str,
    ranks: int,
    machines: int,
    shape: ModelShape,
    section: HFModelConfig,
    engine: TrainEngineConfig,
    device: Device,
    **more: Any,
) -> Model:
    """section, engine: of its config. more: other fields of `Model`."""
    master, compute = (_itemsize(name, device) for name in (engine.model_dtype, engine.dtype))
    return Model(
        role,
        pool,
        ranks,
        machines,
        shape,
        master,
        compute,
        layout_of(engine, ranks, shape),
        engine,
        checkpointing=section.enable_gradient_checkpointing,
        adapters=adapters_of(section, shape),
        four_bit=four_bit_base(section, shape),
        **more,
    )


def _rollout(config: RolloutConfig, sequences: int, lengths: Lengths, device: Device) -> Rollout:
    """sequences: of one engine."""
    concurrent = min(config.max_num_seqs, sequences)
    longest = config.max_model_len or config.prompt_length + config.response_length
    block = config.kv_block_size
    cache = (concurrent if device.is_cpu else config.max_num_seqs) * (math.ceil(longest / block) + 1) * block
    prefill = min(config.max_num_batched_tokens, sequences * lengths.prompt)
    drafts = config.history_drafts
    per_sequence = 1 + drafts.max_draft_tokens * drafts.enable
    step_rows = min(concurrent * per_sequence, drafts.step_tokens(config.max_num_seqs, on_cuda=not device.is_cpu))
    engine = ROLLOUT_ENGINES.info(config.name)
    return Rollout(
        tensor_parallel=config.tensor_model_parallel_size,
        sequences=sequences,
        concurrent=concurrent,
        step_rows=step_rows,
        cache_tokens=cache,
        prefill_tokens=prefill,
        utilization=config.gpu_memory_utilization,
        engine=engine,
        sleeps=config.free_cache_engine and not device.is_cpu,
        quantizes=config.quantization is not None and bool(engine.quantizes),
        fp8_cache=(config.kv_cache_dtype or "").startswith("fp8"),
    )


def _itemsize(name: str, device: Device) -> int:
    return (4 if device.is_cpu else 2) if name == "auto" else _ITEMSIZE[name]
