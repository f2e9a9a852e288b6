"""One rank's part of a model: its pipeline stage, where the Hugging Face tensors lie in it, and megatron's schedule."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from torch import Tensor, nn

from lockstep.config.megatron import McoreEngineConfig
from lockstep.engines.train.megatron import families
from lockstep.engines.train.megatron.cpu import megatron_calls
from lockstep.engines.train.megatron.model import Kind, TokenGPT
from lockstep.engines.train.megatron.parallel import Layout
from lockstep.engines.train.megatron.weights import find_slices
from lockstep.kernels.activation_memory import STREAM_BYTES, kept_layers, layer_bytes
from lockstep.models.token_models import TokenModel

Outputs = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class StageSettings:
    """How stages are built, apart from the model.

    key:       the config section of the engine, for messages.
    dtype:     that computes.
    trained:   gradients are computed; they are summed over data-parallel ranks.
    sharded:   each data-parallel rank gets the sum of its shard alone, for the distributed optimizer.
    recompute: activations are computed again in the backward pass.
    saves_memory: of all layers, also if activations fit on the device.
    """

    engine: McoreEngineConfig
    layout: Layout
    key: str
    dtype: torch.dtype
    device: torch.device
    trained: bool
    sharded: bool
    recompute: bool
    saves_memory: bool = False


class Stage:
    """model: the transformers model with its head; its parameters need no memory.

    gpt:    megatron's module.
    module: `gpt`, or its wrapper that sums gradients.
    slices: where the parameters of `model` lie in it, in their order.
    """

    def __init__(self, model: TokenModel, kind: Kind, settings: StageSettings) -> None:
        hf: Any = model.hf_config
        self.settings = settings
        self.config = _transformer_config(hf, settings)
        transformer: Any = model.transformer
        body = transformer.get_decoder() if kind == "policy" else transformer
        tied = kind == "policy" and transformer.lm_head.weight is body.embed_tokens.weight
        with megatron_calls(settings.device):
            pad = body.embed_tokens.padding_idx
            self.gpt = TokenGPT(self.config, kind, hf.vocab_size, body.rotary_emb, tied=tied, padding_idx=pad)
            self.slices = find_slices(self.gpt, model)
            self.module: nn.Module = self.gpt
            if settings.trained:
                self.module = DistributedDataParallel(self.config, _ddp_config(settings), self.gpt)
            else:
                self.gpt.requires_grad_(False)
        self._recomputation = Recomputation(self.config, settings) if _adapts(settings) else None

    def run(
        self,
        batches: Iterable[TensorDict],
        num_batches: int,
        use: Callable[[Outputs, TensorDict], tuple[Tensor, Any]],
        options: dict[str, Any],
        *,
        train: bool,
    ) -> list[Any]:
        """Compute micro-batches through the pipeline, with gradients that are added to megatron's buffers if `train`.

        use: outputs and rows of a micro-batch -> its loss and a result; called on the last stage, where the results are returned.
        megatron takes the mean of the losses over micro-batches and data-parallel ranks.
        """
        self.gpt.train(train)

        def step(remaining: Any, module: nn.Module) -> tuple[Any, Any]:
            batch = next(remaining)
            rows = self.gpt.rows(batch, self.settings.device)
            if self._recomputation is not None and train:
                self._recomputation.plan(rows.input_ids.numel())
            outputs = module(rows, **options)
            return outputs, lambda found: use(found, batch)

        with megatron_calls(self.settings.device), torch.set_grad_enabled(train):
            found: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[self.module],
                num_microbatches=num_batches,
                seq_length=1,
                micro_batch_size=1,
                forward_only=not train,
            )
        return found


class Recomputation:
    """As many layers keep their activations as fit on the device, as in `LayerCheckpointing`."""

    def __init__(self, config: TransformerConfig, settings: StageSettings) -> None:
        self._config = config
        self._device = settings.device
        self._itemsize = settings.dtype.itemsize

    def plan(self, num_tokens: int) -> None:
        """Choose how many layers recompute in the next forward of `num_tokens` tokens."""
        config = self._config
        total = torch.cuda.get_device_properties(self._device).total_memory
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        heads = (config.num_attention_heads + config.num_query_groups) * config.kv_channels
        inner = config.ffn_hidden_size * 3 // 2  # gate, up, and their product
        layer = layer_bytes(num_tokens, config.hidden_size, heads, inner, self._itemsize)
        stream = num_tokens * config.hidden_size * STREAM_BYTES
        kept = kept_layers(total, free, config.num_layers, layer, stream, 0.0)
        config.recompute_num_layers = config.num_layers - kept


def _adapts(settings: StageSettings) -> bool:
    """Whether the number of layers that recompute follows the free memory: on a rank that computes alone, since recomputation
    repeats the collectives of a layer."""
    alone = settings.layout == Layout(1, 1, 0, 0)
    chosen = any(name.startswith("recompute_") for name in settings.engine.transformer_overrides)
    on_gpu = settings.device.type == "cuda"
    return settings.recompute and on_gpu and alone and not chosen and not settings.saves_memory


def _transformer_config(hf: Any, settings: StageSettings) -> TransformerConfig:
    engine = settings.engine
    layout = settings.layout
    key = settings.key
    family = families.family_of(hf, key)
    _check_sizes(hf, layout, key)
    sequence_parallel = engine.sequence_parallel and layout.tp > 1
    if layout.ep and layout.tp > 1 and not sequence_parallel:
        raise ValueError(f"{key}.sequence_parallel=false: experts with tensor parallelism need it; set it to true")
    values: dict[str, Any] = {
        **families.transformer_values(hf, family),
        **families.dtype_values(settings.dtype),
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "sequence_parallel": sequence_parallel,
        "variable_seq_lengths": True,
        "use_cpu_initialization": settings.device.type == "cpu",
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": False,  # losses are divided by the run's own counts
        "finalize_model_grads_func": finalize_model_grads,
    }
    if layout.ep:
        values |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.expert_tp}
    overrides = engine.transformer_overrides
    if settings.recompute and "recompute_granularity" not in overrides:
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if _adapts(settings):
        values |= {"recompute_method": "block", "recompute_num_layers": hf.num_hidden_layers}
    return families.transformer_config(values, overrides, f"{key}.override_transformer_config")


def _check_sizes(hf: Any, layout: Layout, key: str) -> None:
    """ValueError if the model does not divide into the parts of the layout."""
    family = families.FAMILIES[hf.model_type]
    parts = [
        ("tensor_model_parallel_size", layout.tp, "num_key_value_heads"),
        ("pipeline_model_parallel_size", layout.pp, "num_hidden_layers"),
    ]
    if family.experts is None:
        parts.append(("tensor_model_parallel_size", layout.tp, "intermediate_size"))
    else:
        number, inner = family.experts
        parts.append(("expert_model_parallel_size", layout.ep, number))
        parts.append(("expert_tensor_parallel_size", layout.expert_tp, inner))
    if family.shared_expert is not None:
        parts.append(("tensor_model_parallel_size", layout.tp, family.shared_expert))
    for name, size, what in parts:
        total = getattr(hf, what)
        if total % size:
            fits = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
            raise ValueError(f"{key}.{name}={size} does not divide the model's {what}={total}; set it to one of {fits}")


def _ddp_config(settings: StageSettings) -> DistributedDataParallelConfig:
    values = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": settings.sharded,
        "overlap_grad_reduce": False,  # micro-batches are not the same number in every update
        "overlap_param_gather": False,  # the rollout and checkpoints read weights between updates
    }
    overrides = settings.engine.override_ddp_config
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    for name in overrides:
        key = f"{settings.key}.override_ddp_config.{name}"
        if name not in known:
            raise ValueError(f"{key}: megatron's DistributedDataParallelConfig has no such field")
        if name in values and overrides[name] != values[name]:
            raise ValueError(f"{key}={overrides[name]!r}: it must be {values[name]!r} here; remove it")
    return DistributedDataParallelConfig(**{**values, **overrides})
