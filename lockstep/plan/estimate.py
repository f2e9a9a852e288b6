"""The plan of a config on a device: `plan_of`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.plan.batch_units import Lengths
from lockstep.plan.dataflow import stage_times
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job, job_of
from lockstep.plan.memory import RESERVED, Phase, missing_cache, phases
from lockstep.plan.model_shape import ModelShape
from lockstep.plan.step_time import step_times, transfer_time
from lockstep.plan.supervised import supervised_job
from lockstep.utils.model_path import base_folder, local_model_folder

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """job: of `config`, for the longest sequences, as is its memory. typical: lengths for the time.

    times: seconds of each phase; stages: of each stage of the dataflow, where pools work at the same time.
    """

    config: PPOConfig | SupervisedConfig
    machines: Sequence[int]
    job: Job
    typical: Lengths
    phases: list[Phase]
    times: dict[str, float]
    stages: dict[str, float]

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def missing_cache(self) -> float:
        return missing_cache(self.job, self.phases)

    @property
    def needed(self) -> float:
        """Bytes of the largest phase, with what CUDA takes for itself; more than the device has if a KV cache does not fit."""
        beyond = self.job.device.memory + self.missing_cache if self.missing_cache else 0.0
        return max(self.worst.peak + RESERVED, beyond)

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
    stages = stage_times(memory, times, transfer_time(device, timed.models))
    return Plan(config, machines, job, timed.lengths, memory, times, stages)


def longest_lengths(config: PPOConfig | SupervisedConfig) -> Lengths:
    """The most tokens that a sequence may have; all tokens of supervised data may be trained on."""
    if isinstance(config, SupervisedConfig):
        return Lengths(0, config.data.max_length)
    return Lengths(config.data.max_prompt_length, config.data.max_response_length)


@lru_cache
def model_shape(path: str, key: str) -> ModelShape:
    """The sizes of a model. key: its config section. Only configuration and tokenizer of one on the Hub are fetched."""
    folder = local_model_folder(path, f"{key}.path", weights=False)
    return ModelShape.from_folder(base_folder(folder, f"{key}.path", weights=False))


def show_lengths(lengths: Lengths) -> str:
    return f"{lengths.prompt} + {lengths.response}" if lengths.prompt else str(lengths.response)


def show_seconds(value: float) -> str:
    if math.isnan(value):
        return "?"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
