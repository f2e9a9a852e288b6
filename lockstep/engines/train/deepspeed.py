"""The training engine on DeepSpeed: ZeRO stages 0 to 3, offload to host memory or NVMe, a user's DeepSpeed JSON.

    world = data-parallel ranks. Outputs, losses, clipping, AdamW, schedule and checkpoints are those of the FSDP engine.

    stage 0 to 2: every rank has the whole module; stage 3: DeepSpeed gathers a decoder layer's parameters when it computes.

A model that only computes is a plain module on every rank, and sharded at stage 3.
"""

import math
import os
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train.checkpointing import LayerCheckpointing
from lockstep.engines.train.deepspeed_settings import DeepSpeedSettings, build_settings
from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.lr_schedule import build_schedule
from lockstep.engines.train.offload import PinnedBuffer, move_parameters
from lockstep.engines.train.optimizer import fused_adamw, steps_taken
from lockstep.engines.train.sharding import decoder_layers
from lockstep.engines.train.state import load_extra, save_extra
from lockstep.engines.train.token_engine import TokenEngine
from lockstep.engines.train.token_module import open_token_model
from lockstep.engines.train.train_engine import PARTS, EngineModel
from lockstep.engines.train.zero_state import ZeroState
from lockstep.models.loading import resolve_dtype
from lockstep.models.lora_identity import check_identity
from lockstep.models.packed_weights import in_packed_order, pack_weights
from lockstep.models.shared_weights import copy_gathered, release_weights, share_weights, shared_tensors
from lockstep.models.split_weights import split_of
from lockstep.models.token_models import ScalarModel, TokenModel
from lockstep.models.weight_source import WeightSource
from lockstep.utils.distributed import current_rank, init_single_process_group
from lockstep.utils.host import prepare_cpu_for
from lockstep.utils.spans import spanned


