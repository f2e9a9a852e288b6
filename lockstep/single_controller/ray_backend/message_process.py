"""A `MessageProcess` on a Ray cluster: an actor that takes no GPU and reserves no CPU."""

import pickle
from collections.abc import Callable
from typing import Any

from lockstep.single_controller.environment import ProcessEnvironment
from lockstep.single_controller.message_process import CLOSE_TIMEOUT_S, MessageProcess, Peer, role_and_number
from lockstep.single_controller.ray_backend.cluster import node_of, ray
from lockstep.single_controller.ray_backend.futures import RayFuture
from lockstep.single_controller.ray_backend.host import WorkerHost
from lockstep.single_controller.worker import Place
from lockstep.single_controller.worker_group import ClassWithInitArgs
from lockstep.utils import heartbeat

THREADS = 4
"""Calls that an actor runs at once: `push`, `pull`, `close`, and one more for `info`."""


class _Unpickling:
    """Messages as bytes: arrays that Ray unpickles itself cannot be written to."""

    def __init__(self, make_peer: Callable[[], Peer]) -> None:
        self._peer = make_peer()
        self.pull = self._peer.pull
        self.close = self._peer.close

    def push(self, messages: bytes) -> None:
        self._peer.push(pickle.loads(messages))


class RayProcess(MessageProcess):
    """
    name:      for error messages.
    number:    processes with successive numbers are spread over the cluster's machines.
    make_peer: called in the process.
    """

    def __init__(self, name: str, number: int, make_peer: Callable[[], Peer]) -> None:
        self.name = name
        options = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": THREADS, "scheduling_strategy": node_of(number)}
        host: Any = ray.remote(WorkerHost).options(**options)
        self.handle = host.remote(ProcessEnvironment.capture())
        role, rank = role_and_number(name)
        init, link = ClassWithInitArgs(_Unpickling, make_peer), heartbeat.current_link()
        self._constructed = self.handle.construct.remote(init, Place(rank), {}, name, role, link)
        self._is_closed = False

    @property
    def pid(self) -> int:
        pid: int = self._call("info").pid
        return pid

    def send(self, messages: list[Any]) -> None:
        self._wait_constructed()
        self._call("call", "push", self.name, pickle.dumps(messages))

    def receive(self) -> list[Any]:
        self._wait_constructed()
        messages: list[Any] = self._call("call", "pull", self.name)
        return messages

    def close(self) -> None:
        if self._is_closed or not ray.is_initialized():
            return
        self._is_closed = True
        ray.wait([self.handle.call.remote("close", self.name)], timeout=CLOSE_TIMEOUT_S)
        ray.kill(self.handle, no_restart=True)

    def _wait_constructed(self) -> None:
        """Calls of an actor with several threads may overtake each other."""
        RayFuture(self._constructed, self.name).value()

    def _call(self, method: str, *args: Any) -> Any:
        return RayFuture(getattr(self.handle, method).remote(*args), self.name).value()
