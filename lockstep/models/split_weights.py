"""A model whose weights several ranks hold together: each decodes with its share of heads, MLP columns and vocabulary.

    q, k, v, gate, up     rows of the weight: whole heads, columns of the MLP      ┐ the layer's output is the sum over ranks
    o, down               the columns that belong to them                          ┘
    experts               the same, within every expert
    embedding, head       rows of the vocabulary, padded to equal numbers
    norms, routers        whole on every rank

LoRA adapters are split like the layer that they belong to. Names of parameters and the layer's code stay; `models/decoder_layer.py`
sums over ranks. What fills the model by name (`copy_gathered`, `copy_weights`, `WeightSource.fill`) takes this rank's share of each
whole tensor, so that no rank ever has more than one of them whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.decoder_layer import DecoderLayer
from lockstep.models.four_bit import has_4bit_linears
from lockstep.models.state_layer import StateLayer
from lockstep.models.tensor_group import TensorGroup
from lockstep.models.vision import is_vision

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"

Ranges = tuple[tuple[int, int], ...]
"""(start, stop) of entries, in order."""

_SEGMENTS = {"qkv_proj": ("q", "k", "k"), "gate_up_proj": ("mlp", "mlp")}
_SEGMENTS |= {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("k",), "gate_proj": ("mlp",), "up_proj": ("mlp",)}
"""What the outputs of a linear layer are, which are split: heads of queries, heads of keys or values, columns of the MLP."""
_INPUTS = {"o_proj": "q", "down_proj": "mlp"}
"""What the inputs of a linear layer are, which are split."""
_HEADS = {"q_norm": "q", "k_norm": "k", "sinks": "q"}
"""Parameters with a row per head; a norm of one row serves all heads."""
_EXPERTS: dict[str, tuple[int, tuple[str, ...]]] = {"gate_up_proj": (1, ("mlp", "mlp")), "down_proj": (2, ("mlp",))}
"""Tensors of all experts, (experts, outputs, inputs): the dimension that is split, and what it consists of."""
_OTHER_EXPERTS: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "GptOssExperts": {  # (experts, inputs, outputs), gate and up side by side; without segments: added by the first rank
        "gate_up_proj": (2, ("mlp",)),
        "gate_up_proj_bias": (1, ("mlp",)),
        "down_proj": (1, ("mlp",)),
        "down_proj_bias": (0, ()),
    }
}


@dataclass(frozen=True)
class Part:
    """How a parameter is split.

    shape:  whole.
    dim:    the dimension that is split.
    size:   its size on each rank; entries beyond those of `ranges` are zero.
    ranges: by rank, the entries that it has.
    """

    shape: tuple[int, ...]
    dim: int
    size: int
    ranges: tuple[Ranges, ...]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's entries; a view if they are adjacent."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        if missing := self.size - sum(piece.shape[self.dim] for piece in pieces):
            pieces.append(whole.new_zeros(*self.shape[: self.dim], missing, *self.shape[self.dim + 1 :]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: Tensor) -> Tensor:
        """The whole tensor from those of all ranks (size, ...)."""
        whole = parts.new_empty(self.shape)
        for part, ranges in zip(parts, self.ranges):
            first = 0
            for start, stop in ranges:
                piece = part.narrow(self.dim, first, stop - start)
                whole.narrow(self.dim, start, stop - start).copy_(piece)
                first += stop - start
        return whole


class SplitWeights:
    """parts: of the parameters that are split, by name; all others are whole on every rank."""

    def __init__(self, group: TensorGroup, parts: dict[str, Part]) -> None:
        self.group = group
        self.parts = parts

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's entries of the parameter."""
        return self.parts[name].take(whole, self.group.rank) if name in self.parts else whole

    def whole(self, name: str, own: Tensor) -> Tensor:
        """The parameter from all ranks' entries. Collective."""
        return self.parts[name].join(self.group.gather(own.detach())) if name in self.parts else own

    def whole_shape(self, name: str, own: Tensor) -> tuple[int, ...]:
        return self.parts[name].shape if name in self.parts else tuple(own.shape)


