"""The training engine on FSDP2: fp32 master weights, a compute copy in the compute type, any world size.

At world size 1 with one type for both there is nothing to shard or cast, and the module stays as it is.
"""

import atexit
import random
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from lockstep.engines.train.base import PARTS, LossFn, MicroBatching, TrainEngine
from lockstep.engines.train.schedule import build_schedule
from lockstep.models.packing import ForwardRows, forward_rows, sequence_lengths
from lockstep.utils.seqlen import agreed_partitions

# without a process group one process writes and reads a checkpoint alone, as it should
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class FsdpEngine(TrainEngine):
    """model: a `PolicyModel` or `ScalarModel` whose parameters are the master weights, already on `device`.

    optim: None for a model that only computes (reference, reward model).
    packed: compute on packed tokens rather than on padded rows.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FSDPEngineConfig,
        optim: FSDPOptimizerConfig | None,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        packed: bool,
        clip_grad: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.config = config
        self.device = device
        self.packed = packed
        self.clip_grad = clip_grad
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.model = model
        if gradient_checkpointing and optim is not None:
            _enable_gradient_checkpointing(model)
        if self.world_size > 1 or _parameter_dtype(model) != compute_dtype:
            _shard(model, config, device, compute_dtype)
        self.optimizer: torch.optim.Optimizer | None = None
        if optim is not None:
            self.optimizer = torch.optim.AdamW(
                model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
            )
            self.schedule = build_schedule(self.optimizer, optim)
        else:
            model.requires_grad_(False)
        self.offload()

    def forward(self, batch: TensorDict, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        self.model.eval()
        order: list[int] = []
        pieces: list[dict[str, Tensor]] = []
        with torch.no_grad():
            for rows in self._partitions(batch, micro):
                order += rows
                pieces.append(self.model(self._rows(batch[rows]), **options))
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # the root keeps its parameters for a backward that does not come
        back = torch.tensor(order).argsort()
        return {name: torch.cat([p[name] for p in pieces]).cpu()[back] for name in pieces[0]}

    def forward_backward(
        self, batch: TensorDict, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        self.model.train()
        totals: dict[str, Tensor] = {}
        for rows in self._partitions(batch, micro):
            part = batch[rows]
            outputs = self.model(self._rows(part), **options)
            loss, metrics = loss_fn(outputs, part.to(self.device))
            (loss * self.world_size).backward()  # data-parallel gradients are averaged, the shares of a loss add up
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach().float()
        names = sorted(totals)
        return dict(zip(names, self.global_sum(*(torch.stack([totals[n] for n in names]).tolist() if names else []))))

    def optimizer_step(self) -> float:
        assert self.optimizer is not None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not np.isfinite(value):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"the gradient norm is {value}: the loss or the model produced a number that is not finite. "
                "No step was taken; the last checkpoint is intact"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def schedule_step(self) -> None:
        self.schedule.step()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def global_sum(self, *values: float) -> tuple[float, ...]:
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return tuple(total.tolist())

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        self.onload()
        sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.unshard()
        try:
            yield self.model
        finally:
            for module in sharded:
                module.reshard()
            self.offload()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name.partition(".")[2], tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def onload(self, *, optimizer: bool = False) -> None:
        if self.config.param_offload:
            self.model.to(self.device)
        if optimizer and self.config.optimizer_offload and self.optimizer is not None:
            _move_optimizer(self.optimizer, self.device)

    def offload(self) -> None:
        if self.device.type == "cpu":
            return
        if self.config.param_offload:
            self.model.to("cpu")
        if self.config.optimizer_offload and self.optimizer is not None:
            _move_optimizer(self.optimizer, torch.device("cpu"))
        if self.config.param_offload or self.config.optimizer_offload:
            torch.cuda.empty_cache()

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        state = self._state(self._saved_parts(contents))
        if state:
            with _plain_errors():
                dcp.save(state, checkpoint_id=str(folder / "shards"), no_dist=not dist.is_initialized())
        if "extra" in contents and self.optimizer is not None:
            torch.save({"schedule": self.schedule.state_dict(), "rng": _rng_state()}, _extra_file(folder, _rank()))

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        held = _held_parts(folder)
        if "model" in contents and "model" not in held:
            raise ValueError(f"{folder} holds no model: it was saved without `model` in checkpoint.save_contents")
        state = self._state([part for part in contents if part in held])
        if state:
            with _plain_errors():
                dcp.load(state, checkpoint_id=str(folder / "shards"), no_dist=not dist.is_initialized())
        if "model" in state:
            set_model_state_dict(self.model, state["model"])
        if "optimizer" in state:
            assert self.optimizer is not None
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        if "extra" in contents and self.optimizer is not None:
            own = _extra_file(folder, _rank())
            extra = torch.load(own if own.exists() else _extra_file(folder, 0), weights_only=False)
            self.schedule.load_state_dict(extra["schedule"])
            _set_rng_state(extra["rng"])

    def _saved_parts(self, contents: Collection[str]) -> list[str]:
        """An optimizer that has not stepped has no state; asking it for one would make it take a step."""
        stepped = self.optimizer is not None and bool(self.optimizer.state)
        return [part for part in contents if part != "optimizer" or stepped]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole master weights on the host (rank 0), by the module's own names."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(dict[str, Tensor], get_model_state_dict(self.model, options=options))

    def _state(self, contents: Collection[str]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if "model" in contents:
            state["model"] = get_model_state_dict(self.model)
        if "optimizer" in contents and self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def _partitions(self, batch: TensorDict, micro: MicroBatching) -> list[list[int]]:
        if micro.max_tokens is not None:
            return agreed_partitions(sequence_lengths(batch), micro.max_tokens)
        size = micro.num_rows or len(batch)
        return [list(range(i, min(i + size, len(batch)))) for i in range(0, len(batch), size)]

    def _rows(self, batch: TensorDict) -> ForwardRows:
        return forward_rows(batch, self.device, packed=self.packed)


def _parameter_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    for module in model.children():
        enable = getattr(module, "gradient_checkpointing_enable", None)
        if enable is not None:
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _shard(model: nn.Module, config: FSDPEngineConfig, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Shard each decoder layer, then the rest; the gathered parameters are cast to `compute_dtype`."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in _decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return [m for m in model.modules() if type(m).__name__ in names]


def _move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device, non_blocking=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """The first rank's own error in place of the BaseException that a distributed checkpoint wraps it in."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _held_parts(folder: Path) -> set[str]:
    """Parts of the state that a checkpoint's shards hold."""
    shards = folder / "shards"
    if not (shards / ".metadata").is_file():
        return set()
    names = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    return {name.partition(".")[0] for name in names}


def _extra_file(folder: Path, rank: int) -> Path:
    return folder / f"extra_rank_{rank}.pt"


def _rng_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
