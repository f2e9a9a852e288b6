"""Failures that have a cause outside the program, such as a full disk: one line with the cause, the config key and the way on."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import torch

from lockstep.config.micro_batches import RL, SUPERVISED
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import sections_of
from lockstep.config.schema import flat_values
from lockstep.config.sft import SupervisedConfig
from lockstep.engines.train.micro_batch_limits import MicroBatchFailure, failure_of
from lockstep.plan.advice import lowering
from lockstep.plan.estimate import GB
from lockstep.registry import USER_FILES
from lockstep.rewards.errors import RewardError
from lockstep.rewards.monitor import printed_frames
from lockstep.single_controller.futures import HangError, worker_report
from lockstep.trainer.run.memory_check import planned
from lockstep.utils.audit import AuditError
from lockstep.utils.out_of_memory import is_out_of_memory
from lockstep.utils.untrusted import printable
from lockstep.workers.agent_worker import NAME as AGENT_WORKER

_ARR = "actor_rollout_ref"
GENERATION = ("generate_sequences", "begin_generation", "advance_generation")
LOWER_FOR_GENERATION = f"{_ARR}.rollout.max_num_seqs or {_ARR}.rollout.gpu_memory_utilization"
MICRO_BATCHES = {
    "compute_log_prob": "old log-probs",
    "compute_ref_log_prob": "reference log-probs",
    "compute_values": "values",
    "compute_rm_score": "reward model",
    "update_actor": "update actor",
    "update_critic": "update critic",
    "train_batch": "update",
    "validate": "forward",
    "prepare": "forward",
}
"""Method of a worker or of a supervised trainer -> its phase in a plan."""
UPDATES = ("update_actor", "update_critic", "train_batch")

PACKAGE = str(Path(__file__).parents[2]) + os.sep
FULL_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_SIZE = r"([\d.]+ [KMG]?i?B)"
_ALLOCATION = {
    "tried": re.compile(f"Tried to allocate {_SIZE}"),
    "total": re.compile(f"total capacity of {_SIZE}"),
    "free": re.compile(f"of which {_SIZE} is free"),
    "allocated": re.compile(f"{_SIZE} is allocated by PyTorch"),
    "reserved": re.compile(f"{_SIZE} is reserved by PyTorch but unallocated"),
}
"""Parts of torch's message about CUDA memory."""
_DEAD_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?P<end>[^.\n]*)")
_OS_ERROR = re.compile(r"\(os error (?P<code>\d+)\)")
_METHOD = re.compile(r"raised in .* by \w+\.(?P<name>\w+)")


def cause_of(error: Exception, config: PPOConfig | SupervisedConfig) -> str:
    """What to tell the user about the end of a run; the traceback goes to a file. An unexpected error is raised again."""
    cause = None if os.environ.get("LOCKSTEP_DEBUG") else explain(error, config)
    log = _write_traceback(error, config)
    if cause is None:
        if (report := worker_report(error)) is None:
            raise error
        sys.stderr.write(printable(f"{report}\n"))
        cause = f"{type(error).__name__} on a worker"
    return cause if log is None else f"{cause} (traceback: {log})"


def _write_traceback(error: Exception, config: PPOConfig | SupervisedConfig) -> Path | None:
    """The file; None if it cannot be written."""
    log = Path(config.trainer.default_local_dir).expanduser() / "error.txt"
    try:
        log.write_text("".join(traceback.format_exception(error)))
    except OSError:  # the folder may be the cause
        return None
    return log


def how_to_resume(config: PPOConfig | SupervisedConfig, saved: Path | None) -> str:
    """The end of a failed run's message. saved: its last checkpoint."""
    if saved is None:
        return ", before its first checkpoint (trainer.save_freq)"
    if config.trainer.resume_mode == "auto":
        return f"; run the same command to resume from its last checkpoint, {saved}"
    return f"; set trainer.resume_mode=resume_path trainer.resume_from_path={saved} to resume from its last checkpoint"


