"""`lockstep plan [PROGRAM] key=value …`: what a training command would need, without loading a model."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.config.checks import NOT_INSTALLED
from lockstep.config.compat import NOT_SUPPORTED
from lockstep.config.compose import load_config
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.config.errors import ConfigError
from lockstep.config.placement import ROLES
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import as_arguments, with_values
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.plan.advice import summary
from lockstep.plan.batch_units import BatchUnits, Lengths
from lockstep.plan.dataflow import STAGES
from lockstep.plan.estimate import GB, Plan, longest_lengths, model_shape, plan_of, show_lengths, show_seconds
from lockstep.plan.hardware import DEVICES, Device, find_device
from lockstep.plan.job import NO_ROLLOUT
from lockstep.plan.layouts import DeepSpeedLayout
from lockstep.plan.memory import UPDATES, cached_tokens
from lockstep.plan.model import Model
from lockstep.plan.search import Pool, overrides_of, search
from lockstep.plan.token_budgets import describe_budgets, with_token_budgets

PROGRAMS: dict[str, type] = {
    "ppo": PPOConfig,
    "grpo": PPOConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
}
"""Training programs and their configs."""
NOT_NEEDED = (
    "data.train_files",
    "data.val_files",
    "custom_reward_function.path",
    "actor_rollout_ref.model.tokenizer_path",
    "model.tokenizer_path",
)
"""Keys of files that a plan does not read."""
SHOWN = 8
"""Candidates of a search."""
FILE_WIDTH = 160
"""Of tables that are not shown in a terminal."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(list(argv))
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    try:
        machines = _take_program(options)
        with _processes(sum(machines)):
            config, refused = _load(options, options.overrides)
        typical = _typical_lengths(config, options)
        device = find_device(options.device)
        if options.network is not None:
            device = replace(device, network=options.network * 1e9 / 8)
        if options.search:
            if not isinstance(config, PPOConfig):
                raise ValueError(f"--search places the models of RL; {options.program} has one")
            return _search(console, config, device, typical, options)
        sized = with_token_budgets(config, device, machines)
        plan = plan_of(sized, device, typical, machines)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if refused:
        lines = [
            f"lockstep {options.program} refuses these settings; this is the plan without them:",
            *(f"  {one}" for one in refused),
        ]
        console.print("\n".join([*lines, ""]), markup=False, highlight=False, soft_wrap=True)
    _show_units(console, plan)
    _show_memory(console, plan)
    if chosen := describe_budgets(config, sized, device):
        console.print(chosen, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(plan), markup=False, soft_wrap=True)
    return 0 if plan.fits and not refused else 1


def _take_program(options: argparse.Namespace) -> list[int]:
    """Set `options.program` to the first word, if it is a program's; returns the processes of each machine."""
    given = bool(options.overrides) and options.overrides[0] in PROGRAMS
    options.program = options.overrides.pop(0) if given else "ppo"
    if options.program == "grpo":
        options.program, options.overrides = "ppo", ["algorithm=grpo", *options.overrides]
    given_sizes = [size for size in (options.nnodes, options.nproc_per_node) if size is not None]
    if options.program == "ppo" and given_sizes:
        raise ValueError(
            "--nnodes and --nproc-per-node are for sft, rm and dpo; set trainer.nnodes, trainer.n_gpus_per_node"
        )
    if any(size < 1 for size in given_sizes):
        raise ValueError("--nnodes and --nproc-per-node must be 1 or more")
    return [options.nproc_per_node or 1] * (options.nnodes or 1)


