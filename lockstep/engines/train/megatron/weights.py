"""Where each Hugging Face tensor lies in megatron's parameters: one table for loading, handing out weights and checkpoints.

    Hugging Face tensor ── split over tensor-parallel ranks ──► a view of a parameter of one pipeline stage
                        ── experts split over expert-parallel ranks ──► a view of each expert's parameter

megatron keeps the queries, the key and the value of a query group together, and gate and up projection in one matrix.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lockstep.engines.train.megatron.model import TokenGPT
from lockstep.models.token_models import TokenModel
from lockstep.models.weight_source import WeightSource

View = Callable[[Tensor], Tensor]
"""A megatron parameter, or a tensor of its shape -> a view of what belongs to one Hugging Face tensor."""


@dataclass(frozen=True)
class Form:
    """How a Hugging Face tensor is laid out in a megatron parameter.

    view:    of the parameter.
    split:   the dimension over which tensor-parallel ranks split it; None if all have the whole.
    shape:   the Hugging Face shape -> the shape that `split` refers to.
    """

    view: View = lambda t: t
    split: int | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape


WHOLE = Form()
ROWS = Form(split=0)
COLUMNS = Form(split=1)
GATE = Form(lambda t: t.chunk(2)[0], split=0)
UP = Form(lambda t: t.chunk(2)[1], split=0)
# transformers holds the experts of a layer in one tensor, (experts, gate and up, hidden) and (experts, hidden, inner)
EXPERTS_IN = Form(lambda t: t.unflatten(0, (2, -1)), split=2, shape=lambda s: (s[0], 2, s[1] // 2, s[2]))
EXPERTS_OUT = Form(split=2)


def _of_groups(config: TransformerConfig, first: int, end: int) -> Form:
    """Heads `first` to `end` of each query group, whose heads are its queries, its key and its value."""
    heads = config.num_attention_heads // config.num_query_groups + 2
    return Form(lambda t: t.unflatten(0, (-1, heads, config.kv_channels))[:, first:end], split=0)


def table(config: TransformerConfig) -> dict[str, dict[str, Form]]:
    """megatron's name -> Hugging Face's names and forms; inside a layer both continue its path."""
    queries = config.num_attention_heads // config.num_query_groups
    q, k, v = (_of_groups(config, a, b) for a, b in ((0, queries), (queries, queries + 1), (queries + 1, queries + 2)))
    qkv = {"q": q, "k": k, "v": v}
    return {
        "embedding.word_embeddings.weight": {"embed_tokens.weight": ROWS},
        "output_layer.weight": {"lm_head.weight": ROWS},
        "score.weight": {"score.weight": WHOLE},
        "decoder.final_layernorm.weight": {"norm.weight": WHOLE},
        "input_layernorm.weight": {"input_layernorm.weight": WHOLE},
        "pre_mlp_layernorm.weight": {"post_attention_layernorm.weight": WHOLE},
        "self_attention.linear_qkv.weight": {f"self_attn.{x}_proj.weight": form for x, form in qkv.items()},
        "self_attention.linear_qkv.bias": {f"self_attn.{x}_proj.bias": form for x, form in qkv.items()},
        "self_attention.linear_proj.weight": {"self_attn.o_proj.weight": COLUMNS},
        "self_attention.q_layernorm.weight": {"self_attn.q_norm.weight": WHOLE},
        "self_attention.k_layernorm.weight": {"self_attn.k_norm.weight": WHOLE},
        "mlp.linear_fc1.weight": {"mlp.gate_proj.weight": GATE, "mlp.up_proj.weight": UP},
        "mlp.linear_fc2.weight": {"mlp.down_proj.weight": COLUMNS},
        "mlp.router.weight": {"mlp.gate.weight": WHOLE},
        "mlp.shared_experts.linear_fc1.weight": {
            "mlp.shared_expert.gate_proj.weight": GATE,
            "mlp.shared_expert.up_proj.weight": UP,
        },
        "mlp.shared_experts.linear_fc2.weight": {"mlp.shared_expert.down_proj.weight": COLUMNS},
        "mlp.shared_experts.gate_weight": {"mlp.shared_expert_gate.weight": WHOLE},
        "mlp.experts.linear_fc1.weight": {"mlp.experts.gate_up_proj": EXPERTS_IN},
        "mlp.experts.linear_fc2.weight": {"mlp.experts.down_proj": EXPERTS_OUT},
    }


@dataclass
class Slice:
    """One Hugging Face tensor on this rank.

    name:       in the `TokenModel`, as in checkpoints.
    shape:      of the whole tensor.
    parameters: what this rank holds of it: one, or one per local expert; empty on other pipeline stages.
    stage:      the pipeline stage that hands it out. A tied embedding is also on the last one.
    """

    name: str
    shape: tuple[int, ...]
    form: Form
    is_expert: bool
    parameters: list[nn.Parameter] = field(default_factory=list)
    stage: int = 0

    @property
    def group(self) -> Any:
        """The ranks that split it."""
        return ps.get_expert_tensor_parallel_group() if self.is_expert else ps.get_tensor_model_parallel_group()

    def read(self, read: "Reader") -> list[Tensor]:
        """This rank's part for each of its parameters, in float32."""
        rows, start = self.shape[0], 0
        split = self.form.split
        if self.is_expert:
            rows //= ps.get_expert_model_parallel_world_size()
            start = ps.get_expert_model_parallel_rank() * rows
        elif split == 0:
            share = -(-rows // self.group.size())
            start = min(self.group.rank() * share, rows)
            rows = min(share, rows - start)
        own = torch.empty((rows if self.parameters else 0, *self.shape[1:]), dtype=torch.float32)
        read(self, own, start)
        if not self.parameters:
            return []
        whole = own.view(self.form.shape(tuple(own.shape)))
        if split:
            whole = whole.chunk(self.group.size(), split)[self.group.rank()]
        return list(whole) if self.is_expert else [whole]

    def write(self, parameter: Tensor, part: Tensor) -> None:
        """Put this rank's part into a tensor of a parameter's shape; rows that pad the vocabulary stay zero."""
        view = self.form.view(parameter)
        if self.form.split == 0 and view.dim() == part.dim() and len(view) > len(part):
            view = view[: len(part)]
        view.copy_(part.reshape(view.shape))

    def gathered(self, value: Callable[[nn.Parameter], Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The whole tensor on all ranks, of what `value` gives for each parameter, in its shape. Collective."""
        pipeline = ps.get_pipeline_model_parallel_group()
        if pipeline.rank() == self.stage:
            views = [self.form.view(value(parameter)) for parameter in self.parameters]
            split = self.form.split
            part = torch.stack(views) if self.is_expert else views[0]
            if split == 0 and part.dim() > len(self.shape):
                part = part.flatten(0, part.dim() - len(self.shape))  # of query groups
            if split is not None:
                part = _all_gather(part, split, self.group)
            if self.is_expert:
                part = _all_gather(part, 0, ps.get_expert_model_parallel_group())
            if len(part) != self.shape[0]:
                part = part[: self.shape[0]]  # without the rows that pad the vocabulary
            whole = part.reshape(self.shape).contiguous()
        elif pipeline.size() > 1:
            whole = torch.empty(self.shape, dtype=dtype, device=device)
        if pipeline.size() > 1:
            dist.broadcast(whole, dist.get_global_rank(pipeline, self.stage), group=pipeline)
        return whole


def _all_gather(part: Tensor, dim: int, group: Any) -> Tensor:
    if group.size() == 1:
        return part
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


def find_slices(gpt: TokenGPT, model: TokenModel) -> list[Slice]:
    """The slices of all parameters of `model`, in its order. Collective. Also marks split parameters for the gradient norm."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    forms = table(gpt.config)
    found: dict[str, Slice] = {}
    for own_name, parameter in gpt.named_parameters():
        is_copy = own_name == "output_layer.weight" and gpt.share_embeddings_and_output_weights
        layer = re.match(r"decoder\.layers\.(\d+)\.", own_name)
        is_expert = ".local_experts." in own_name
        key = re.sub(r"^decoder\.layers\.\d+\.|\.local_experts\.\d+", "", own_name)
        key = "embedding.word_embeddings.weight" if is_copy else key
        assert key in forms, f"megatron's {own_name} has no Hugging Face name"
        # megatron counts layers from one, over all pipeline stages
        path = "" if layer is None else f"layers.{gpt.decoder.layers[int(layer[1])].layer_number - 1}."
        for hf_name, form in forms[key].items():
            name = _name_in(model, hf_name, path)
            assert name in shapes, f"{name} is not a parameter of the Hugging Face model"
            stage = 0 if is_copy else ps.get_pipeline_model_parallel_rank()
            piece = found.setdefault(name, Slice(name, shapes[name], form, is_expert, [], stage))
            piece.parameters.append(parameter)
            parameter.tensor_model_parallel = form.split is not None
    everyones: list[Any] = [None] * dist.get_world_size()
    told = {name: (piece.stage, key_of(piece.form, forms), piece.is_expert) for name, piece in found.items()}
    dist.all_gather_object(everyones, told)
    by_key = {key_of(form, forms): form for names in forms.values() for form in names.values()}
    for others in everyones:
        for name, (stage, form_key, is_expert) in others.items():
            found.setdefault(name, Slice(name, shapes[name], by_key[form_key], is_expert, [], stage))
    if missing := [name for name in shapes if name not in found]:
        raise ValueError(f"strategy=megatron has no place for {missing[:5]} of the model (of {len(missing)})")
    return [found[name] for name in shapes]


def key_of(form: Form, forms: dict[str, dict[str, Form]]) -> tuple[str, str]:
    """Its first place in the table: forms are functions, which cannot be sent."""
    return next((own, hf) for own, names in forms.items() for hf, other in names.items() if other is form)


Reader = Callable[[Slice, Tensor, int], None]
"""Copies rows of a slice's Hugging Face tensor into a tensor of that many rows, from a first row on."""


def load_slices(slices: list[Slice], read: Reader, set_values: Callable[[nn.Parameter, Tensor], object]) -> None:
    """Read this rank's parts, in order. read: is also called for slices of which this rank has nothing, with no rows.

    set_values: takes each parameter and its values in float32, when they are complete.
    """
    waiting: dict[nn.Parameter, int] = {}
    for piece in slices:
        for parameter in piece.parameters:
            waiting[parameter] = waiting.get(parameter, 0) + 1
    filled: dict[nn.Parameter, Tensor] = {}
    for piece in slices:
        for parameter, part in zip(piece.parameters, piece.read(read)):
            if parameter not in filled:
                filled[parameter] = torch.zeros(parameter.shape, dtype=torch.float32)
            piece.write(filled[parameter], part)
            waiting[parameter] -= 1
            if not waiting[parameter]:
                set_values(parameter, filled.pop(parameter))


def from_model(model: TokenModel, source: WeightSource) -> Reader:
    """Read from the parameters of `model`, or from the source of those that have no memory. Collective if rank 0 sends them."""
    parameters = dict(model.named_parameters())
    prefix = path_of(model.transformer, model) + "."

    def read(piece: Slice, own: Tensor, start: int) -> None:
        whole = parameters[piece.name]
        if whole.is_meta:
            source.read(piece.name.removeprefix(prefix), whole.shape, own, start)
        else:
            own.copy_(whole.detach()[start : start + len(own)])

    return read


def whole_tensors(
    slices: list[Slice], value: Callable[[nn.Parameter], Tensor], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each slice, one at a time. Collective."""
    for piece in slices:
        yield piece.name, piece.gathered(value, dtype, device)


def path_of(part: nn.Module, model: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is part)


def _name_in(model: TokenModel, hf_name: str, layer: str) -> str:
    """hf_name: of the table. layer: the path of its layer in the body, or nothing."""
    if hf_name == "score.weight":
        return hf_name
    transformer: Any = model.transformer
    if hf_name == "lm_head.weight":
        return f"{path_of(transformer, model)}.{hf_name}"
    body = transformer.get_decoder() if hasattr(transformer, "lm_head") else transformer
    return f"{path_of(body, model)}.{layer}{hf_name}"