def explain(error: BaseException, config: PPOConfig | SupervisedConfig) -> str | None:
    """The line for `error`; None if it is unexpected and needs its traceback."""
    if isinstance(error, RewardError | AuditError | HangError | FloatingPointError):
        return str(error)
    if is_out_of_memory(error):
        return _out_of_memory(error, config)
    if isinstance(error, RuntimeError) and (dead := _DEAD_LOADER.search(str(error))):
        return (
            f"a data-loader process {dead['end']}; if it ran out of memory, lower data.dataloader_num_workers "
            "(0 loads the data in the trainer's process)"
        )
    if (raised := _in_user_code(error)) is not None:
        return raised
    if isinstance(error, OSError):
        return " ".join(str(error).split()) if error.errno is None else _os_error(error, config)
    if inner := _OS_ERROR.search(str(error)):  # of a compiled library
        return _os_error(OSError(int(inner["code"]), os.strerror(int(inner["code"]))), config)
    # the exceptions of agents are the same in agent workers and in the controller
    of_agents = any(note.startswith(f"raised in {AGENT_WORKER} ") for note in _notes(error))
    if isinstance(error, ValueError) and (of_agents or worker_report(error) is None):
        return str(error)
    return None


def _in_user_code(error: BaseException) -> str | None:
    """An exception that passed through the user's code, with the innermost line of it."""
    frames = printed_frames(worker_report(error) or "") or list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, ValueError):  # our messages about user code are ValueErrors too
        frames = [frame for frame in frames if frame.filename in USER_FILES or frame.filename.startswith(PACKAGE)][-1:]
    frames = [frame for frame in frames if frame.filename in USER_FILES]
    if not frames:
        return None
    at = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}, raised by your code at {at}"


def _out_of_memory(error: BaseException, config: PPOConfig | SupervisedConfig) -> str:
    method = next((found["name"] for note in _notes(error) if (found := _METHOD.search(note))), None)
    where = f" in {method}" if method else ""
    failure = failure_of(error)
    if failure is not None and failure.smaller is None:
        fix = _for_a_long_sequence(failure, method, config)
    elif failure is not None and "." in failure.key:
        fix = f"set {failure.key}={failure.smaller}"
    elif method in GENERATION:
        fix = f"lower {LOWER_FOR_GENERATION}"
    elif method in MICRO_BATCHES:
        keys = (RL | SUPERVISED)[MICRO_BATCHES[method]]
        switch, rows = attrgetter(keys.switch, keys.rows)(config)
        by_rows = switch is False or (switch is None and rows)
        key = keys.rows if by_rows else keys.tokens
        fix = f"lower {key}"
        if failure is not None:  # in a trial of an audit, which is no larger than a micro-batch
            fix = f"set {key}={failure.smaller if by_rows else (failure.prompt + failure.response) // 2}"
    elif isinstance(config, SupervisedConfig) and isinstance(error, torch.OutOfMemoryError):  # loading the model
        fix = (
            "the model is too large: use more GPUs (torchrun --nproc_per_node), or set model.lora_rank or "
            "model.fsdp_config.param_offload=true"
        )
    elif method is not None:  # loading a model
        fix = (
            "the model is too large: use more GPUs (trainer.n_gpus_per_node) or a smaller actor_rollout_ref.model.path"
        )
    else:
        fix = "lower data.train_batch_size or data.dataloader_num_workers, or raise the limit (ulimit -v)"
    first_line = str(error).partition("\n")[0] or "MemoryError"
    if not isinstance(error, torch.OutOfMemoryError):
        return f"out of memory{where} ({first_line}); {fix}"
    expected, more = _expected(method, config)
    if more:
        fix = f"set {more}" if fix.removeprefix("lower ") in more else f"{fix}, or set {more}"
    return f"out of GPU memory{where} ({_allocated(str(error))}){expected}; {fix}"


