"""The training engine on megatron-core: tensor, sequence, pipeline, expert and data parallelism.

    batch ─► micro-batches ─► megatron's schedule over the pipeline ─► outputs (B, R) on the last stage ─► loss_fn ─► backward
          ─► gradients summed over ranks in megatron's buffers ─► optimizer_step

    world = dp x pp x tp; the ranks of one dp rank share its rows, and all of them return the outputs of the last stage.

A transformers model without memory tells the names, shapes and rotary frequencies, and is the form of the rollout's module.
"""

import dataclasses
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.megatron import McoreEngineConfig
from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.lr_schedule import build_schedule
from lockstep.engines.train.megatron import families, parallel
from lockstep.engines.train.megatron.checkpoint import load_state, save_state
from lockstep.engines.train.megatron.cpu import megatron_calls
from lockstep.engines.train.megatron.model import TokenGPT
from lockstep.engines.train.megatron.optimizer import Masters
from lockstep.engines.train.megatron.weights import find_slices, from_model, load_slices
from lockstep.engines.train.state import load_extra, save_extra
from lockstep.engines.train.token_module import open_token_model
from lockstep.engines.train.train_engine import PARTS, EngineModel, LossFn, MicroBatching, TrainEngine
from lockstep.models.export import save_policy, save_scalar_model
from lockstep.models.loading import resolve_dtype
from lockstep.models.packing import ForwardRows
from lockstep.models.rope import rope_limit
from lockstep.models.shared_weights import copy_gathered, release_weights, rollout_module
from lockstep.models.token_models import ScalarModel
from lockstep.protocol.columns import Batch, tensors_of
from lockstep.protocol.ragged import is_ragged
from lockstep.protocol.tokens import lengths_of, prompt_owners
from lockstep.utils.device import to_device
from lockstep.utils.host import prepare_cpu_for
from lockstep.utils.progress import count
from lockstep.utils.seqlen import agreed_runs
from lockstep.utils.spans import spanned


