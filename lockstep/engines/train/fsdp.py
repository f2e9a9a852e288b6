"""The training engine on FSDP2: fp32 master weights, a compute copy in the compute type, any world size.

    world = dp x sp; rank = dp_rank * sp + sp_rank. The sp ranks of one dp rank share its rows, a slice of the packed tokens each.

One process shards nothing: with one type for both the module computes itself, otherwise a copy of it in the compute type does.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from lockstep.engines.train import sharding
from lockstep.engines.train.base import PARTS, LossFn, MicroBatching, TrainEngine
from lockstep.engines.train.compute_copy import copy_in, hand_gradients, refresh
from lockstep.engines.train.offload import Arrival, HostHome, move_optimizer, move_parameters
from lockstep.engines.train.schedule import build_schedule
from lockstep.engines.train.state import load_extra, load_shards, model_state, save_extra, save_shards
from lockstep.models.adjacent import lay_adjacent
from lockstep.models.flat_layers import flatten_layers
from lockstep.models.fused_layers import fuse
from lockstep.models.host_layers import fuse_on_host
from lockstep.models.packing import ForwardRows, forward_rows, prompt_owners
from lockstep.models.token_models import TokenModel
from lockstep.models.ulysses import SequenceGroup, check_heads
from lockstep.protocol.columns import tensors_of
from lockstep.utils.device import HostCopy, to_device
from lockstep.utils.distributed import current_rank, current_world_size, mesh_of
from lockstep.utils.host import settle_on_host, take_threads
from lockstep.utils.seqlen import agreed_runs


class FsdpEngine(TrainEngine):
    """model: its parameters are the master weights, equal on all ranks and already on `device`; frozen ones stay as they are.

    optim: None for a model that only computes (reference, reward model).
    packed: compute on packed tokens rather than on padded rows.
    sequence_parallel_size: ranks that share one row of packed tokens.
    """

    def __init__(
        self,
        model: TokenModel,
        config: FSDPEngineConfig,
        optim: FSDPOptimizerConfig | None,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        packed: bool,
        clip_grad: float = 1.0,
        gradient_checkpointing: bool = False,
        sequence_parallel_size: int = 1,
    ) -> None:
        self.config = config
        self.device = device
        self.packed = packed
        self.clip_grad = clip_grad
        self.world_size = current_world_size()
        self.sp_size = sequence_parallel_size
        self.sequence = self._sequence_group(model)
        self.dp_size = self.world_size // self.sp_size
        self.dp_rank, self.sp_rank = divmod(current_rank(), self.sp_size)
        self.model = model
        if optim is None:
            model.requires_grad_(False)
        elif gradient_checkpointing:
            _enable_gradient_checkpointing(model)
        if device.type == "cpu":
            settle_on_host(sum(parameter.numel() for parameter in model.parameters()))
            fuse_on_host(model)
            flatten_layers(model)
        else:
            fuse(model)
        self._streams = sharding.streams_from_host(config, device)
        self._homes = {part: HostHome() for part in ("masters", "compute", "optimizer")}
        self._arrival = Arrival(device)
        self.compute = model
        if self.world_size > 1 or self._streams:
            sharding.shard(model, config, device, compute_dtype)
        else:
            if _parameter_dtype(model) != compute_dtype:
                self.compute = copy_in(model, compute_dtype)
            if device.type == "cuda":
                lay_adjacent(self.compute)
        self.optimizer: torch.optim.Optimizer | None = None
        if optim is not None:
            trained = [p for p in model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(
                trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
            )
            self.schedule = build_schedule(self.optimizer, optim)
        self.compute.train(optim is not None)
        self.offload()

    def forward(self, batch: TensorDict, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        self._begin(training=False)
        order: list[int] = []
        pieces: list[dict[str, Tensor]] = []
        with torch.no_grad():
            for rows in self._partitions(batch, micro):
                order += rows
                pieces.append(self.compute(self._rows(_taken(batch, rows)), **options))
        sharding.reshard(self.model)
        back = torch.tensor(order).argsort()
        return {name: torch.cat([p[name] for p in pieces]).cpu()[back] for name in pieces[0]}

    def forward_backward(
        self, batch: TensorDict, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        self._begin(training=True)
        totals: dict[str, Tensor] = {}
        own: list[str] = []
        parts = self._partitions(batch, micro)
        for number, rows in enumerate(parts, start=1):
            part = _taken(batch, rows)
            columns = self._loss_columns(part)  # before the forward: a copy after it would wait for its end
            outputs = self.compute(self._rows(part), **options)
            loss, metrics = loss_fn(outputs, columns)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach().float()
            own = sorted(totals)
            if number == len(parts) and own:
                copied = HostCopy(torch.stack([totals[name] for name in own]))  # known before the last backward
            sharding.sum_replicas(self.model, number == len(parts))
            # The loss is the sum of the dp ranks' shares, and the gradient of a share is the sum over its sp ranks, each of which
            # holds what its own tokens add. So the gradient is the sum over all ranks; FSDP takes their mean.
            (loss * self.world_size).backward()
        values = dict(zip(own, copied.read().tolist() if own else []))
        names = self._names_on_all_ranks(own)
        return dict(zip(names, self.global_sum(*(values.get(name, 0.0) for name in names))))

    def _names_on_all_ranks(self, own: list[str]) -> list[str]:
        """Metrics that any rank has: one with nothing but padding may have fewer."""
        if self.dp_size == 1:
            return own
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own)
        return sorted(set().union(*everyones))

    def optimizer_step(self) -> float:
        assert self.optimizer is not None
        self._arrival.wait()
        if self._copied:
            hand_gradients(self.compute, self.model)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = sharding.whole(torch.nn.utils.get_total_norm(gradients)).float()
        copied = HostCopy(norm)
        # The step clips, or does nothing at all where the norm is not finite, so that it need not wait for the norm to be read.
        self.optimizer.grad_scale = ((norm + 1e-6) / self.clip_grad).clamp_min(1.0)  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._refresh()
        value = float(copied.read())
        if not np.isfinite(value):
            raise FloatingPointError(
                f"the gradient norm is {value}: the loss or the model produced a number that is not finite. "
                "No step was taken; the last checkpoint is intact"
            )
        return value

    def schedule_step(self) -> None:
        self.schedule.step()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def global_sum(self, *values: float) -> tuple[float, ...]:
        if self.dp_size == 1 or not values:
            return values
        total = torch.tensor(values, dtype=torch.float64)  # on the host, where the values are
        if self.sp_rank:
            total.zero_()  # these rows are counted by the first of the ranks that share them
        dist.all_reduce(total)
        return tuple(total.tolist())

    @contextmanager
    def gathered(self) -> Iterator[TokenModel]:
        self.onload()
        try:
            with sharding.gathered(self.compute):
                yield self.compute
        finally:
            self.offload()

    @property
    def weights_stay(self) -> bool:
        """Whether what `gathered` gives is the same tensors at all times: neither sharded nor moved away between calls."""
        moves = self.config.param_offload and self.device.type != "cpu"
        return self.world_size == 1 and not self._streams and not moves

    def weights(self) -> Generator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            weight = parameter.detach()
            yield self.model.hf_name(name), sharding.whole(weight if self._streams else weight.to(self.device))

    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:
        if self._streams:
            return
        if self.config.param_offload:
            move_parameters(self.compute, self._homes["compute"], self.device)
        if not optimizer:
            return
        with self._arrival.begin():
            if self.config.param_offload and self._copied:
                move_parameters(self.model, self._homes["masters"], self.device)
            if self.config.optimizer_offload and self.optimizer is not None:
                move_optimizer(self.optimizer, self._homes["optimizer"], self.device)
        if not ahead:
            self._arrival.wait()

    def offload(self) -> None:
        if self.device.type == "cpu" or self._streams:
            return
        self._arrival.wait()
        host = torch.device("cpu")
        if self.config.param_offload:
            move_parameters(self.compute, self._homes["compute"], host)
            if self._copied:
                move_parameters(self.model, self._homes["masters"], host)
        if self.config.optimizer_offload and self.optimizer is not None:
            move_optimizer(self.optimizer, self._homes["optimizer"], host)
        if self.config.param_offload or self.config.optimizer_offload:
            torch.cuda.empty_cache()

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        save_shards(folder, contents, self.model, self.optimizer)
        if "extra" in contents and self.optimizer is not None:
            save_extra(folder, self.schedule)

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        load_shards(folder, contents, self.model, self.optimizer)
        self._refresh()
        if "extra" in contents and self.optimizer is not None:
            load_extra(folder, self.schedule)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole master weights on the host of rank 0, by the module's own names; collective, empty on other ranks."""
        return model_state(self.model, whole=True)

    @property
    def _copied(self) -> bool:
        """Whether a copy of the master weights computes, rather than they themselves."""
        return self.compute is not self.model

    def _begin(self, *, training: bool) -> None:
        """Before a forward: `train` and `eval` would go through all modules even where nothing is to change."""
        if self.compute.training != training:
            self.compute.train(training)
        if self.device.type == "cpu":
            take_threads(decoding=False)

    def _refresh(self) -> None:
        if self._copied:
            refresh(self.compute, self.model)

    def _sequence_group(self, model: TokenModel) -> SequenceGroup | None:
        size = self.sp_size
        if size == 1:
            return None
        if size < 1 or self.world_size % size:
            raise ValueError(
                f"ulysses_sequence_parallel_size={size} does not divide the {self.world_size} ranks of this role; set it to "
                f"a divisor of {self.world_size}"
            )
        if not self.packed:
            raise ValueError(
                f"ulysses_sequence_parallel_size={size} shares packed sequences among ranks: set model.use_remove_padding=true"
            )
        check_heads(model.hf_config.get_text_config().num_attention_heads, size)
        return SequenceGroup(mesh_of(self.device, size).get_group("inner"), current_rank() % size, size)

    def _partitions(self, batch: TensorDict, micro: MicroBatching) -> list[list[int]]:
        """Rows of each micro-batch, as many of them on every rank. A token budget is one rank's: `sp_size` ranks have more."""
        if micro.max_tokens is not None:
            group = dist.group.WORLD if self.world_size > 1 else None
            ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy().astype(bool)
            start = ids.shape[1] - batch["responses"].shape[1]
            own, before = mask[:, start:].sum(-1).tolist(), mask[:, :start].sum(-1).tolist()
            owners = prompt_owners(ids, mask, start) if self.packed else list(range(len(batch)))
            return agreed_runs(own, before, owners, micro.max_tokens * self.sp_size, group)
        size = micro.num_rows or len(batch)
        return [list(range(i, min(i + size, len(batch)))) for i in range(0, len(batch), size)]

    def _loss_columns(self, batch: TensorDict) -> TensorDict:
        """The rows on the device, without the tokens that only the forward reads."""
        columns = tensors_of(batch.exclude("prompts", "input_ids", "attention_mask", "position_ids"))
        return TensorDict({k: to_device(v, self.device) for k, v in columns.items()}, batch_size=batch.batch_size)

    def _rows(self, batch: TensorDict) -> ForwardRows:
        return forward_rows(batch, self.device, packed=self.packed, sequence=self.sequence)


def _taken(batch: TensorDict, rows: list[int]) -> TensorDict:
    """These rows of the batch; not copied where they follow each other."""
    start, end = rows[0], rows[-1] + 1
    if rows != list(range(start, end)):
        return batch[rows]
    return batch if len(rows) == len(batch) else batch[start:end]


def _parameter_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    for module in model.children():
        enable = getattr(module, "gradient_checkpointing_enable", None)
        if enable is not None:
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
