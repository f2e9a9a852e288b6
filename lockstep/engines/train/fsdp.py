"""The training engine on FSDP2: fp32 master weights, a compute copy in the compute type, any world size.

    world = dp x sp; rank = dp_rank * sp + group_rank. The sp ranks of a dp rank share its rows, a slice of the packed tokens each.

One process shards nothing: with one type for both the module computes itself, otherwise a copy of it in the compute type does.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from lockstep.engines.train import sharding
from lockstep.engines.train.checkpointing import LayerCheckpointing
from lockstep.engines.train.compute_copy import copy_in, hand_gradients, refresh
from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.lr_schedule import build_schedule
from lockstep.engines.train.offload import CopyStream, OffloadedMoments, PinnedBuffer, move_parameters
from lockstep.engines.train.optimizer import PiecewiseAdamW, build_optimizer
from lockstep.engines.train.state import load_extra, load_shards, save_extra, save_shards
from lockstep.engines.train.token_module import open_token_model
from lockstep.engines.train.train_engine import PARTS, EngineModel, LossFn, MicroBatching, TrainEngine
from lockstep.models.export import save_policy, save_scalar_model
from lockstep.models.four_bit import dequantized, whole_shape
from lockstep.models.known_models import computes_packed
from lockstep.models.loading import resolve_dtype
from lockstep.models.lora import (
    adapters_off,
    base_name,
    has_adapters,
    merge_adapters,
    of_adapter,
    save_adapter,
    trial_adapters,
)
from lockstep.models.lora_identity import LoraIdentity, check_identity, identity_of, save_identity
from lockstep.models.model_check import (
    check_batch,
    check_causal_outputs,
    check_outputs,
    refuse_errors,
    transformers_forward,
    without_last,
)
from lockstep.models.packed_weights import pack_weights
from lockstep.models.packing import ForwardRows, Layout, forward_rows
from lockstep.models.rope import rope_limit
from lockstep.models.router_replay import FREE, Routing
from lockstep.models.shared_weights import copy_gathered, release_weights, rollout_module, share_weights
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.models.ulysses import SequenceGroup, check_heads
from lockstep.models.weight_source import WeightSource
from lockstep.protocol.columns import Batch, tensors_of
from lockstep.protocol.ragged import is_ragged
from lockstep.protocol.tokens import lengths_of, prompt_owners
from lockstep.utils.device import HostCopy, to_device
from lockstep.utils.distributed import current_rank, current_world_size, get_mesh
from lockstep.utils.host import prepare_cpu_for
from lockstep.utils.progress import count, phase
from lockstep.utils.seqlen import agreed_runs
from lockstep.utils.spans import spanned


class FsdpEngine(TrainEngine):
    """model: its parameters are the master weights; frozen ones stay as they are.

    weights: fills the parameters of `model.transformer` that are on the meta device, each rank its own shards; without it the
             parameters are equal on all ranks and already on `device`.
    optim: None for a model that only computes (reference, reward model).
    packed: compute on packed tokens rather than on padded rows.
    sequence_parallel_size: ranks that share one row of packed tokens.
    router_key: see `EngineModel`.
    """

    info = TRAIN_ENGINES.built_in["fsdp"]

    def __init__(
        self,
        model: TokenModel,
        config: FSDPEngineConfig,
        optim: FSDPOptimizerConfig | None,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        packed: bool,
        weights: WeightSource | None = None,
        clip_grad: float = 1.0,
        gradient_checkpointing: bool = False,
        sequence_parallel_size: int = 1,
        router_key: str | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.layout: Layout = "packed" if packed else "padded"
        if not computes_packed(model.transformer):
            self.layout = "rows"
        self.clip_grad = clip_grad
        self.world_size = current_world_size()
        self.sp_size = sequence_parallel_size
        self.sequence = self._sequence_group(model)
        self.dp_size = self.world_size // self.sp_size
        self.dp_rank, self.group_rank = divmod(current_rank(), self.sp_size)
        self.model = model
        if optim is None:
            model.requires_grad_(False)
        model.eval()  # no noise; only the layers that recompute their activations must be in training mode
        if device.type == "cpu":
            prepare_cpu_for(sum(parameter.numel() for parameter in model.parameters()))
        self._compute_dtype = compute_dtype
        self._max_length = rope_limit(model)
        self._streams = sharding.streams_from_host(config, device)
        self._buffers = {part: PinnedBuffer() for part in ("masters", "compute")}
        self._copies = CopyStream(device)
        self._identity: LoraIdentity | None = None
        self._loss_scale = LossScale(enabled=compute_dtype == torch.float16)
        self.compute = model
        if self._sharded:
            sharding.shard(model, config, device, compute_dtype)
        if weights is not None:
            weights.fill(model.transformer, torch.device("cpu") if self._streams else device)
        if not self._sharded:
            if _master_dtype(model) != compute_dtype:
                self.compute = copy_in(model, compute_dtype)
            pack_weights(self.compute)
        self.checkpointing: LayerCheckpointing | None = None
        if optim is not None and gradient_checkpointing:
            saves_memory = config.param_offload or config.optimizer_offload or config.offload_policy
            self.checkpointing = LayerCheckpointing(self.compute, device, compute_dtype, every_layer=saves_memory)
        self.optimizer: torch.optim.AdamW | None = None
        self._moments: OffloadedMoments | None = None
        if optim is not None:
            trained = [p for p in model.parameters() if p.requires_grad]
            offloaded = config.optimizer_offload and device.type != "cpu" and not self._streams
            self.optimizer = build_optimizer(trained, optim, seed=config.seed, in_pieces=offloaded)
            if offloaded:
                assert isinstance(self.optimizer, PiecewiseAdamW)
                self._moments = OffloadedMoments(self.optimizer, device)
            self.schedule = build_schedule(self.optimizer, optim)
        self._check_model()
        if router_key is not None:
            self._watch_routers(router_key)
        self.offload()

    @classmethod
    def open(cls, model: EngineModel, device: torch.device) -> Self:
        module, weights = open_token_model(model, device)
        return cls(
            module,
            model.engine,
            model.optim,
            weights=weights,
            device=device,
            compute_dtype=resolve_dtype(model.engine.dtype, device),
            packed=model.config.use_remove_padding,
            clip_grad=model.clip_grad,
            gradient_checkpointing=model.config.enable_gradient_checkpointing,
            sequence_parallel_size=model.sequence_parallel_size,
            router_key=model.router_key,
        )

    def _watch_routers(self, key: str) -> None:
        """ValueError if the model's routers cannot be read."""
        assert isinstance(self.compute, PolicyModel)
        if self.layout == "rows":
            kind = self.model.hf_config.model_type
            raise ValueError(f"{key}: {kind} computes by its own forward, whose routers cannot be read; disable it")
        self.compute.routing = Routing(self.compute.transformer, key)
        batch = check_batch(self.model.hf_config.get_text_config().vocab_size)
        with torch.no_grad():
            self.compute(forward_rows(batch, self.device, self.layout, with_places=True), routes="record")
        sharding.reshard(self.compute)

    def forward(self, batch: Batch, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        order: list[int] = []
        pieces: list[dict[str, Tensor]] = []
        with torch.no_grad():
            for rows in self._partitions(batch, micro):
                order += rows
                out = self.compute(
                    self._rows(_taken(batch, rows), with_places=options.get("routes") == "record"), **options
                )
                # routes are many times larger than other results
                pieces.append({k: v.cpu() if k == "routed_experts" else v for k, v in out.items()})
                count(len(order), len(batch), "sequences")
        sharding.reshard(self.model)
        back = torch.tensor(order).argsort()
        return {name: _joined([p[name] for p in pieces]).cpu()[back] for name in pieces[0]}

    @spanned
    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        totals: dict[str, Tensor] = {}
        own: list[str] = []
        parts = self._partitions(batch, micro)
        for number, rows in enumerate(parts, start=1):
            count(number, len(parts), "micro-batches")
            part = _taken(batch, rows)
            rows_on_device = self._rows(part)
            columns = self._loss_columns(part)  # before the forward: a copy after it would wait for its end
            if self.checkpointing is not None:
                self.checkpointing.plan(rows_on_device.input_ids.numel())
            outputs = self.compute(rows_on_device, **options)
            loss, metrics = loss_fn(outputs, columns)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach().float()
            own = sorted(totals)
            if number == len(parts) and own:
                copied = HostCopy(torch.stack([totals[name] for name in own]))  # known before the last backward
            sharding.sum_replicas(self.model, number == len(parts))
            # The loss is the sum of the dp ranks' shares, and the gradient of a share is the sum over its sp ranks, each of which
            # holds what its own tokens add. So the gradient is the sum over all ranks; FSDP takes their mean.
            (loss * (self.world_size * self._loss_scale.value)).backward()
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

    @spanned
    def optimizer_step(self) -> float:
        assert self.optimizer is not None
        self._copies.wait()
        if self._copied:
            hand_gradients(self.compute, self.model)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        scale = self._loss_scale.value
        norm = sharding.whole(torch.nn.utils.get_total_norm(gradients)).float() / scale
        copied = HostCopy(norm)
        # The step divides gradients by grad_scale, and is skipped if found_inf; the fused AdamW reads both on the device.
        self.optimizer.grad_scale = ((norm + 1e-6) / self.clip_grad).clamp_min(1.0) * scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        gradients.clear()  # the streamed step frees each gradient after use
        (self._moments or self.optimizer).step()
        self.optimizer.zero_grad()
        self._refresh()
        value = float(copied.read())
        self._loss_scale.update(value)
        return value

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        with adapters_off(self.compute):
            yield

    def schedule_step(self) -> None:
        self.schedule.step()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def global_sum(self, *values: float) -> tuple[float, ...]:
        if self.dp_size == 1 or not values:
            return values
        total = torch.tensor(values, dtype=torch.float64)  # on the host, where the values are
        if self.group_rank:
            total.zero_()  # these rows are counted by the first of the ranks that share them
        dist.all_reduce(total)
        return tuple(total.tolist())

    def rollout_module(self) -> PreTrainedModel:
        return rollout_module(self.model.transformer)

    @contextmanager
    def lend_weights(self, module: PreTrainedModel) -> Iterator[None]:
        self.onload()
        try:
            if self._sharded:
                has_base = has_adapters(self.model) and not any(p.is_meta for p in module.parameters())
                whole = self.weights(trained=True) if has_base else self._whole_by_group()
                copy_gathered(module, whole, self.compute.transformer)
            else:
                share_weights(module, self.compute.transformer)
            yield
        finally:
            if self.config.param_offload and self.device.type != "cpu":
                release_weights(module)
            self.offload()

    def _whole_by_group(self) -> Generator[tuple[str, Tensor]]:
        for name, parameter in sharding.whole_by_group(self.compute):
            yield self.compute.hf_name(name), parameter

    def weights(self, *, trained: bool = False) -> Generator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if trained and not parameter.requires_grad:
                continue
            weight = dequantized(parameter)
            yield self.model.hf_name(name), sharding.whole(weight if self._streams else weight.to(self.device))

    def merged_weights(self) -> Generator[tuple[str, Tensor]]:
        adapters = dict(self.weights(trained=True)) if has_adapters(self.model) else {}
        yield from merge_adapters(self.model.transformer, self.weights(), adapters)

    def weight_shapes(self, *, merged: bool) -> list[tuple[str, tuple[int, ...]]]:
        shapes = [(self.model.hf_name(name), p) for name, p in self.model.named_parameters()]
        if merged:
            return [(base_name(name), whole_shape(p)) for name, p in shapes if not of_adapter(name)]
        return [(name, tuple(p.shape)) for name, p in shapes if p.requires_grad]

    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:
        if self._streams:
            return
        if self.config.param_offload:
            move_parameters(self.compute, self._buffers["compute"], self.device)
        if optimizer and self.config.param_offload and self._copied:
            with self._copies.copying():
                move_parameters(self.model, self._buffers["masters"], self.device, shared=self._frozen)
            if not ahead:
                self._copies.wait()

    def offload(self) -> None:
        if self.device.type == "cpu" or self._streams:
            return
        self._copies.wait()
        host = torch.device("cpu")
        if self.config.param_offload:
            move_parameters(self.compute, self._buffers["compute"], host)
            if self._copied:
                move_parameters(self.model, self._buffers["masters"], host, shared=self._frozen)
        if self.config.param_offload or self.config.optimizer_offload:
            torch.cuda.empty_cache()

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        save_shards(folder, contents, self.model, self.optimizer)
        if has_adapters(self.model):
            save_identity(folder, self._lora_identity())
        if "extra" in contents and self.optimizer is not None:
            save_extra(folder, self.schedule, self._loss_scale)

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        check_identity(folder, self._lora_identity() if has_adapters(self.model) else None)
        if self._moments is not None:
            self._moments.create()
        load_shards(folder, contents, self.model, self.optimizer)
        self._refresh()
        if "extra" in contents and self.optimizer is not None:
            load_extra(folder, self.schedule, self._loss_scale)

    def saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weights`, then the buffers that a Hugging Face folder contains."""
        yield from self.weights()
        saved = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name in saved:
                yield self.model.hf_name(name), buffer

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        if has_adapters(self.model):
            save_adapter(self.model, self.weights(trained=True), tokenizer, folder / "lora_adapter")
            return
        save = save_scalar_model if isinstance(self.model, ScalarModel) else save_policy
        save(self.model.transformer, self.saved_weights(), tokenizer, folder / "huggingface")

    def _lora_identity(self) -> LoraIdentity:
        """Collective at the first call: the base does not change."""
        if self._identity is None:
            frozen = {self.model.hf_name(name) for name, p in self.model.named_parameters() if not p.requires_grad}
            base = ((name, weight) for name, weight in self.weights() if name in frozen)
            self._identity = identity_of(self.model.transformer, base)
        return self._identity

    @property
    def _copied(self) -> bool:
        """Whether a copy of the master weights computes, rather than they themselves."""
        return self.compute is not self.model

    @property
    def _frozen(self) -> list[nn.Parameter]:
        """Parameters that the masters share with the compute copy."""
        copies = set(map(id, self.compute.parameters()))
        return [parameter for parameter in self.model.parameters() if id(parameter) in copies]

    @property
    def _sharded(self) -> bool:
        return self.world_size > 1 or self._streams

    def _check_model(self) -> None:
        """Compare log-probs or values of a few random rows with transformers' own eager forward, which must be causal."""
        layouts: list[Layout] = ["rows"] if self.layout == "rows" else ["packed", "padded"]
        # masters of adapters do not compute: they have another dtype than their base
        models = [self.model, self.compute] if self._copied and not has_adapters(self.model) else [self.compute]
        batch = check_batch(self.model.hf_config.get_text_config().vocab_size)
        for model in models:
            with phase("check the model"), refuse_errors(model.transformer), torch.no_grad(), trial_adapters(model):
                got = [model(forward_rows(batch, self.device, layout)) for layout in layouts]
                with transformers_forward(model.transformer):
                    expected, later = (
                        model(forward_rows(b, self.device, "rows")) for b in (batch, without_last(batch))
                    )
            sharding.reshard(model)
            dtype = self._compute_dtype if model is self.compute else _master_dtype(model)
            check_causal_outputs(expected, later, batch, model=model.transformer, dtype=dtype)
            for layout, outputs in zip(layouts, got):
                path = f"training with {layout} rows"
                check_outputs(outputs, expected, batch, model=model.transformer, path=path, dtype=dtype)

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
        if self.layout == "rows":
            raise ValueError(
                f"ulysses_sequence_parallel_size={size}: {model.hf_config.model_type} computes one row at a time by its "
                "own forward, which ranks cannot share; set it to 1"
            )
        if self.layout != "packed":
            raise ValueError(
                f"ulysses_sequence_parallel_size={size} shares packed sequences among ranks: set model.use_remove_padding=true"
            )
        check_heads(model.hf_config.get_text_config().num_attention_heads, size)
        mesh = get_mesh(self.device, {"dp": self.world_size // size, "sp": size})
        return SequenceGroup(mesh.get_group("sp"), current_rank() % size, size)

    def _partitions(self, batch: Batch, micro: MicroBatching) -> list[list[int]]:
        """Rows of each micro-batch, as many of them on every rank. A token budget is one rank's: `sp_size` ranks have more."""
        if self.layout == "rows":  # each row gathers parameters: ranks must agree on rows per micro-batch
            return [list(range(i, i + micro.group_size)) for i in range(0, len(batch), micro.group_size)]
        if micro.max_tokens is not None:
            group = dist.group.WORLD if self.world_size > 1 else None
            before, own = (lengths.tolist() for lengths in lengths_of(batch))
            owners = prompt_owners(batch) if self.layout == "packed" else list(range(len(batch)))
            return agreed_runs(own, before, owners, micro.max_tokens * self.sp_size, group, micro.group_size)
        size = micro.num_rows or len(batch)
        return [list(range(i, min(i + size, len(batch)))) for i in range(0, len(batch), size)]

    def _loss_columns(self, batch: TensorDict) -> TensorDict:
        """The rows on the device, without the tokens that only the forward reads."""
        columns = tensors_of(batch.exclude("prompts", "input_ids", "attention_mask", "position_ids", "routed_experts"))
        return TensorDict({k: to_device(v, self.device) for k, v in columns.items()}, batch_size=batch.batch_size)

    def _rows(self, batch: TensorDict, *, with_places: bool = False) -> ForwardRows:
        longest = int(batch["position_ids"].max()) + 1
        if self._max_length is not None and longest > self._max_length:
            raise ValueError(
                f"a sequence has {longest} tokens, but the rotary frequencies of {self.model.hf_config.model_type} change "
                f"beyond {self._max_length}; shorten data.max_prompt_length or data.max_response_length"
            )
        return forward_rows(batch, self.device, self.layout, self.sequence, with_places=with_places)


def _taken(batch: Batch, rows: list[int]) -> TensorDict:
    """These rows of the batch, padded; those of a padded batch are not copied where they follow each other."""
    start, end = rows[0], rows[-1] + 1
    part: Any = (
        batch[rows] if rows != list(range(start, end)) else batch if len(rows) == len(batch) else batch[start:end]
    )
    return part.to_tensordict() if is_ragged(part) else part


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts; those of routes are as long as the longest sequence of their part."""
    width = max((part.shape[1] for part in parts if part.ndim == 4), default=0)
    return torch.cat([F.pad(p, (0, 0, 0, 0, 0, width - p.shape[1]), value=FREE) if p.ndim == 4 else p for p in parts])


def _master_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the trained parameters; of all, if none is trained."""
    return next((p for p in model.parameters() if p.requires_grad), next(model.parameters())).dtype