def _for_a_long_sequence(failure: MicroBatchFailure, method: str | None, config: PPOConfig | SupervisedConfig) -> str:
    """A micro-batch that cannot be split: its length, and what makes a single sequence need less memory."""
    what = "one sequence" if failure.num_sequences == 1 else f"{failure.num_sequences} sequences that stay together"
    tokens = f"{failure.prompt + failure.response} tokens ({failure.prompt} prompt, {failure.response} response)"
    values = flat_values(config)
    sections = sections_of((RL | SUPERVISED)[MICRO_BATCHES.get(str(method), "update actor")].role)
    engine = sections.engine(values)
    settings = [f"{engine}.param_offload"]
    if method in UPDATES:
        settings += [f"{engine}.optimizer_offload", f"{sections.model}.enable_gradient_checkpointing"]
    unset = [f"{key}=true" for key in settings if values.get(key) is False]
    shorter = "data.max_length" if isinstance(config, SupervisedConfig) else "data.max_response_length"
    ulysses = next((key for key in values if key == f"{sections.role}.ulysses_sequence_parallel_size"), None)
    share = f"more GPUs{f' with {ulysses}' if ulysses else ''}"
    options = [f"lower {shorter}", *([f"set {', '.join(unset)}"] if unset else []), f"use {share}"]
    return f"{what} of {tokens} does not fit: {', or '.join(options)}"


def _allocated(message: str) -> str:
    """Torch's numbers, of a message of several sentences."""
    found = {name: match[1] for name, pattern in _ALLOCATION.items() if (match := pattern.search(message))}
    if set(found) < set(_ALLOCATION):
        return message.partition("\n")[0].partition(". GPU ")[0]
    return "tried to allocate {tried}; {allocated} of {total} are allocated, {reserved} more are cached, {free} are free".format(
        **found
    )


def _expected(method: str | None, config: PPOConfig | SupervisedConfig) -> tuple[str, str]:
    """What the plan expected of the phase, and which keys to set for it; empty without a plan of the phase."""
    name = "generate" if method in GENERATION else MICRO_BATCHES.get(str(method), "")
    plan = planned(config)
    phase = next((phase for phase in plan.phases if phase.name == name), None) if plan else None
    if plan is None or phase is None:
        return "", ""
    largest = sorted(phase.parts.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{part} {size / GB:.1f}" for part, size in largest)
    expected = f"{phase.peak / GB:.1f} of {plan.job.device.memory / GB:.1f} GB ({parts})"
    return f"; the plan expected up to {expected}", lowering(plan, phase)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _os_error(error: OSError, config: PPOConfig | SupervisedConfig) -> str:
    """The error with the key of the folder it concerns; `strerror` may already be a whole message with a key."""
    reason = error.strerror or str(error)
    if "trainer." in reason or "data." in reason:
        return reason
    path = error.filename2 or error.filename  # a rename has two; the second is its target
    if path is None:
        where = f" in trainer.default_local_dir={config.trainer.default_local_dir}"
    else:
        path = Path(os.fsdecode(path)).expanduser().absolute()
        folders = [f", in {key}={folder}" for key, folder in _folders(config) if path.is_relative_to(folder)]
        where = f": {path}{folders[0] if folders else ''}"
    fix = "remove what is in the way or set another folder"
    if error.errno in FULL_CODES:
        fix = "free some space or set another folder"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "make it writable or set another folder"
    elif error.errno == errno.EMFILE:
        fix = "raise the limit of open files (ulimit -n)"
    return f"{reason}{where}; {fix}"


def _folders(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, Path]]:
    trainer = config.trainer
    for key in ("rollout_data_dir", "validation_data_dir", "default_local_dir"):
        if (folder := getattr(trainer, key, None)) is not None:
            yield f"trainer.{key}", Path(folder).expanduser().absolute()