class DeepSpeedEngine(TokenEngine):
    """model: its parameters are on the meta device; `weights` fills them.

    optim: None for a model that only computes.
    router_key: see `EngineModel`.
    """

    info = TRAIN_ENGINES.built_in["deepspeed"]

    def __init__(
        self,
        model: TokenModel,
        config: DeepSpeedEngineConfig,
        optim: FSDPOptimizerConfig | None,
        *,
        weights: WeightSource,
        device: torch.device,
        compute_dtype: torch.dtype,
        packed: bool,
        clip_grad: float = 1.0,
        gradient_checkpointing: bool = False,
        router_key: str | None = None,
    ) -> None:
        super().__init__(model, device=device, packed=packed)
        settings = build_settings(config, optim, clip_grad, compute_dtype)
        self.dp_rank, self.dp_size, self.group_rank = current_rank(), self.world_size, 0
        self.clip_grad = clip_grad
        self.stage = settings.stage
        self._compute_dtype = compute_dtype
        self._loss_scale = LossScale(enabled=False)
        self._host_memory = PinnedBuffer()
        self._moves = optim is None and self.stage < 3 and config.param_offload and device.type != "cpu"
        if optim is None:
            model.requires_grad_(False)
        model.eval()  # no noise; only the layers that recompute their activations must be in training mode
        if device.type == "cpu":
            prepare_cpu_for(sum(parameter.numel() for parameter in model.parameters()))
        deepspeed = _import_deepspeed(device)
        # DeepSpeed's masters are copies of rounded parameters: they are set afterwards, from these and from `weights`
        present = {
            n: p.detach().cpu() for n, p in model.named_parameters() if not p.is_meta and compute_dtype != p.dtype
        }
        if self.stage == 3:
            self._fill_sharded(deepspeed, weights, settings)
        else:
            weights.fill(model.transformer, device)
            pack_weights(model)
        self._wrapped: Any = None
        self.compute = model
        if optim is not None or self.stage == 3:
            self._wrapped = self._wrap(deepspeed, settings, optim)
            self.compute = self._wrapped
        self._state = ZeroState(model, self._wrapped, self.stage)
        if optim is not None:
            self.schedule = build_schedule(self._wrapped.basic_optimizer, optim)
            if compute_dtype != torch.float32:
                self._state.set_masters(self._masters_from(weights, present))
            if gradient_checkpointing:
                saves_memory = self.stage == 3 or settings.offloads_optimizer
                self.checkpointing = LayerCheckpointing(model, device, compute_dtype, every_layer=saves_memory)
        self._check_model()
        if router_key is not None:
            self._watch_routers(router_key)
        self.offload()

    @classmethod
    def open(cls, model: EngineModel, device: torch.device) -> Self:
        assert isinstance(model.engine, DeepSpeedEngineConfig)
        if model.config.lora_rank:
            raise ValueError(
                f"{model.key}.lora_rank={model.config.lora_rank}: strategy=deepspeed trains no adapters; use fsdp"
            )
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
            router_key=model.router_key,
        )

    def _fill_sharded(self, deepspeed: Any, weights: WeightSource, settings: DeepSpeedSettings) -> None:
        """Fill and shard one decoder layer after the other, then the rest: no rank has the whole model."""
        transformer = self.model.transformer
        layers = decoder_layers(transformer)
        for path, module in transformer.named_modules():
            if module in layers:
                weights.within(path).fill(module, self.device)
                self._shard(deepspeed, module, settings)
                # gathered as a whole: our layer uses its children's weights without calling them
                deepspeed.utils.set_z3_leaf_module(module, True)
        weights.fill(transformer, self.device)
        self._shard(deepspeed, self.model, settings)
        # used without being called, too
        head = self.model.score if isinstance(self.model, ScalarModel) else transformer.get_output_embeddings()
        for parameter in head.parameters() if isinstance(head, nn.Module) else ():
            deepspeed.zero.register_external_parameter(self.model, parameter)

    def _shard(self, deepspeed: Any, module: nn.Module, settings: DeepSpeedSettings) -> None:
        for parameter in module.parameters():
            if not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(self._compute_dtype)
        deepspeed.zero.Init(module=module, config_dict_or_path=settings.values, dtype=self._compute_dtype)

    def _wrap(self, deepspeed: Any, settings: DeepSpeedSettings, optim: FSDPOptimizerConfig | None) -> Any:
        """DeepSpeed's engine around the model."""
        # stages 1 and 2 give parameters adjacent memory in this order
        trained = [parameter for parameter in in_packed_order(self.model) if parameter.requires_grad]
        buffers = dict(self.model.named_buffers())
        wrapped, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=None if optim is None else fused_adamw(trained, optim),
            config=settings.values,
            dist_init_required=False,
        )
        for name, buffer in buffers.items():  # DeepSpeed casts them too, such as rotary frequencies
            path, _, leaf = name.rpartition(".")
            self.model.get_submodule(path)._buffers[leaf] = buffer
        return wrapped

    def _masters_from(self, weights: WeightSource, present: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Trained parameters in float32. present: those that `weights` does not have."""
        names = {parameter: name for name, parameter in self.model.transformer.named_parameters()}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name in present:
                yield name, present[name].to(self.device)
            else:
                whole = torch.empty(self._shape(parameter), device=self.device)
                weights.read(names[parameter], whole.shape, whole, 0)
                yield name, whole
        weights.close()

    @property
    def _can_retry(self) -> bool:
        return False  # DeepSpeed counts micro-batches, and has reduced a part of the gradient

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        # The gradient is the sum of the ranks' shares; DeepSpeed takes their mean.
        self._wrapped.set_gradient_accumulation_boundary(is_last)
        self._wrapped.backward(loss * self.world_size)

    def _checked_models(self) -> list[tuple[TokenModel, torch.dtype]]:
        return [(self.model, self._compute_dtype)]

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return self._state.shape(parameter)

    @spanned
    def optimizer_step(self) -> float:
        norm = self._norm_at_stage_0() if self.stage == 0 else None
        if norm is None or math.isfinite(norm):
            self._wrapped.step()
        else:
            self._wrapped.zero_grad()
        if norm is None:
            optimizer = self._wrapped.optimizer
            norm = math.nan if getattr(optimizer, "overflow", False) else float(self._wrapped.get_global_grad_norm())
        self._loss_scale.update(norm)
        return norm

    def _norm_at_stage_0(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def step_counts(self) -> tuple[int, int]:
        return steps_taken(self._wrapped.basic_optimizer), self.schedule.last_epoch

    def trained_tensors(self) -> dict[str, Tensor]:
        groups = self._wrapped.basic_optimizer.param_groups
        return {str(number): p.detach() for number, p in enumerate(p for group in groups for p in group["params"])}

    def frozen_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.named_buffers())
        frozen = ((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)
        return found | {name: getattr(p, "ds_tensor", p).detach() for name, p in frozen}

    def lent_weights(self, number: int) -> Iterator[tuple[str, Tensor]]:
        if self.stage < 3:
            yield from shared_tensors(self.model.transformer)
            return
        named = list(self.model.named_parameters())
        for name, parameter in (named[(number + i) % len(named)] for i in range(2)):
            with _gathered(parameter):
                yield self.model.hf_name(name), parameter.detach()

    def adapters_off(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def lend_weights(self, module: PreTrainedModel) -> Iterator[None]:
        self.onload()
        try:
            if self.stage == 3 or split_of(module) is not None:
                copy_gathered(module, self._whole_parameters(), self.model.transformer)
            else:
                share_weights(module, self.model.transformer)
            yield
        finally:
            if self._moves:
                release_weights(module)
            self.offload()

    def _whole_parameters(self) -> Generator[tuple[str, Tensor]]:
        """In the compute dtype."""
        for name, parameter in self.model.named_parameters():
            with _gathered(parameter):
                yield self.model.hf_name(name), parameter.detach()

    def weights(self, *, trained: bool = False) -> Generator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and self._compute_dtype != torch.float32:
                yield self.model.hf_name(name), self._state.master(parameter)
            elif parameter.requires_grad or not trained:
                with _gathered(parameter):
                    yield self.model.hf_name(name), parameter.detach()

    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:
        if self._moves:
            move_parameters(self.model, self._host_memory, self.device)

    def offload(self) -> None:
        if self._moves:
            move_parameters(self.model, self._host_memory, torch.device("cpu"))
            torch.cuda.empty_cache()

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        self._state.save(folder, contents)
        if "extra" in contents and self._is_trained:
            save_extra(folder, self.schedule, self._loss_scale)

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        check_identity(folder, None)
        self._state.load(folder, contents)
        if "extra" in contents and self._is_trained:
            load_extra(folder, self.schedule, self._loss_scale)

    @property
    def _is_trained(self) -> bool:
        return hasattr(self, "schedule")


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[None]:
    """Inside, the parameter is whole; no-op below stage 3."""
    import deepspeed

    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameter)
    return context


_group: Any = None
"""torch's process group that DeepSpeed has derived its own from, in this process."""


def _import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, on the process group that exists."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    init_single_process_group(device)
    import deepspeed

    global _group
    if _group is not None and _group is not dist.group.WORLD:
        deepspeed.utils.groups._release_process_group_references()
    _group = dist.group.WORLD

    # collectives of DeepSpeed's inference on CPU: it would compile them now, for a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    return deepspeed