class SplitEmbedding(nn.Module):
    """Rows of an embedding: the group's ranks look up those that they have. first: the first of them; `reference`: the module."""

    weight: nn.Parameter
    reference: Any

    def __init__(self, module: nn.Module, group: TensorGroup, first: int) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._buffers = module._buffers
        self.__dict__["reference"] = module
        self.group = group
        self.first = first
        self.use_reference = False

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.use_reference:
            rows: Tensor = self.reference(token_ids)
            return rows
        own = token_ids - self.first
        elsewhere = (own < 0) | (own >= len(self.weight))
        rows = self.reference(own.masked_fill(elsewhere, 0))
        return self.group.sum(rows.masked_fill(elsewhere[..., None], 0.0))


def split_of(model: nn.Module) -> SplitWeights | None:
    """How the model's weights are split; None if they are whole."""
    return cast(SplitWeights | None, model.__dict__.get("split_weights"))


def split_model(model: PreTrainedModel, group: TensorGroup) -> None:
    """Keep this rank's share of the model, in place; parameters may have no memory yet."""
    check_sizes(model, group.size)
    parts: dict[str, Part] = {}
    for path, module in model.named_modules():
        if isinstance(module, DecoderLayer):
            parts |= {f"{path}.{name}": part for name, part in _layer_parts(module, group.size).items()}
            module.num_heads //= group.size
            module.num_key_heads = max(1, module.num_key_heads // group.size)
            module.tensor_group = group
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is embedding or module is head:
            named = module.named_parameters(prefix=path)
            parts |= {name: _vocabulary_part(p, group.size) for name, p in named if ".lora_A." not in name}
    split = SplitWeights(group, parts)
    model.__dict__["split_weights"] = split
    own: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in parts:
            if id(parameter) not in own:
                taken = split.take(name, parameter.detach()).clone(memory_format=torch.contiguous_format)
                own[id(parameter)] = nn.Parameter(taken, parameter.requires_grad)
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = own[id(parameter)]
    first = group.rank * len(cast(Tensor, embedding.weight))
    model.set_input_embeddings(SplitEmbedding(embedding, group, first))


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Modules that are called inside compute with whole weights, gathered one module at a time. Collective.

    No-op if the weights are not split.
    """
    split = split_of(model)
    if split is None:
        yield
        return
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            names = {leaf: f"{path}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}
            if any(name in split.parts for name in names.values()):
                _gather_in_forward(module, names, split, hooks)
        yield


def _gather_in_forward(module: nn.Module, names: dict[str, str], split: SplitWeights, hooks: ExitStack) -> None:
    own: dict[str, nn.Parameter] = {}

    def gather(module: nn.Module, args: Any) -> None:
        for leaf, name in names.items():
            parameter = cast(nn.Parameter, module._parameters[leaf])
            own[leaf] = parameter
            module._parameters[leaf] = nn.Parameter(split.whole(name, parameter), requires_grad=False)

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(own)
        own.clear()

    hooks.callback(module.register_forward_pre_hook(gather).remove)
    hooks.callback(module.register_forward_hook(restore, always_call=True).remove)


def check_sizes(model: PreTrainedModel, size: int) -> None:
    """ValueError if the model cannot be split over `size` ranks."""
    name = type(model).__name__
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    if any(isinstance(module, StateLayer) for module in model.modules()) or any(layer.form.gate for layer in layers):
        raise ValueError(
            f"{KEY}={size}: {name} has layers with a state or gated attention, which the embedded engine cannot split; set 1, or "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if is_vision(model.config):
        raise ValueError(
            f"{KEY}={size}: {name} has a vision tower, which the embedded engine cannot split; set 1, or "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if not layers:
        raise ValueError(
            f"{KEY}={size}: {name} computes by layers of transformers, which the embedded engine cannot split; set 1, or "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if has_4bit_linears(model):
        raise ValueError(f"{KEY}={size}: a base in 4 bits is whole on every rank; set 1 or load_in_4bit=false")
    if any(layer.form.qk_norm == "all" and hasattr(layer.self_attn, "q_norm") for layer in layers):
        raise ValueError(f"{KEY}={size}: the query norm of {name} spans all heads, which cannot be split; set 1")
    counts = {(layer.num_heads, layer.num_key_heads) for layer in layers}
    widths = {width for layer in layers for width in _mlp_widths(layer)}

    def fits(ranks: int) -> bool:
        heads = all(h % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0) for h, keys in counts)
        return heads and all(width % ranks == 0 for width in widths)

    if not fits(size):
        heads = " and ".join(f"{h} query and {keys} key heads" for h, keys in sorted(counts))
        columns = ", ".join(map(str, sorted(widths))) or "no"
        allowed = ", ".join(str(n) for n in range(1, max(h for h, _ in counts) + 1) if fits(n))
        raise ValueError(
            f"{KEY}={size}: {name} has {heads} and {columns} columns in its MLPs, which do not divide among {size} ranks; set one "
            f"of {allowed}"
        )


def _mlp_widths(layer: DecoderLayer) -> Iterator[int]:
    """Columns of the layer's MLP, or of its experts and shared experts."""
    for module in layer.mlp.modules():
        down = getattr(module, "down_proj", None)
        if isinstance(down, nn.Module):
            yield cast(Any, down).in_features
        elif down is not None:
            yield down.shape[_expert_rules(module)["down_proj"][0]]


def _layer_parts(layer: DecoderLayer, size: int) -> dict[str, Part]:
    """Of the layer's parameters that are split over `size` ranks, by name."""
    heads = {"q": layer.num_heads, "k": layer.num_key_heads}
    parts: dict[str, Part] = {}
    for name, parameter in layer.named_parameters():
        shape = tuple(parameter.shape)
        path, _, leaf = name.rpartition(".")
        owner = next((word for word in reversed(name.split(".")) if word in _SEGMENTS | _INPUTS | _HEADS), None)
        rules = _expert_rules(layer.get_submodule(path))
        if leaf in rules:
            dim, segments = rules[leaf]
            parts[name] = _part(shape, dim, segments, size) if segments else _only_first(shape, size)
        elif owner in _SEGMENTS and ".lora_A." not in name:
            parts[name] = _part(shape, 0, _SEGMENTS[owner], size, heads, layer.head_dim)
        elif owner in _INPUTS and ".lora_B." not in name:
            if leaf == "bias":
                parts[name] = _only_first(shape, size)
            else:
                parts[name] = _part(shape, 1, (_INPUTS[owner],), size, heads, layer.head_dim)
        elif owner in _HEADS and shape[0] == heads[_HEADS[owner]] and (owner == "sinks" or len(shape) > 1):
            parts[name] = _part(shape, 0, (_HEADS[owner],), size, heads, 1)
    return parts


def _expert_rules(module: nn.Module) -> dict[str, tuple[int, tuple[str, ...]]]:
    """For a module that holds experts: the dimension of each parameter that is split, and what it consists of."""
    down = getattr(module, "down_proj", None)
    if not isinstance(down, nn.Parameter):
        return {}
    return _OTHER_EXPERTS.get(type(module).__name__, _EXPERTS)


def _part(
    shape: tuple[int, ...],
    dim: int,
    segments: tuple[str, ...],
    size: int,
    heads: Mapping[str, int] = MappingProxyType({}),
    head_dim: int = 1,
) -> Part:
    """Every rank has its share of each segment."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    first = 0
    for kind in segments:
        count = heads.get(kind, shape[dim] // len(segments))
        unit = head_dim if kind in heads else 1
        per_rank = max(1, count // size)  # several ranks have the same key head if there are fewer than ranks
        for rank, own in enumerate(ranges):
            start = first + (rank * count // size) * unit
            own.append((start, start + per_rank * unit))
        first += count * unit
    assert first == shape[dim], f"{segments} of {shape} are {first}"
    return Part(shape, dim, sum(stop - start for start, stop in ranges[0]), tuple(map(tuple, ranges)))


def _only_first(shape: tuple[int, ...], size: int) -> Part:
    """The first rank has all: what is added to a sum over ranks."""
    return Part(shape, 0, shape[0], (((0, shape[0]),), *[()] * (size - 1)))


def _vocabulary_part(parameter: Tensor, size: int) -> Part:
    shape = tuple(parameter.shape)
    rows = -(-shape[0] // size)
    bounds = [min(rank * rows, shape[0]) for rank in range(size + 1)]
    return Part(shape, 0, rows, tuple(((start, stop),) if start < stop else () for start, stop in pairwise(bounds)))