@contextmanager
def _processes(number: int) -> Iterator[None]:
    """The checks of SFT count processes as torchrun says."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(number)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def _typical_lengths(config: PPOConfig | SupervisedConfig, options: argparse.Namespace) -> Lengths:
    """ValueError if they exceed the lengths of the config."""
    longest, is_rl = longest_lengths(config), isinstance(config, PPOConfig)
    prompt = longest.prompt if options.prompt_tokens is None else options.prompt_tokens
    rest = longest.response if is_rl else max(1, longest.total - prompt)
    typical = Lengths(prompt, rest if options.response_tokens is None else options.response_tokens)
    limits = (
        [
            ("--prompt-tokens", prompt, "data.max_prompt_length", longest.prompt),
            ("--response-tokens", typical.response, "data.max_response_length", longest.response),
        ]
        if is_rl
        else [("--prompt-tokens + --response-tokens", typical.total, "data.max_length", longest.total)]
    )
    for option, value, key, limit in limits:
        if value > limit:
            raise ValueError(f"{option}: {value} tokens are more than {key}={limit}")
    if prompt < 0 or typical.response < 1:
        raise ValueError("--prompt-tokens must be 0 or more, and --response-tokens 1 or more")
    return typical


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Any, list[str]]:
    """The config without the settings that are not supported, and what is wrong with them. Data files need not exist."""

    def load(run_checks: bool) -> Any:
        name, folder = options.config_name, options.config_path
        cls = PROGRAMS[options.program]
        return load_config(cls, overrides, config_name=name, config_dir=folder, run_checks=run_checks)

    try:
        return load(run_checks=True), []
    except ConfigError as error:
        problems = [p for p in error.problems if p.key not in NOT_NEEDED and p.message not in NOT_INSTALLED]
        refused = [problem for problem in problems if NOT_SUPPORTED in problem.message]
        if len(refused) < len(problems):
            raise ConfigError(problems) from None
    if not refused:
        return load(run_checks=False), []
    config, others = _load(options, [*overrides, *(f"~{problem.key}" for problem in refused)])
    return config, [*map(str, refused), *others]


def _search(console: Console, config: PPOConfig, device: Device, typical: Lengths, options: argparse.Namespace) -> int:
    trainer = config.trainer
    cluster = f"{trainer.nnodes} x {trainer.n_gpus_per_node} {device.name}"
    if config.resource_pool_spec:
        raise ValueError("resource_pool_spec: the search chooses the pools; remove it, and resource_pool_mapping")
    if not device.is_timed:
        raise ValueError(
            f"the rates of {device.name} are not known; give a similar device with --device ({', '.join(DEVICES)})"
        )
    found, engine = search(config, device, typical, _tensor_parallel_sizes(config)), {}
    larger = ROLLOUT_ENGINES.info(config.actor_rollout_ref.rollout.name).if_too_large
    if not found and larger is not None:
        engine = {"actor_rollout_ref.rollout.name": larger}
        config = with_values(config, engine)
        found = search(config, device, typical, _tensor_parallel_sizes(config))
    if not found:
        plan = plan_of(with_token_budgets(config, device), device, typical)
        console.print(f"no placement fits on {cluster}. As it is set, it {summary(plan)}", markup=False, soft_wrap=True)
        return 1
    table = Table("step s", *STAGES, "GB", "pools [GPUs]", "settings", box=None, pad_edge=False)
    for column in table.columns[: len(STAGES) + 2]:
        column.justify = "right"
    for candidate in found[:SHOWN]:
        settings = engine | overrides_of(candidate, config)
        checked, _ = _load(options, [*options.overrides, *as_arguments(settings)])
        plan = plan_of(checked, device, typical)
        pools = "\n".join(_pool(pool) for pool in candidate.pools)
        shown = "\n".join(_settings(pool) for pool in candidate.pools)
        seconds = (show_seconds(value) for value in (plan.step_s, *plan.stages.values()))
        table.add_row(*seconds, f"{plan.worst.peak / GB:.1f}", pools, shown)
    console.print(table)
    arguments = as_arguments(engine | overrides_of(found[0], config))
    console.print(f"\nfastest of {len(found)} placements that fit on {cluster}; add to the command:", highlight=False)
    for argument in arguments or ["(nothing: the settings are the fastest)"]:
        console.print(f"  {shlex.quote(argument)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _tensor_parallel_sizes(config: PPOConfig) -> list[int]:
    policy, gpus = config.actor_rollout_ref, config.trainer.n_gpus_per_node
    if not ROLLOUT_ENGINES.info(policy.rollout.name).tensor_parallel:
        return [1]
    heads = model_shape(policy.model.path, "actor_rollout_ref.model").heads
    return [size for size in (1, 2, 4, 8) if gpus % size == 0 and heads % size == 0]


def _pool(pool: Pool) -> str:
    size = f"{len(pool.machines)} x {pool.machines[0]}" if len(pool.machines) > 1 else f"{pool.machines[0]}"
    return f"{' + '.join(role for role in ROLES if role in pool.roles)} [{size}]"


def _settings(pool: Pool) -> str:
    own, trains = pool.settings, pool.roles != {"rollout"}
    parts = []
    if trains:
        parts.append(f"{own.max_tokens:,} tokens")
        sizes = own.sizes
        parts += [f"SP {sizes.sequence_parallel}"] if sizes.sequence_parallel > 1 else []
        parts += [f"fsdp_size {sizes.shards}"] if sizes.shards != -1 else []
        named = {"tensor": sizes.tensor, "pipeline": sizes.pipeline, "expert": sizes.expert}
        parts += [f"{name} {ranks}" for name, ranks in named.items() if ranks > 1]
        parts += [f"ZeRO {sizes.zero_stage}"] if any(isinstance(m.layout, DeepSpeedLayout) for m in pool.models) else []
        offloaded = {"none": [], "frozen": ["frozen models"], "all": ["parameters"]}[own.param_offload]
        offloaded += ["optimizer"] if own.optimizer_offload else []
        parts += [f"offload {' and '.join(offloaded)}"] if offloaded else []
    if pool.roles & {"actor_rollout", "rollout"}:
        parts.append(f"utilization {own.utilization:g}")
        parts += [f"rollout TP {own.tensor_parallel}"] if own.tensor_parallel > 1 else []
    return ", ".join(parts)


def _show_units(console: Console, plan: Plan) -> None:
    job = plan.job
    actor, lengths = job.models[0], job.lengths
    assert actor.update is not None
    table = Table("a training step", "", box=None, pad_edge=False, title_justify="left")
    shape = actor.shape
    table.add_row("model", f"{shape.model_type}, {shape.parameters / 1e9:.3g}B parameters{_trained(actor)}")
    if job.rollout is NO_ROLLOUT:
        pairs = f"{job.prompts} pairs = " if job.samples > 1 else ""
        table.add_row("batch", f"{pairs}{job.sequences} sequences")
    else:
        table.add_row("rollout", f"{job.prompts} prompts x {job.samples} samples = {job.sequences} sequences")
    table.add_row("lengths", f"up to {show_lengths(lengths)} tokens")
    if job.rollout is not NO_ROLLOUT:
        table.add_row("decoding", _decoding(plan))
    for model in job.models:
        if model.update is not None:
            table.add_row(UPDATES.get(model.role, "update actor"), _units(model, model.update))
    console.print(table)
    console.print()


def _trained(model: Model) -> str:
    bits = {size: f"{8 * size}-bit" for size in (model.master, model.compute)}
    if model.adapters is not None:
        frozen = bits[model.compute] if model.four_bit is None else "linear layers in 4-bit"
        return f", {frozen} and frozen; {model.num_trained / 1e6:.3g}M of adapters are trained"
    return f", {bits[model.master]} masters, computed in {bits[model.compute]}"


def _decoding(plan: Plan) -> str:
    job, rollout = plan.job, plan.job.rollout
    if rollout.engine.is_remote:
        return "servers (actor_rollout_ref.rollout.server.urls): their memory and time are not part of the plan"
    num_tokens = cached_tokens(job, plan.phases)
    fitting = num_tokens // job.lengths.total
    holds = f"the KV cache holds {num_tokens:,} tokens"
    if fitting < rollout.concurrent:
        holds += f", {fitting} sequences of full length; others wait or are preempted"
    engine = f"engine of {rollout.tensor_parallel} devices" if rollout.tensor_parallel > 1 else "rank"
    return f"{rollout.sequences} sequences per {engine}, up to {rollout.concurrent} at a time: {holds}"


def _units(model: Model, units: BatchUnits) -> str:
    groups = units.ranks // units.row_ranks
    shared = f" of {units.row_ranks} devices each" if units.row_ranks > 1 else ""
    return (
        f"{_count(model.updates, 'optimizer step')} of {units.sequences} sequences, over {_count(groups, 'data-parallel rank')}"
        f"{shared}, {units.per_rank.rows} on each: {_count(units.num_micro, 'micro-batch', 'es')} of at most "
        f"{_count(units.micro.rows, 'sequence')}, {units.tokens_per_device:,} tokens per device"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


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
        usage="%(prog)s [ppo | grpo | sft | rm | dpo] [options] key=value ...",
        description="Show the batch units, the memory of every phase and the time per step of a training command, without "
        "loading a model. Takes the program (default: ppo) and its settings. Exit code 1 if it does not fit.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the training command")
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="sft, rm, dpo: as for torchrun (default: 1)")
    parser.add_argument("--nnodes", type=int, metavar="N", help="sft, rm, dpo: as for torchrun (default: 1)")
    parser.add_argument("--device", help=f"plan for this device instead of this machine's: {', '.join(DEVICES)}, cpu")
    parser.add_argument(
        "--search", action="store_true", help="find placement, parallel sizes and offload for the cluster"
    )
    parser.add_argument("--network", type=float, metavar="GBIT", help="Gbit/s of each GPU between machines")
    parser.add_argument(
        "--prompt-tokens", type=int, help="typical prompt length, for the time (data.max_prompt_length)"
    )
    parser.add_argument("--response-tokens", type=int, help="typical response length (data.max_response_length)")
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="YAML file to start from, or a path to one")
    parser.add_argument("-cp", "--config-path", metavar="DIR", type=Path, help="folder of that file")
    return parser
