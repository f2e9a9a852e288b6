"""Processes that live for a whole test module and run functions as the ranks of a process group."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lockstep.utils.distributed import join_process_group, leave_process_group
from tests.programs import forking_context


class Ranks:
    """One set of processes for each world size that is asked for, made when it is first needed. device: of all ranks."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._sets: dict[int, _ProcessSet] = {}

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` gives on each rank; its error on the first rank that has one."""
        if world_size not in self._sets:
            self._sets[world_size] = _ProcessSet(world_size, self._device)
        replies = self._sets[world_size].call(function, args)
        for _, error, trace in replies:
            if error is not None:
                error.add_note(trace)
                raise error
        return [result for result, _, _ in replies]

    def close(self) -> None:
        for processes in self._sets.values():
            processes.end()


def run_program(module: str, arguments: list[str]) -> int:
    """`python -m MODULE ARGUMENTS` as torchrun starts it on this rank; its exit code."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    code: int = import_module(module).main(arguments)
    return code


class _ProcessSet:
    def __init__(self, size: int, device: str) -> None:
        # CUDA does not survive a fork
        context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else forking_context()
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port, device), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies is seen
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        return [pipe.recv() for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(pipe: Connection, rank: int, world_size: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank, world_size, torch.device(device), timeout_s=60)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            leave_process_group()
            return
        try:
            pipe.send((function(*args), None, ""))
        except Exception as error:  # noqa: BLE001 - it is raised again in the test
            try:
                pickle.dumps(error)
            except Exception:  # noqa: BLE001 - such as errors of Triton
                error = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send((None, error, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
