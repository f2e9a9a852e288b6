"""The training engine on megatron-core: tensor, sequence, pipeline, expert and data parallelism.

    batch ─► micro-batches ─► megatron's schedule over the pipeline ─► outputs (B, R) on the last stage ─► loss_fn ─► backward
          ─► gradients summed over ranks in megatron's buffers ─► optimizer_step

    world = dp x pp x tp; the ranks of one dp rank share its rows, and all of them return the outputs of the last stage.

A transformers model without memory tells the names, shapes and rotary frequencies, and is the form of the rollout's module.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.lr_schedule import build_schedule
from lockstep.engines.train.megatron import families, parallel
from lockstep.engines.train.megatron.check import check_layout, check_weights
from lockstep.engines.train.megatron.checkpoint import load_state, save_state
from lockstep.engines.train.megatron.cpu import megatron_calls
from lockstep.engines.train.megatron.offload import Parked
from lockstep.engines.train.megatron.optimizer import Masters
from lockstep.engines.train.megatron.stage import Outputs, Stage, StageSettings
from lockstep.engines.train.megatron.weights import from_model, load_slices
from lockstep.engines.train.state import load_extra, save_extra
from lockstep.engines.train.token_engine import TokenEngine, taken_rows
from lockstep.engines.train.token_module import open_token_model
from lockstep.engines.train.train_engine import PARTS, EngineModel, LossFn, MicroBatching
from lockstep.models.loading import resolve_dtype
from lockstep.models.model_check import check_batch, refuse_errors
from lockstep.models.shared_weights import copy_gathered, release_weights
from lockstep.models.token_models import TokenModel
from lockstep.protocol.columns import Batch
from lockstep.utils.host import prepare_cpu_for
from lockstep.utils.progress import count, phase
from lockstep.utils.spans import spanned


class MegatronEngine(TokenEngine):
    """model: the transformers model with its head, without memory for parameters.

    stage:   this rank's part of it.
    masters: the optimizer; None for a model that only computes.
    """

    info = TRAIN_ENGINES.built_in["megatron"]

    def __init__(self, spec: EngineModel, device: torch.device) -> None:
        assert isinstance(spec.engine, McoreEngineConfig)
        self.config = spec.engine
        self.dtype = _compute_dtype(spec, device)
        model, source = open_token_model(spec, device)
        super().__init__(model, device=device, packed=True)
        hf: Any = self.model.hf_config
        key = _section(spec)
        layout = parallel.layout_of(spec.engine, key, families.num_experts(hf, families.family_of(hf, spec.key)))
        parallel.join(layout, self, key, device)
        self.dp_size = ps.get_data_parallel_world_size()
        self.dp_rank = ps.get_data_parallel_rank()
        self.group_rank = ps.get_tensor_model_parallel_rank() + layout.tp * ps.get_pipeline_model_parallel_rank()
        self._window = families.window_of(hf)
        if device.type == "cpu":
            prepare_cpu_for(sum(parameter.numel() for parameter in self.model.parameters()))
        settings = StageSettings(
            self.config,
            layout,
            key,
            self.dtype,
            device,
            trained=spec.optim is not None,
            sharded=self.config.use_distributed_optimizer,
            recompute=spec.config.enable_gradient_checkpointing and spec.optim is not None,
            saves_memory=self.config.param_offload or self.config.optimizer_offload,
        )
        self.stage = Stage(self.model, spec.kind, settings)
        self.masters: Masters | None = None
        if spec.optim is None:
            model.requires_grad_(False)
        else:
            self._prepare_training(spec, spec.optim)
        load_slices(self.stage.slices, from_model(self.model, source), self._set_weights)
        source.close()
        _drop_parameters(self.model)
        # in float32 the master weights are the weights that compute
        copied = self.masters is not None and self.dtype != torch.float32
        self._compute = Parked(lambda: self.stage.gpt.parameters())
        self._masters = Parked(self.masters.weights if self.masters is not None and copied else tuple)
        self._moments = Parked(self.masters.moments if self.masters is not None else tuple)
        self._gradients = Parked(self._gradient_buffers, keeps=False)
        with phase("check the model"), refuse_errors(self.model.transformer):
            check_layout(hf, spec.kind, settings, tied=self.stage.gpt.share_embeddings_and_output_weights)
            self._check_weights()
        self.offload()

    @classmethod
    def open(cls, model: EngineModel, device: torch.device) -> Self:
        return cls(model, device)

    def _prepare_training(self, spec: EngineModel, optim: FSDPOptimizerConfig) -> None:
        assert isinstance(self.stage.module, DistributedDataParallel)
        sharded = self.config.use_distributed_optimizer
        with megatron_calls(self.device):
            self.masters = Masters(self.stage.module, optim, spec.clip_grad, self.dtype, sharded=sharded)
        self._rate = torch.optim.SGD([torch.zeros(1)], lr=optim.lr)
        self.schedule = build_schedule(self._rate, optim)
        self._loss_scale = LossScale(enabled=False)

    def _check_weights(self) -> None:
        """Compare log-probs or values of a few random rows with transformers' own eager forward."""
        batch = check_batch(self.model.hf_config.vocab_size)
        outputs = self.forward(batch, MicroBatching())
        check_weights(outputs, batch, self.model, self._computing_weights(), self.dtype)

    def _forward(self, batch: Batch, options: dict[str, Any], parts: list[list[int]]) -> dict[str, Tensor]:
        def keep(outputs: Outputs, rows: TensorDict) -> tuple[Tensor, Outputs]:
            return torch.zeros((), device=self.device), {name: values.cpu() for name, values in outputs.items()}

        pieces = self.stage.run(self._micro_batches(batch, parts), len(parts), keep, options, train=False)
        back = torch.tensor([row for rows in parts for row in rows]).argsort()
        results = {name: torch.cat([p[name] for p in pieces])[back] for name in pieces[0]} if pieces else {}
        shapes = self._told_by_last_stage({name: values.shape for name, values in results.items()})
        return {
            name: self._from_last_stage(results[name] if pieces else torch.empty(shape))
            for name, shape in shapes.items()
        }

    def _add_gradients(
        self, batch: Batch, loss_fn: LossFn, options: dict[str, Any], parts: list[list[int]]
    ) -> dict[str, float]:
        # megatron takes the mean over micro-batches and data-parallel ranks; the loss is the sum of their shares
        factor = len(parts) * self.dp_size
        totals: dict[str, Tensor] = {}

        def scaled(outputs: Outputs, rows: TensorDict) -> tuple[Tensor, None]:
            loss, metrics = loss_fn(outputs, self._loss_columns(rows))
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach().float()
            return loss * factor, None

        self._gradients.to_device()
        self._ddp.zero_grad_buffer()
        self.stage.run(self._micro_batches(batch, parts), len(parts), scaled, options, train=True)
        told: dict[str, float] = self._told_by_last_stage({name: float(value) for name, value in totals.items()})
        return told

    def _accumulating(self) -> Iterator[nn.Parameter]:
        return self.stage.gpt.parameters()  # their gradients move to megatron's buffers, which each mini-batch clears

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        raise NotImplementedError("megatron's schedule runs forward and backward passes")

    def _checked_models(self) -> list[tuple[TokenModel, torch.dtype]]:
        return []  # `check.py` compares what is spread over ranks

    @property
    def _ddp(self) -> Any:
        """megatron's wrapper of a model that is trained."""
        assert self.masters is not None
        return self.stage.module

    def _micro_batches(self, batch: Batch, parts: list[list[int]]) -> Iterator[TensorDict]:
        for number, rows in enumerate(self._each(parts), start=1):
            count(number, len(parts), "micro-batches")
            part = taken_rows(batch, rows)
            self._check_length(part)
            yield part

    @spanned
    def optimizer_step(self) -> float:
        assert self.masters is not None
        self._masters.to_device()
        with megatron_calls(self.device), self._moments.on_device():
            norm = self.masters.gradient_norm()
            try:
                self._loss_scale.update(norm)  # raises if it is not finite
                self.masters.step(norm, self.learning_rate)
                self._rate._opt_called = True  # type: ignore[attr-defined]  # otherwise the schedule warns
            finally:
                self.masters.clear_gradients()  # megatron's buffers are cleared before the next gradient
        return norm

    def step_counts(self) -> tuple[int, int] | None:
        assert self.masters is not None
        if next(self.masters.weights(), None) is None:
            return None  # this rank's shard holds no parameter
        return self.masters.steps_taken(), self.schedule.last_epoch

    def trained_tensors(self) -> dict[str, Tensor]:
        assert self.masters is not None
        return {str(number): weight.detach() for number, weight in enumerate(self.masters.weights())}

    def frozen_tensors(self) -> dict[str, Tensor]:
        frozen = ((name, p.detach()) for name, p in self.stage.gpt.named_parameters() if not p.requires_grad)
        return dict(self.stage.gpt.named_buffers()) | dict(frozen)

    def lent_weights(self, number: int) -> Iterator[tuple[str, Tensor]]:
        with self._compute.on_device():
            slices = self.stage.slices
            for piece in (slices[(number + i) % len(slices)] for i in range(2)):
                weight = piece.gathered(lambda parameter: parameter.detach(), self.dtype, self.device)
                yield self.model.hf_name(piece.name), weight

    @contextmanager
    def lend_weights(self, module: PreTrainedModel) -> Iterator[None]:
        self.onload()
        named = ((self.model.hf_name(name), tensor) for name, tensor in self._computing_weights())
        copy_gathered(module, named, self.model.transformer)
        self.offload()  # the rollout has its own copy
        try:
            yield
        finally:
            if self.config.param_offload and self.device.type != "cpu":
                release_weights(module)

    def adapters_off(self) -> AbstractContextManager[None]:
        return nullcontext()  # it trains none

    def weights(self, *, trained: bool = False) -> Generator[tuple[str, Tensor]]:
        if self.masters is None:
            if trained:
                return
            found = self._computing_weights()
        else:
            found = self._master_weights()
        for name, tensor in found:
            yield self.model.hf_name(name), tensor

    def _master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole master weights by their name in `model`. Collective."""
        assert self.masters is not None
        with self._compute.on_device(), self._masters.on_device():
            for piece in self.stage.slices:
                yield piece.name, piece.gathered(self.masters.value, torch.float32, self.device)

    def _computing_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by their name in `model`, in the dtype that computes. Collective."""
        for piece in self.stage.slices:
            yield piece.name, piece.gathered(lambda parameter: parameter.detach(), self.dtype, self.device)

    def _set_weights(self, parameter: nn.Parameter, values: Tensor) -> None:
        if self.masters is None:
            parameter.data.copy_(values)
        else:
            self.masters.set_value(parameter, values)

    def onload(self, *, optimizer: bool = False, ahead: bool = False) -> None:
        self._compute.to_device()
        if optimizer:
            self._masters.to_device()

    def offload(self) -> None:
        if self.device.type == "cpu":
            return
        if self.config.param_offload:
            self._masters.to_host()
            self._compute.to_host()
        if self.config.optimizer_offload:
            self._moments.to_host()
        if self.config.grad_offload:
            self._gradients.to_host()
        if self.config.param_offload or self.config.optimizer_offload or self.config.grad_offload:
            torch.cuda.empty_cache()

    def _gradient_buffers(self) -> Iterator[Tensor]:
        if self.masters is not None:
            yield from (buffer.grad_data for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers))

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        if self.masters is None:
            return
        with self._compute.on_device(), self._masters.on_device(), self._moments.on_device():
            save_state(folder, contents, self.stage.slices, self.masters, self.device)
        if "extra" in contents:
            save_extra(folder, self.schedule, self._loss_scale)

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        if self.masters is None:
            return
        with self._compute.on_device(), self._masters.on_device(), self._moments.on_device():
            load_state(folder, contents, self.stage.slices, self.masters)
        if "extra" in contents:
            load_extra(folder, self.schedule, self._loss_scale)

    def _check_length(self, batch: TensorDict) -> None:
        super()._check_length(batch)
        longest = int(batch["position_ids"].max()) + 1
        if self._window is not None and longest > self._window:
            raise ValueError(
                f"a sequence has {longest} tokens, but {self.model.hf_config.model_type} has a sliding window of {self._window}, "
                "which strategy=megatron does not compute; shorten data.max_prompt_length or data.max_response_length, or set "
                "strategy=fsdp"
            )

    def _from_last_stage(self, values: Tensor) -> Tensor:
        """A host tensor of the last pipeline stage, on all of them."""
        group = ps.get_pipeline_model_parallel_group()
        if group.size() > 1:
            values = values.contiguous()
            dist.broadcast(values, ps.get_pipeline_model_parallel_last_rank(), group=group)
        return values

    def _told_by_last_stage(self, value: Any) -> Any:
        group = ps.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, ps.get_pipeline_model_parallel_last_rank(), group=group)
        return told[0]