class MegatronEngine(TrainEngine):
    """model: the transformers model with its head, without memory for parameters.

    gpt:     this rank's pipeline stage.
    slices:  where the parameters of `model` lie in it.
    masters: the optimizer; None for a model that only computes.
    """

    info = TRAIN_ENGINES.built_in["megatron"]

    def __init__(self, spec: EngineModel, device: torch.device) -> None:
        assert isinstance(spec.engine, McoreEngineConfig)
        config = spec.engine
        self.config = config
        self.device = device
        self.dtype = _compute_dtype(spec, device)
        self.model, source = open_token_model(spec, device)
        hf: Any = self.model.hf_config
        self.family = families.family_of(hf, spec.key)
        self.layout = parallel.layout_of(config, _section(spec), families.num_experts(hf, self.family))
        parallel.join(self.layout, self, _section(spec), device)
        self.world_size = dist.get_world_size()
        self.dp_size = ps.get_data_parallel_world_size()
        self.dp_rank = ps.get_data_parallel_rank()
        self.group_rank = ps.get_tensor_model_parallel_rank() + self.layout.tp * ps.get_pipeline_model_parallel_rank()
        self._limits = [limit for limit in (rope_limit(self.model), families.window_of(hf)) if limit is not None]
        if device.type == "cpu":
            prepare_cpu_for(sum(parameter.numel() for parameter in self.model.parameters()))
        self.transformer_config = self._transformer_config(spec)
        self.masters: Masters | None = None
        with megatron_calls(device):
            transformer: Any = self.model.transformer
            body = transformer.get_decoder() if spec.kind == "policy" else transformer
            tied = spec.kind == "policy" and transformer.lm_head.weight is body.embed_tokens.weight
            self.gpt = TokenGPT(self.transformer_config, spec.kind, hf.vocab_size, body.rotary_emb, tied=tied)
            self.slices = find_slices(self.gpt, self.model)
            self.stage: nn.Module = self.gpt
            if spec.optim is None:
                self.gpt.requires_grad_(False).eval()
            else:
                self._prepare_training(spec)
        load_slices(self.slices, from_model(self.model, source), self._set_weights)
        source.close()
        _drop_parameters(self.model)

    @classmethod
    def open(cls, model: EngineModel, device: torch.device) -> Self:
        return cls(model, device)

    def _prepare_training(self, spec: EngineModel) -> None:
        assert spec.optim is not None
        sharded = self.config.use_distributed_optimizer
        values = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": sharded}
        ddp = _ddp_config(values, self.config.override_ddp_config, f"{_section(spec)}.override_ddp_config")
        self.stage = DistributedDataParallel(self.transformer_config, ddp, self.gpt)
        self.masters = Masters(self.stage, spec.optim, spec.clip_grad, self.dtype, sharded=sharded)
        self._rate = torch.optim.SGD([torch.zeros(1)], lr=spec.optim.lr)
        self.schedule = build_schedule(self._rate, spec.optim)
        self._loss_scale = LossScale(enabled=False)

    def _transformer_config(self, spec: EngineModel) -> Any:
        config = self.config
        layout = self.layout
        hf: Any = self.model.hf_config
        key = _section(spec)
        _check_sizes(hf, layout, key)
        experts = bool(layout.ep)
        sequence_parallel = config.sequence_parallel and layout.tp > 1
        if experts and layout.tp > 1 and not sequence_parallel:
            raise ValueError(f"{key}.sequence_parallel=false: experts with tensor parallelism need it; set it to true")
        values: dict[str, Any] = {
            **families.transformer_values(hf, self.family),
            **families.dtype_values(self.dtype),
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "sequence_parallel": sequence_parallel,
            "variable_seq_lengths": True,
            "use_cpu_initialization": self.device.type == "cpu",
            "perform_initialization": False,
            "gradient_accumulation_fusion": False,
            "finalize_model_grads_func": finalize_model_grads,
        }
        if experts:
            values |= {
                "expert_model_parallel_size": layout.ep,
                "expert_tensor_parallel_size": layout.expert_tp,
            }
        if spec.config.enable_gradient_checkpointing and spec.optim is not None:
            values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        overrides = dict(config.override_transformer_config)
        return families.transformer_config(values, overrides, f"{key}.override_transformer_config")

    # Computation

    def forward(self, batch: Batch, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        parts = self._partitions(batch, micro)
        self.gpt.eval()

        def keep(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            found = {name: values.cpu() for name, values in outputs.items()}
            return torch.zeros((), device=self.device), found

        with torch.no_grad():
            pieces = self._run(batch, parts, keep, options, train=False)
        order = [row for rows in parts for row in rows]
        back = torch.tensor(order).argsort()
        results = {name: torch.cat([p[name] for p in pieces])[back] for name in pieces[0]} if pieces else {}
        shapes = self._told_by_last_stage({name: values.shape for name, values in results.items()})
        return {
            name: self._from_last_stage(results[name] if pieces else torch.empty(shape))
            for name, shape in shapes.items()
        }

    @spanned
    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        assert self.masters is not None
        parts = self._partitions(batch, micro)
        # megatron divides by the number of micro-batches and takes the mean over data-parallel ranks; the loss is a sum over both
        factor = len(parts) * self.dp_size
        totals: dict[str, Tensor] = {}

        def scaled(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, None]:
            loss, metrics = loss_fn(outputs, self._loss_columns(part))
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach().float()
            return loss * factor, None

        self.gpt.train()
        self.stage.zero_grad_buffer()
        self._run(batch, parts, scaled, options, train=True)
        own = self._told_by_last_stage({name: float(value) for name, value in totals.items()})
        names = self._names_on_all_ranks(sorted(own))
        return dict(zip(names, self.global_sum(*(own.get(name, 0.0) for name in names))))

    def _run(self, batch: Batch, parts: list[list[int]], use: Any, options: dict[str, object], *, train: bool) -> Any:
        """Run megatron's schedule; what `use(outputs, rows)` gives besides a loss, per micro-batch on the last stage."""

        def step(numbered: Iterator[tuple[int, list[int]]], stage: Any) -> tuple[Any, Any]:
            number, rows = next(numbered)
            part = _taken(batch, rows)
            outputs = stage(self._rows(part), **options)
            count(number, len(parts), "micro-batches")
            return outputs, lambda found: use(found, part)

        with megatron_calls(self.device):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(enumerate(parts, start=1)),
                model=[self.stage],
                num_microbatches=len(parts),
                seq_length=1,
                micro_batch_size=1,
                forward_only=not train,
            )

    @spanned
    def optimizer_step(self) -> float:
        assert self.masters is not None
        with megatron_calls(self.device):
            norm = self.masters.gradient_norm()
            try:
                self._loss_scale.update(norm)  # raises if it is not finite
                self.masters.step(norm, self.learning_rate)
                self._rate._opt_called = True  # type: ignore[attr-defined]  # otherwise the schedule warns
            finally:
                self.masters.clear_gradients()
                self.stage.zero_grad_buffer()
        return norm

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

    # Weights

    def rollout_module(self) -> PreTrainedModel:
        return rollout_module(self.model.transformer)

    @contextmanager
    def lend_weights(self, module: PreTrainedModel) -> Iterator[None]:
        self.onload()
        try:
            named = ((self.model.hf_name(name), tensor) for name, tensor in self._computing_weights())
            copy_gathered(module, named, self.model.transformer)
            yield
        finally:
            if self.config.param_offload and self.device.type != "cpu":
                release_weights(module)
            self.offload()

    def adapters_off(self) -> AbstractContextManager[None]:
        return nullcontext()  # it trains none

    def weights(self, *, trained: bool = False) -> Generator[tuple[str, Tensor]]:
        if self.masters is None:
            if trained:
                return
            found = self._computing_weights()
        else:
            masters = self.masters
            found = ((piece.name, piece.gathered(masters.value, torch.float32, self.device)) for piece in self.slices)
        for name, tensor in found:
            yield self.model.hf_name(name), tensor

    def _computing_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by their name in `model`, in the dtype that computes. Collective."""
        for piece in self.slices:
            yield piece.name, piece.gathered(lambda parameter: parameter.detach(), self.dtype, self.device)

    def merged_weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self.weights()

    def weight_shapes(self, *, merged: bool) -> list[tuple[str, tuple[int, ...]]]:
        if not merged and self.masters is None:
            return []
        return [(self.model.hf_name(piece.name), piece.shape) for piece in self.slices]

    def _set_weights(self, parameter: nn.Parameter, values: Tensor) -> None:
        if self.masters is None:
            parameter.data.copy_(values)
        else:
            self.masters.set_value(parameter, values)

    # State

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        if self.masters is None:
            return
        save_state(folder, contents, self.slices, self.masters, self.device)
        if "extra" in contents:
            save_extra(folder, self.schedule, self._loss_scale)

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        if self.masters is None:
            return
        load_state(folder, contents, self.slices, self.masters)
        if "extra" in contents:
            load_extra(folder, self.schedule, self._loss_scale)

    def saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weights`, then the buffers that a Hugging Face folder contains."""
        yield from self.weights()
        saved = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name in saved:
                yield self.model.hf_name(name), buffer

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        save = save_scalar_model if isinstance(self.model, ScalarModel) else save_policy
        save(self.model.transformer, self.saved_weights(), tokenizer, folder / "huggingface")

    # Rows and ranks

    def _partitions(self, batch: Batch, micro: MicroBatching) -> list[list[int]]:
        """Rows of each micro-batch, as many of them on every rank."""
        if micro.max_tokens is not None:
            group = dist.group.WORLD if self.world_size > 1 else None
            before, own = (lengths.tolist() for lengths in lengths_of(batch))
            return agreed_runs(own, before, prompt_owners(batch), micro.max_tokens, group, micro.group_size)
        size = micro.num_rows or len(batch)
        return [list(range(i, min(i + size, len(batch)))) for i in range(0, len(batch), size)]

    def _rows(self, batch: TensorDict) -> ForwardRows:
        longest = int(batch["position_ids"].max()) + 1
        if self._limits and longest > min(self._limits):
            raise ValueError(
                f"a sequence has {longest} tokens, but {self.model.hf_config.model_type} has a sliding window or other rotary "
                f"frequencies beyond {min(self._limits)}; shorten data.max_prompt_length or data.max_response_length, or set "
                "strategy=fsdp"
            )
        return self.gpt.rows(batch, self.device)

    def _loss_columns(self, batch: TensorDict) -> TensorDict:
        """The rows on the device, without the tokens that only the forward reads."""
        columns = tensors_of(batch.exclude("prompts", "input_ids", "attention_mask", "position_ids"))
        return TensorDict({k: to_device(v, self.device) for k, v in columns.items()}, batch_size=batch.batch_size)

    def _names_on_all_ranks(self, own: list[str]) -> list[str]:
        """Metrics that any rank has: one with nothing but padding may have fewer."""
        if self.dp_size == 1:
            return own
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own)
        return sorted(set().union(*everyones))

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
    role = {"actor_rollout_ref": "actor_rollout_ref.actor" if spec.optim is not None else "actor_rollout_ref.ref"}.get(
        role, role
    )
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


