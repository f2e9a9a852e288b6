"""The training engine on FSDP2: fp32 master weights, a compute copy in the compute type, any world size.

    world = dp x sp; rank = dp_rank * sp + group_rank. The sp ranks of a dp rank share its rows, a slice of the packed tokens each.

One process shards nothing: with one type for both the module computes itself, otherwise a copy of it in the compute type does.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from lockstep.engines.train import sharding
from lockstep.engines.train.checkpointing import LayerCheckpointing
from lockstep.engines.train.compute_copy import copy_in, hand_gradients, refresh
from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.lr_schedule import build_schedule
from lockstep.engines.train.offload import CopyStream, OffloadedMoments, PinnedBuffer, move_parameters
from lockstep.engines.train.optimizer import PiecewiseAdamW, build_optimizer, local, steps_taken
from lockstep.engines.train.state import load_extra, load_shards, save_extra, save_shards
from lockstep.engines.train.token_engine import TokenEngine
from lockstep.engines.train.token_module import open_token_model
from lockstep.engines.train.train_engine import PARTS, EngineModel
from lockstep.models.four_bit import dequantized, is_4bit
from lockstep.models.known_models import has_states
from lockstep.models.loading import resolve_dtype
from lockstep.models.lora import (
    adapters_off,
    has_adapters,
)
from lockstep.models.lora_identity import LoraIdentity, check_identity, identity_of, save_identity
from lockstep.models.packed_weights import pack_weights
from lockstep.models.shared_weights import copy_gathered, release_weights, share_weights, shared_tensors
from lockstep.models.token_models import TokenModel
from lockstep.models.ulysses import SequenceGroup, check_heads
from lockstep.models.weight_source import WeightSource
from lockstep.utils.determinism import choose_attention, deterministic_kernels, prepare_cublas
from lockstep.utils.device import HostCopy
from lockstep.utils.distributed import current_rank, get_mesh
from lockstep.utils.host import prepare_cpu_for
from lockstep.utils.spans import spanned
from lockstep.utils.tensor_places import named


class FsdpEngine(TokenEngine):
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
        super().__init__(model, device=device, packed=packed)
        self.config = config
        self.clip_grad = clip_grad
        self.sp_size = sequence_parallel_size
        self.sequence = self._sequence_group(model)
        self.dp_size = self.world_size // self.sp_size
        self.dp_rank, self.group_rank = divmod(current_rank(), self.sp_size)
        if optim is None:
            model.requires_grad_(False)
        elif config.full_determinism:
            _check_determinism(model, device)
            choose_attention()
        model.eval()  # no noise; only the layers that recompute their activations must be in training mode
        if device.type == "cpu":
            prepare_cpu_for(sum(parameter.numel() for parameter in model.parameters()))
        self._compute_dtype = compute_dtype
        self._streams = sharding.streams_from_host(config, device)
        self._buffers = {part: PinnedBuffer() for part in ("masters", "compute")}
        self._copies = CopyStream(device)
        self._identity: LoraIdentity | None = None
        self._loss_scale = LossScale(enabled=compute_dtype == torch.float16)
        self.compute: TokenModel = model
        if self._sharded:
            sharding.shard(model, config, device, compute_dtype)
        if weights is not None:
            weights.fill(model.transformer, torch.device("cpu") if self._streams else device)
        if not self._sharded:
            if _master_dtype(model) != compute_dtype:
                self.compute = copy_in(model, compute_dtype)
            pack_weights(self.compute)
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
        assert isinstance(model.engine, FSDPEngineConfig)
        if model.engine.full_determinism:
            prepare_cublas()
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

    @property
    def _can_retry(self) -> bool:
        return not self._sharded  # FSDP's hooks expect every forward to be followed by its backward

    def _accumulating(self) -> Iterator[nn.Parameter]:
        return self.compute.parameters()

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        sharding.sum_replicas(self.model, is_last)
        # The loss is the sum of the dp ranks' shares, and the gradient of a share is the sum over its sp ranks, each of which
        # holds what its own tokens add. So the gradient is the sum over all ranks; FSDP takes their mean.
        with deterministic_kernels(self.config.full_determinism):
            (loss * (self.world_size * self._loss_scale.value)).backward()

    def _free_gathered(self) -> None:
        sharding.reshard(self.model)

    def _checked_models(self) -> list[tuple[TokenModel, torch.dtype]]:
        checked = [(self.compute, self._compute_dtype)]
        # masters of adapters do not compute: they have another dtype than their base
        if self._copied and not has_adapters(self.model):
            checked.insert(0, (self.model, _master_dtype(self.model)))
        return checked

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

    def step_counts(self) -> tuple[int, int]:
        assert self.optimizer is not None
        return steps_taken(self.optimizer), self.schedule.last_epoch

    def trained_tensors(self) -> dict[str, Tensor]:
        assert self.optimizer is not None
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return {str(number): parameter for number, parameter in enumerate(parameters)}

    def frozen_tensors(self) -> dict[str, Tensor]:
        self._copies.wait()
        self._free_gathered()
        found: dict[str, Tensor] = dict(named(self.compute, "buffers"))
        found |= {name: local(p) for name, p in named(self.compute, "parameters") if not p.requires_grad}
        if self._copied and self.optimizer is not None:
            pairs = self._copied_pairs()
            found |= {f"{name} (master)": local(p) for name, (p, _) in pairs.items() if not p.requires_grad}
        return found

    def copied_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self._copied_pairs() if self._copied else {}

    def _copied_pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        pairs = zip(named(self.model, "parameters"), named(self.compute, "parameters"))
        return {name: (p, copy) for (name, p), (_, copy) in pairs if p is not copy}

    def lent_weights(self, number: int) -> Iterator[tuple[str, Tensor]]:
        if not self._sharded:
            yield from shared_tensors(self.compute.transformer)
            return
        self._free_gathered()
        parameters = [(name, p) for name, p in named(self.compute, "parameters") if not is_4bit(p)]
        for name, parameter in (parameters[(number + i) % len(parameters)] for i in range(2)):
            weight = sharding.whole(parameter.detach().to(self.device))
            yield self.compute.hf_name(name), weight.to(self._compute_dtype)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        with adapters_off(self.compute):
            yield

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
        if not self._attends_here:
            raise ValueError(
                f"ulysses_sequence_parallel_size={size}: {model.hf_config.model_type} computes whole rows by its "
                "own forward, which ranks cannot share; set it to 1"
            )
        if self.layout != "packed":
            raise ValueError(
                f"ulysses_sequence_parallel_size={size} shares packed sequences among ranks: set model.use_remove_padding=true"
            )
        if has_states(model.hf_config):
            raise ValueError(
                f"ulysses_sequence_parallel_size={size}: {model.hf_config.model_type} has layers with a state, which runs through "
                "a sequence from its first token on, so that ranks cannot share one; set it to 1"
            )
        check_heads(model.hf_config.get_text_config().num_attention_heads, size)
        mesh = get_mesh(self.device, {"dp": self.world_size // size, "sp": size})
        return SequenceGroup(mesh.get_group("sp"), current_rank() % size, size)


def _check_determinism(model: TokenModel, device: torch.device) -> None:
    if device.type == "cuda" and has_states(model.transformer.config):
        name = type(model.transformer).__name__
        raise ValueError(
            f"fsdp_config.full_determinism=true: layers with a state ({name}) have no deterministic gradient on a GPU; set the key "
            "of this model (in actor_rollout_ref.actor, critic.model or model) to false"
        )


def _master_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the trained parameters; of all, if none is trained."""
    return next((p for p in model.parameters() if p.requires_grad), next(model.parameters())).dtype