def _section(spec: EngineModel) -> str:
    """The config section of the engine, for messages: that of the role, without its model."""
    role = spec.key.removesuffix(".model")
    if role == "actor_rollout_ref":
        role = f"{role}.actor" if spec.optim is not None else f"{role}.ref"
    return f"{role}.megatron"


def _compute_dtype(spec: EngineModel, device: torch.device) -> torch.dtype:
    dtype = resolve_dtype(spec.engine.dtype, device)
    key = _section(spec)
    if dtype == torch.float16:
        raise ValueError(
            f"{key}.dtype={spec.engine.dtype}: float16 is not supported by strategy=megatron; set bfloat16"
        )
    if spec.optim is not None and resolve_dtype(spec.engine.model_dtype, device) != torch.float32:
        raise ValueError(
            f"{key}.model_dtype={spec.engine.model_dtype}: megatron's master weights are float32; set fp32, or strategy=fsdp"
        )
    if spec.config.lora_rank:
        raise ValueError(
            f"{spec.key}.lora_rank={spec.config.lora_rank}: strategy=megatron trains all parameters; set it to 0"
        )
    return dtype


def _drop_parameters(model: nn.Module) -> None:
    """Free the memory of parameters that were loaded whole; buffers stay."""
    dropped: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.is_meta:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[name] = dropped.setdefault(parameter, empty)