def _check_sizes(hf: Any, layout: parallel.Layout, key: str) -> None:
    """ValueError if the model does not divide into the parts of the layout."""
    parts = [
        ("tensor_model_parallel_size", layout.tp, "num_key_value_heads"),
        ("tensor_model_parallel_size", layout.tp, "intermediate_size"),
        ("pipeline_model_parallel_size", layout.pp, "num_hidden_layers"),
    ]
    for name, size, what in parts:
        total = getattr(hf, what)
        if total % size:
            fits = [n for n in range(1, total + 1) if total % n == 0 and n <= 64]
            raise ValueError(
                f"{key}.{name}={size} does not divide the model's {what}={total}; set it to one of {', '.join(map(str, fits))}"
            )


def _ddp_config(values: dict[str, Any], overrides: dict[str, Any], key: str) -> DistributedDataParallelConfig:
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    for name in overrides:
        if name not in known:
            raise ValueError(f"{key}.{name}: megatron's DistributedDataParallelConfig has no such field")
        if name in values and overrides[name] != values[name]:
            raise ValueError(f"{key}.{name}={overrides[name]!r}: it must be {values[name]!r} here; remove it")
    return DistributedDataParallelConfig(**{**values, **overrides})


def _drop_parameters(model: nn.Module) -> None:
    """Free the memory of parameters that were loaded whole; buffers stay."""
    dropped: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.is_meta:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[name] = dropped.setdefault(parameter, empty)


def _taken(batch: Batch, rows: list[int]) -> TensorDict:
    """These rows of the batch, padded; those of a padded batch are not copied if they follow each other."""
    start, end = rows[0], rows[-1] + 1
    part: Any = (
        batch[rows] if rows != list(range(start, end)) else batch if len(rows) == len(batch) else batch[start:end]
    )
    return part.to_tensordict() if is_ragged(part) else part
