"""The plan of a config on a device, and what it tells the user: `plan_of`, `summary`, `advice`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.plan.batch_units import Lengths
from lockstep.plan.dataflow import stage_times
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job, job_of
from lockstep.plan.memory import RESERVED, Phase, phases
from lockstep.plan.model_shape import ModelShape
from lockstep.plan.step_time import step_times, transfer_time
from lockstep.plan.supervised import supervised_job
from lockstep.utils.model_path import base_folder, local_model_folder

GB = 1e9

_ADVICE = {
    "moments": "{engine}.optimizer_offload=true, {engine}.model_dtype=bfloat16, or more GPUs",
    "weights": "{engine}.model_dtype=bfloat16, {engine}.param_offload=true, or more GPUs",
    "weights of other models": "param_offload=true for the reference and the critic, or another trainer.placement",
    "weights for decoding": "a trainer.placement with a rollout pool",
    "gradients": "more GPUs: gradients are sharded",
    "gathered layers": "a smaller model",
    "activations": "{micro}, or {model}.enable_gradient_checkpointing=true",
    "logits": "{micro}",
    "KV cache": "a smaller actor_rollout_ref.rollout.max_num_seqs or actor_rollout_ref.rollout.gpu_memory_utilization",
    "moment buckets": "more GPUs",
    "dequantised weight": "{model}.load_in_4bit=false",
}
"""Part of a phase's memory -> what to change if it is the largest."""


class Sections(NamedTuple):
    """Config sections of a role, its engine and its model."""

    role: str
    engine: str
    model: str


_ACTOR = Sections("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model")
_SECTIONS = {
    "ref": Sections("actor_rollout_ref.ref", "actor_rollout_ref.ref.fsdp_config", "actor_rollout_ref.model"),
    "critic": Sections("critic", "critic.model.fsdp_config", "critic.model"),
    "rm": Sections("reward_model", "reward_model.model.fsdp_config", "reward_model.model"),
    "model": Sections("model.fsdp_config", "model.fsdp_config", "model"),
}
"""Of the roles besides actor and rollout; `model` is that of SFT, reward models and DPO."""

MICRO_BATCH_KEYS = {
    "reward model": ("reward_model.micro_batch_size_per_gpu", "reward_model.forward_max_token_len_per_gpu"),
    "old log-probs": tuple(
        f"actor_rollout_ref.rollout.log_prob_{end}_per_gpu" for end in ("micro_batch_size", "max_token_len")
    ),
    "reference log-probs": tuple(
        f"actor_rollout_ref.ref.log_prob_{end}_per_gpu" for end in ("micro_batch_size", "max_token_len")
    ),
    "values": ("critic.forward_micro_batch_size_per_gpu", "critic.forward_max_token_len_per_gpu"),
    "update": ("data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"),
    "forward": ("data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"),
    "update critic": ("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    "update actor": tuple(
        f"actor_rollout_ref.actor.ppo_{end}_per_gpu" for end in ("micro_batch_size", "max_token_len")
    ),
}
"""Phase -> the keys of its micro-batches: in sequences, and in tokens. `forward` (validation of SFT, reward models and DPO, and
DPO's reference log-probs) has no plan."""


def sections_of(role: str) -> Sections:
    return _SECTIONS.get(role, _ACTOR)


@dataclass(frozen=True)
class Plan:
    """job: for the longest sequences, as is its memory. typical: lengths for the time.

    times: seconds of each phase; stages: of each stage of the dataflow, where pools work at the same time.
    """

    job: Job
    typical: Lengths
    phases: list[Phase]
    times: dict[str, float]
    stages: dict[str, float]

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def needed(self) -> float:
        """Bytes of the largest phase, with what CUDA takes for itself."""
        return self.worst.peak + RESERVED

    @property
    def fits(self) -> bool:
        return self.needed <= self.job.device.memory

    @property
    def step_s(self) -> float:
        return sum(self.stages.values())


def plan_of(
    config: PPOConfig | SupervisedConfig,
    device: Device,
    typical: Lengths | None = None,
    machines: Sequence[int] = (1,),
) -> Plan:
    """Memory for the longest sequences, time for typical ones. ValueError if a model's sizes are not known.

    machines: processes on each, for a config that does not say so: of torchrun.
    """

    def job_with(lengths: Lengths) -> Job:
        if isinstance(config, PPOConfig):
            return job_of(config, device, lengths, model_shape)
        return supervised_job(config, device, lengths, model_shape, list(machines))

    longest = longest_lengths(config)
    job = job_with(longest)
    memory = phases(job)
    timed = job_with(typical or longest)
    times = step_times(timed, memory) if device.is_timed else {phase.name: math.nan for phase in memory}
    return Plan(job, timed.lengths, memory, times, stage_times(memory, times, transfer_time(device, timed.models)))


def longest_lengths(config: PPOConfig | SupervisedConfig) -> Lengths:
    """Of supervised data all tokens may be trained on."""
    if isinstance(config, SupervisedConfig):
        return Lengths(0, config.data.max_length)
    return Lengths(config.data.max_prompt_length, config.data.max_response_length)


@lru_cache
def model_shape(path: str, key: str) -> ModelShape:
    """Of a model on the Hub, only its configuration and tokenizer are fetched. key: its config section."""
    folder = local_model_folder(path, f"{key}.path", weights=False)
    return ModelShape.from_folder(base_folder(folder, f"{key}.path", weights=False))


def summary(plan: Plan) -> str:
    """One line: whether it fits, and the time of a step."""
    device, worst = plan.job.device, plan.worst
    peak = f"{worst.peak / GB:.1f} of {device.memory / GB:.1f} GB in {worst.name}"
    if plan.fits:
        tokens = f"{show_lengths(plan.typical)} tokens"
        seconds = (
            f"; about {show_seconds(plan.step_s)} s per step with {tokens} per sequence" if device.is_timed else ""
        )
        return f"fits on {device.name}: at most {peak}{seconds}"
    part, size = max(worst.parts.items(), key=lambda item: item[1])
    return f"does not fit on {device.name}: {peak}, of which {part} take {size / GB:.1f}. Try {advice(plan, worst)}"


def advice(plan: Plan, phase: Phase) -> str:
    """Keys that lower the largest part of a phase."""
    part = max(phase.parts, key=lambda name: phase.parts[name])
    sections = sections_of(phase.role)
    micro = _smaller_micro_batches(plan, phase, sections.role)
    return _ADVICE[part].format(engine=sections.engine, model=sections.model, micro=micro)


def _smaller_micro_batches(plan: Plan, phase: Phase, section: str) -> str:
    if phase.name == "generate":
        return "a smaller actor_rollout_ref.rollout.max_num_batched_tokens"
    model = plan.job.model(phase.role)
    units = model.passes.get(phase.name, model.update)
    assert units is not None
    if units.micro.rows == 1:
        return f"a larger {section}.ulysses_sequence_parallel_size"
    return f"a smaller {MICRO_BATCH_KEYS[phase.name][units.by_tokens]}"


def show_lengths(lengths: Lengths) -> str:
    return f"{lengths.prompt} + {lengths.response}" if lengths.prompt else str(lengths.response)


def show_seconds(value: float) -> str:
    if math.isnan(value):
        return "?"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
