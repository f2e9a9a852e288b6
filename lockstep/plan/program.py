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
from lockstep.plan.estimate import GB, Plan, longest_lengths, plan_of, show_seconds, summary
from lockstep.plan.hardware import DEVICES, find_device
from lockstep.plan.job import Model


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(list(argv))
    try:
        config = load_config(
            PPOConfig, options.overrides, config_name=options.config_name, config_dir=options.config_path
        )
        most = longest_lengths(config)
        typical = Lengths(options.prompt_tokens or most.prompt, options.response_tokens or most.response)
        plan = plan_of(config, find_device(options.device), typical)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    console = Console(soft_wrap=not sys.stdout.isatty())
    _show_units(console, plan)
    _show_memory(console, plan)
    console.print(summary(plan), markup=False, soft_wrap=True)
    return 0 if plan.fits else 1


def _show_units(console: Console, plan: Plan) -> None:
    job = plan.job
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


def _show_memory(console: Console, plan: Plan) -> None:
    memory = plan.phases
    parts = list(dict.fromkeys(part for phase in memory for part in phase.parts))
    table = Table("GB per device", *(phase.name for phase in memory), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in parts:
        table.add_row(part, *(f"{phase.parts[part] / GB:.2f}" if part in phase.parts else "" for phase in memory))
    table.add_row("peak", *(f"{phase.peak / GB:.1f}" for phase in memory), style="bold")
    table.add_row("seconds", *(show_seconds(plan.times[phase.name]) for phase in memory))
    if len({phase.pool for phase in memory}) > 1:
        table.add_row("pool", *(phase.pool for phase in memory))
    console.print(table)
    console.print()


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
