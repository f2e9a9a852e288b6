"""How new weights reach servers: one bucket of named tensors at a time, to all servers at once."""

import asyncio
import base64
import os
import pickle
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lockstep.config.actor_rollout_ref import ServerConfig
from lockstep.engines.rollout.server.http import KEY, ServerError
from lockstep.engines.rollout.server.inference_server import Server
from lockstep.utils.distributed import join_group

Bucket = list[tuple[str, Tensor]]
ForEach = Callable[[Callable[[Server], Awaitable[None]]], Awaitable[None]]
"""Calls a function for every server that takes part in the update."""


class WeightTransfer(ABC):
    async def open(self, servers: list[Server]) -> None:  # noqa: B027
        """Prepare, once."""

    @abstractmethod
    async def send(self, tensors: Bucket, for_each: ForEach) -> None:
        """Load a bucket on all servers."""


class FileTransfer(WeightTransfer):
    """Safetensors files in a folder that the servers see under the same path; each is deleted once it is loaded."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    async def open(self, servers: list[Server]) -> None:
        folder = self._config.weights_folder
        if folder is None:
            remote = [server.url for server in servers if not _is_local(server.url)]
            if remote:
                raise ServerError(
                    f"{remote[0]} is on another machine; set {KEY}.weights_folder to a folder that it shares with the workers"
                )
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        self._folder = folder

    async def send(self, tensors: Bucket, for_each: ForEach) -> None:
        with tempfile.TemporaryDirectory(prefix="lockstep-weights-", dir=self._folder) as folder:
            Path(folder).chmod(0o755)  # the server may run as another user
            path = f"{folder}/bucket.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, path)
            await for_each(lambda server: server.protocol.load_file(server, path))


class TensorTransfer(WeightTransfer):
    """In the body of the request: works everywhere, but every byte passes through HTTP."""

    async def send(self, tensors: Bucket, for_each: ForEach) -> None:
        payload = base64.b64encode(pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in tensors])).decode()
        await for_each(lambda server: server.protocol.load_tensors(server, payload))


class DistributedTransfer(WeightTransfer):
    """Broadcast in a process group of this worker (rank 0) and all ranks of the servers."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._group: Any = None
        self._name = f"lockstep-{uuid4().hex[:12]}"  # a server keeps the groups of earlier runs

    async def open(self, servers: list[Server]) -> None:
        sizes = [await server.protocol.num_ranks(server) for server in servers]
        size = 1 + sum(sizes)
        address = _address_for(servers[0].url)
        port = _free_port()
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        first_ranks = [1 + sum(sizes[:place]) for place in range(len(servers))]
        joining = [
            server.protocol.join_group(server, self._name, address, port, first, size, backend)
            for server, first in zip(servers, first_ranks)
        ]
        self._group, *_ = await asyncio.gather(
            asyncio.to_thread(join_group, self._name, address, port, 0, size, backend, self._timeout_s), *joining
        )

    async def send(self, tensors: Bucket, for_each: ForEach) -> None:
        about = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
        await asyncio.gather(
            asyncio.to_thread(self._broadcast, tensors),
            for_each(lambda server: server.protocol.load_broadcast(server, self._name, about)),
        )

    def _broadcast(self, tensors: Bucket) -> None:
        for _, tensor in tensors:
            dist.broadcast(tensor.to(self._device).contiguous(), src=0, group=self._group)


def transfer_of(servers: list[Server], config: ServerConfig, device: torch.device) -> WeightTransfer:
    """The form that the config names and all servers have."""
    wanted, offered = config.weight_transfer, servers[0].protocol.transfers
    if wanted == "auto":
        has_folder = config.weights_folder is not None or all(_is_local(server.url) for server in servers)
        on_cpu = device.type == "cpu" and "tensor" in offered
        wanted = "file" if "file" in offered and has_folder else "tensor" if on_cpu else "distributed"
    for server in servers:
        if wanted not in server.protocol.transfers:
            forms = " or ".join(server.protocol.transfers)
            raise ValueError(
                f"{KEY}.weight_transfer={wanted}: {server.url} takes weights by {forms}; set one of these, or auto"
            )
    if wanted == "file":
        return FileTransfer(config)
    return TensorTransfer() if wanted == "tensor" else DistributedTransfer(device, config.timeout_s)


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")


def _address_for(url: str) -> str:
    """This machine's address, as seen from the server."""
    parts = urlsplit(url)
    family, *_, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
