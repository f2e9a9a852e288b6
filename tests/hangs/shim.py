"""Hangs inside of Lockstep's own processes: `actor_rollout_ref.model.external_lib=tests.hangs.shim` loads it in each of them."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hangs.plants import hang_here, is_now, note_pid, plant


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def install() -> None:
    note_pid(f"rank_{rank()}")
    kind, _, name = plant().where.partition(":")
    if kind == "method":
        _wrap_worker_method(name, before=True)
    elif kind == "skip":
        _wrap_worker_method(name, before=False)
    elif kind == "function":
        _wrap_function(name)
    elif kind == "fsync":
        _stall_fsync(name)
    elif kind == "metrics":
        _stall_metrics()
    elif kind == "server":
        _accept_other_policy()


def _wrap_worker_method(name: str, before: bool) -> None:
    """before: a rank hangs before its call. Else it skips a collective at the end of the call, which all others are in."""
    from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker as Worker

    method = getattr(Worker, name)

    @functools.wraps(method)
    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before and is_now(plant().where, rank()):
            hang_here()
        result = method(self, *args, **kwargs)
        if not before and _is_step():
            import torch

            if rank() == plant().rank:
                is_now(plant().where, rank())
            else:
                torch.distributed.barrier()
        return result

    setattr(Worker, name, planted)


def _is_step() -> bool:
    from tests.hangs.plants import folder, num_steps

    return num_steps(folder()) == plant().step - 1


def _wrap_function(name: str) -> None:
    """`module:function` or `module:Class.method`."""
    module, _, path = name.partition(":")
    __import__(module)
    owner: Any = sys.modules[module]
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function: Callable[..., Any] = getattr(owner, last)
    if hasattr(function, "hangs"):
        return

    if last.startswith("_take"):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            if is_now(plant().where, rank()):
                hang_here()
            return await function(*args, **kwargs)

        planted: Any = coroutine
    else:

        @functools.wraps(function)
        def planted(*args: Any, **kwargs: Any) -> Any:
            if is_now(plant().where, rank()):
                hang_here()
            return function(*args, **kwargs)

    planted.hangs = True
    setattr(owner, last, planted)


def _stall_fsync(name: str) -> None:
    """As on a file server that is gone: the first fsync of a path with `name` in it."""
    fsync = os.fsync

    def stalled(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}") and is_now(plant().where, rank()):
            hang_here()
        fsync(descriptor)

    if not hasattr(fsync, "hangs"):
        stalled.hangs = True  # type: ignore[attr-defined]
        os.fsync = stalled


def _stall_metrics() -> None:
    """The same for a line of metrics.jsonl."""
    from lockstep.observability import jsonl

    class Stalled:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            if Path(self.file.name).name == jsonl.METRICS_FILE and is_now(plant().where, rank()):
                hang_here()
            return int(self.file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    init = jsonl.JsonlFile.__init__
    if hasattr(init, "hangs"):
        return

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._file = Stalled(self._file)

    planted.hangs = True  # type: ignore[attr-defined]
    jsonl.JsonlFile.__init__ = planted  # type: ignore[method-assign]


def _accept_other_policy() -> None:
    """The fake server has no model: its log-probs are not those of the trainer."""
    from lockstep.trainer.ppo import ray_trainer
    from lockstep.weight_sync import WeightSync

    WeightSync._canary_gap = lambda self: 0.0  # type: ignore[method-assign]
    ray_trainer.is_gap_expected = lambda config: True


install()
