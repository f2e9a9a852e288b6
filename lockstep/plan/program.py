"""`lockstep plan key=value …`: what a training command would need, without loading a model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.plan.batch_units import BatchUnits, Lengths
from lockstep.plan.hardware import DEVICES, find_device
from lockstep.plan.job import Job, Model, job_of
from lockstep.plan.memory import RESERVED, Phase, phases
from lockstep.plan.model_shape import ModelShape
from lockstep.plan.step_time import step_times
from lockstep.utils.model_path import base_folder, local_model_folder

GB = 1e9

_ADVICE = {
    "moments": "{engine}.optimizer_offload=true, {engine}.model_dtype=bfloat16, or more GPUs",
    "weights": "{engine}.model_dtype=bfloat16, {engine}.param_offload=true, or more GPUs",
    "weights of other models": "param_offload=true for the reference and the critic, or another trainer.placement",
    "weights for decoding": "a trainer.placement with a rollout pool",
    "gradients": "more GPUs: gradients are sharded",
    "gathered layers": "a smaller model",
    "activations": "{micro}, or actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "logits": "{micro}",
    "KV cache": "a smaller actor_rollout_ref.rollout.max_num_seqs or data.max_response_length",
    "moment buckets": "more GPUs",
}
"""Part of a phase's memory -> what to change if it is the largest."""


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(list(argv))
    try:
        config = load_config(
            PPOConfig, options.overrides, config_name=options.config_name, config_dir=options.config_path
        )
        data = config.data
        most = Lengths(data.max_prompt_length, data.max_response_length)
        typical = Lengths(options.prompt_tokens or most.prompt, options.response_tokens or most.response)
        device = find_device(options.device)
        job = job_of(config, device, most, _shape)
        memory = phases(job)
        times = step_times(job_of(config, device, typical, _shape), memory)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    console = Console(soft_wrap=not sys.stdout.isatty())
    _show_units(console, job)
    _show_memory(console, job, memory, times)
    console.print(summary(job, memory, times), markup=False, soft_wrap=True)
    return 0 if _worst(memory).peak + RESERVED <= device.memory else 1


def summary(job: Job, memory: list[Phase], times: dict[str, float]) -> str:
    """The last line: whether it fits, and the time of a step."""
    worst, device = _worst(memory), job.device
    peak = f"{worst.peak / GB:.1f} of {device.memory / GB:.1f} GB in {worst.name}"
    if worst.peak + RESERVED <= device.memory:
        return f"fits on {device.name}: at most {peak}; about {_seconds(sum(times.values()))} s a step"
    part, size = max(worst.parts.items(), key=lambda item: item[1])
    return (
        f"does not fit on {device.name}: {peak}, of which {part} take {size / GB:.1f}. Try {_advice(job, worst, part)}"
    )


def _advice(job: Job, phase: Phase, part: str) -> str:
    is_critic = phase.name in ("update critic", "values")
    section = "critic" if is_critic else "actor_rollout_ref.actor"
    engine = "critic.model.fsdp_config" if is_critic else f"{section}.fsdp_config"
    model = job.model("critic") if is_critic else job.models[0]
    one_row = model.update is not None and model.update.micro.rows == 1
    micro = (
        f"{section}.ulysses_sequence_parallel_size" if one_row else f"a smaller {section}.ppo_micro_batch_size_per_gpu"
    )
    return _ADVICE[part].format(section=section, engine=engine, micro=micro)


def _worst(memory: list[Phase]) -> Phase:
    return max(memory, key=lambda phase: phase.peak)


def _show_units(console: Console, job: Job) -> None:
    actor, lengths = job.models[0], job.lengths
    assert actor.update is not None
    table = Table("a training step", "", box=None, pad_edge=False, title_justify="left")
    shape = actor.shape
    table.add_row("model", f"{shape.model_type}, {shape.parameters / 1e9:.3g}B parameters")
    table.add_row("rollout", f"{job.prompts} prompts x {job.samples} samples = {job.sequences} sequences")
    table.add_row("lengths", f"up to {lengths.prompt} + {lengths.response} tokens")
    rollout = job.rollout
    table.add_row("decoding", f"{rollout.sequences} sequences per rank, up to {rollout.concurrent} at a time")
    for model in job.models:
        if model.update is not None:
            table.add_row(f"update of {'critic' if model.role == 'critic' else 'actor'}", _units(model, model.update))
    console.print(table)
    console.print()


def _units(model: Model, units: BatchUnits) -> str:
    groups = units.ranks // units.sequence_parallel
    shared = f" of {units.sequence_parallel} devices each" if units.sequence_parallel > 1 else ""
    return (
        f"{model.updates} optimizer step{'s' * (model.updates > 1)} of {units.sequences} sequences, over {groups} "
        f"data-parallel rank{'s' * (groups > 1)}{shared}: {units.num_micro} micro-batch{'es' * (units.num_micro > 1)} of at most "
        f"{units.micro.rows} sequences, {units.tokens_per_device:,} tokens per device"
    )


def _show_memory(console: Console, job: Job, memory: list[Phase], times: dict[str, float]) -> None:
    parts = list(dict.fromkeys(part for phase in memory for part in phase.parts))
    table = Table("GB per device", *(phase.name for phase in memory), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in parts:
        table.add_row(part, *(f"{phase.parts[part] / GB:.2f}" if part in phase.parts else "" for phase in memory))
    table.add_row("peak", *(f"{phase.peak / GB:.1f}" for phase in memory), style="bold")
    table.add_row("seconds", *(_seconds(times[phase.name]) for phase in memory))
    if len({phase.pool for phase in memory}) > 1:
        table.add_row("pool", *(phase.pool for phase in memory))
    console.print(table)
    console.print()


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shape(path: str, key: str) -> ModelShape:
    """Of a model on the Hub, only its configuration and tokenizer are fetched."""
    folder = local_model_folder(path, f"{key}.path", weights=False)
    return ModelShape.from_folder(base_folder(folder, f"{key}.path", weights=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep plan",
        usage="%(prog)s [options] key=value ...",
        description="Show the batch units, the memory of every phase and the time per step of a training command, without "
        "loading a model. Takes the settings of `lockstep ppo`. Exit code 1 if it does not fit.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the training command")
    parser.add_argument("--device", help=f"plan for this device instead of this machine's: {', '.join(DEVICES)}, cpu")
    parser.add_argument(
        "--prompt-tokens", type=int, help="typical prompt length, for the time (data.max_prompt_length)"
    )
    parser.add_argument("--response-tokens", type=int, help="typical response length (data.max_response_length)")
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="YAML file to start from, or a path to one")
    parser.add_argument("-cp", "--config-path", metavar="DIR", type=Path, help="folder of that file")
    return parser
