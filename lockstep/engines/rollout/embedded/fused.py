"""Faster forwards for a model's modules while it serves on a CUDA device: the same functions in fewer passes.

    RMSNorm ─► one kernel      gate, up, activation ─► one product + one kernel      q, k, v ─► one product
    apply_rotary_pos_emb ─► one kernel      residual + o_proj(...) ─► one product      head ─► logits in float32

Where all layers of a model are of the usual form, its residual stream is kept in float32: rounding the stream at every layer
is what makes two computations with the same weights differ most.

A replacement is compared with what it replaces before it is used; what does not agree stays as it is. Replacements hang on the
module objects, not on their classes, and are taken off when serving ends: the trainer never sees them. They look the parameters up
at each call, so the tensors may be exchanged between two calls.

One product for q, k, v (or gate, up) needs their weights to lie one behind the other in memory, which `models/adjacent.py` sees to.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.kernels.gated import Activation, gated_product
from lockstep.kernels.head import add_product, linear_float32
from lockstep.kernels.norms import rms_norm
from lockstep.kernels.rotary import rotary
from lockstep.models.adjacent import ADJACENT, joined
from lockstep.models.attention import PackedAttention, no_mask
from lockstep.models.fused_layers import agree, has_rotary_table, one_row, rotary_forward
from lockstep.models.paged_attention import LayerProbe
from lockstep.utils.device import background

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


class FusedModules:
    """The replacements that fit `model`, whose parameters must be in place."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._verdicts: dict[Any, Any] = {}
        self._last: AddingLayer | None = None
        self._try_each_kind(model)
        self._replace_parts(model)
        self._replace_layers(model)
        if not self._agree(model):
            logger.warning("%s is served by its own forwards: faster ones do not fit it", type(model).__name__)
            self._forwards.clear()
            self._last = None

    def narrow(self, wanted: Tensor | None) -> bool:
        """Have the last layer give the tokens `wanted` alone in the next forward; whether it will."""
        if self._last is not None:
            self._last.wanted = wanted
        return self._last is not None and wanted is not None

    def _agree(self, model: Any) -> bool:
        """Whether the decoder computes the same with all replacements as without, for a few tokens."""
        device = model.get_input_embeddings().weight.device
        ids, context = torch.arange(3, device=device)[None], PackedAttention([3], device)
        inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": no_mask(device), "lockstep_context": context}
        expected = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
        with self.installed():
            try:
                got = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
            except (TypeError, ValueError, RuntimeError):
                return False
        return got.dtype == expected.dtype and agree(got, expected, 5.0)

    def _try_each_kind(self, model: Any) -> None:
        """Try norms and gates side by side: their kernels are compiled outside of Python."""
        kinds = {(type(m), getattr(getattr(m, "weight", None), "shape", None)): m for m in model.modules()}

        @torch.no_grad()
        def try_on_all(part: Callable[[nn.Module], Forward | None]) -> None:
            for module in kinds.values():
                part(module)

        with background(model.get_input_embeddings().weight.device) as pool:
            list(pool.map(try_on_all, (self._norm, self._gated)))

    def _replace_parts(self, model: nn.Module) -> None:
        for module in model.modules():
            for names in ADJACENT:
                linears = [getattr(module, name, None) for name in names]
                if (shared := fuse_linears(linears)) is not None:
                    self._forwards += [
                        (linear, shared.part(i)) for i, linear in enumerate(linears) if linear is not None
                    ]
            forward = self._norm(module) or self._gated(module) or self._rotary(module)
            if forward is not None:
                self._forwards.append((module, forward))
        head = model.get_output_embeddings()  # type: ignore[operator]
        if type(head) is nn.Linear and head.bias is None:
            self._forwards.append((head, lambda x: linear_float32(x, head.weight)))

    def _replace_layers(self, model: nn.Module) -> None:
        """Layers that add to the residual stream in place; it is kept in float32 where all are such."""
        layers = [
            m for m in model.modules() if isinstance(getattr(m, "self_attn", None), nn.Module) and hasattr(m, "mlp")
        ]
        streams = [AddingLayer.of(layer) for layer in layers]
        if not streams:
            return
        for layer, stream in zip(layers, streams):
            if stream is None or not self._once(type(layer), partial(stream.agrees, self._forwards)):
                return
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        embed = MethodType(type(embedding).forward, embedding)
        self._forwards.append((embedding, lambda ids: embed(ids).float()))
        self._forwards += [(m, in_type_of(embedding, m)) for m in model.modules() if has_rotary_table(m)]
        for stream in streams:
            assert stream is not None
            self._forwards += stream.forwards()
        self._last = streams[-1]

    def installed(self) -> AbstractContextManager[None]:
        return replaced(self._forwards)

    def _once(self, key: Any, check: Callable[[], Any]) -> Any:
        if key not in self._verdicts:
            self._verdicts[key] = check()
        return self._verdicts[key]

    def _norm(self, module: nn.Module) -> Forward | None:
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
            return None

        def offset_that_agrees() -> bool | None:
            x = noise(3, weight.shape[0], like=weight)
            expected, stream = module(x), x.float()
            return next((o for o in (False, True) if agree(rms_norm(stream, weight, eps, offset=o), expected)), None)

        offset = self._once((type(module), weight.shape), offset_that_agrees)
        if offset is None:
            return None
        return lambda x: rms_norm(x, module.weight, eps, offset=offset)  # type: ignore[arg-type]

    def _gated(self, module: nn.Module) -> Forward | None:
        parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        act = getattr(module, "act_fn", None)
        if act is None or not all(type(part) is nn.Linear for part in parts):
            return None
        gate, up, down = parts
        assert gate is not None and up is not None and down is not None
        weight = gate.weight
        activation = self._once(repr(act), lambda: activation_of(act, weight))
        if activation is None:
            return None
        fused = fuse_linears([gate, up])

        def forward(x: Tensor) -> Tensor:
            gates, ups = (gate(x), up(x)) if fused is None else fused(x)
            product: Tensor = down(gated_product(gates, ups, activation))
            return product

        def agrees() -> bool:
            x = noise(1, 3, weight.shape[1], like=weight)
            return agree(forward(x), module(x))

        return forward if self._once(type(module), agrees) else None

    def _rotary(self, module: nn.Module) -> Forward | None:
        forward = self._once(("rotary", type(module)), lambda: rotary_forward(module, one_row, rotary))
        return None if forward is None else MethodType(forward, module)


@contextmanager
def replaced(forwards: Sequence[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Give the modules these forwards for a while."""
    before = [(module, module.__dict__.get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, old in reversed(before):
            module.__dict__.pop("forward")
            if old is not None:
                module.__dict__["forward"] = old


class AddingLayer:
    """A decoder layer of the usual form, x += attention(norm(x)); x += mlp(norm(x)), with the additions inside the products.

    wanted: places of the tokens for which the next forward goes on after the attention; None for all.
    """

    def __init__(self, layer: Any, attention_out: nn.Linear, mlp_out: nn.Linear | None) -> None:
        self.layer, self.attention_out, self.mlp_out = layer, attention_out, mlp_out
        self.wanted: Tensor | None = None
        self._stream: Tensor | None = None

    @classmethod
    def of(cls, layer: Any) -> "AddingLayer | None":
        norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
        attention_out: Any = getattr(layer.self_attn, "o_proj", None)
        mlp_out: Any = getattr(layer.mlp, "down_proj", None)
        if not all("RMSNorm" in type(norm).__name__ for norm in norms) or not _is_plain(attention_out):
            return None
        return cls(layer, attention_out, mlp_out if _is_plain(mlp_out) else None)

    def forwards(self) -> list[tuple[nn.Module, Forward]]:
        parts: list[tuple[nn.Module, Forward]] = [(self.layer, self)]
        for linear in (self.attention_out, self.mlp_out):
            if linear is not None:
                parts.append((linear, partial(self._add, linear)))
        return parts

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        layer = self.layer
        self._stream = hidden_states
        layer.self_attn(layer.input_layernorm(hidden_states), *args, **options)
        stream = self._stream  # of fewer tokens where `wanted` says so
        out = layer.mlp(layer.post_attention_layernorm(stream))
        self._stream = self.wanted = None
        return stream if self.mlp_out is not None else stream + out

    def agrees(self, parts: Sequence[tuple[nn.Module, Forward]]) -> bool:
        """Whether it computes what the layer's own class does, for one token that sees itself alone.

        parts: the other replacements, without which nothing here takes a stream in float32.
        """
        weight = self.attention_out.weight
        dim = getattr(self.layer.self_attn, "head_dim", None)
        if not isinstance(dim, int):
            return False
        x = noise(1, 1, weight.shape[0], like=weight)
        cos, sin = noise(2, 1, 1, dim, like=weight)
        options = {"position_embeddings": (cos, sin), "attention_mask": None, "lockstep_context": LayerProbe()}
        try:
            expected = self.layer(x, **options)
            options["lockstep_context"] = LayerProbe()
            with replaced([*parts, *self.forwards()]):
                got = self.layer(x.float(), **options)
        except (TypeError, RuntimeError, ValueError):
            return False  # it wants other arguments
        return isinstance(expected, Tensor) and agree(got.to(expected.dtype), expected)

    def _add(self, linear: nn.Linear, x: Tensor) -> Tensor:
        if self._stream is None:
            return F.linear(x, linear.weight)
        if self.wanted is not None and linear is self.attention_out:
            self._stream, x = self._stream.index_select(1, self.wanted), x.index_select(1, self.wanted)
        return add_product(self._stream, x, linear.weight)


def _is_plain(linear: object) -> bool:
    return type(linear) is nn.Linear and linear.bias is None


def in_type_of(embedding: Any, rotary_embedding: nn.Module) -> Forward:
    """cos and sin in the type of the weights, whatever that of the stream."""
    plain = MethodType(type(rotary_embedding).forward, rotary_embedding)
    return lambda x, *args, **options: plain(x.new_empty(0, dtype=embedding.weight.dtype), *args, **options)


class SharedProduct:
    """Linear layers of one input as one product: whichever is called first computes it for all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        # joined anew at each call: a view that is kept would keep memory that the trainer means to free
        weight, bias = joined([m.weight for m in self.linears]), joined([m.bias for m in self.linears])
        assert weight is not None, "the weights have moved apart while serving"
        return F.linear(x, weight, bias).split(self.sizes, -1)

    def part(self, index: int) -> Forward:
        def forward(x: Tensor) -> Tensor:
            if self._input is not x:
                self._input, self._parts = x, self(x)
            part = self._parts[index]
            if index == len(self.sizes) - 1:
                self._input, self._parts = None, ()
            return part

        return forward


def fuse_linears(linears: Sequence[nn.Module | None]) -> SharedProduct | None:
    """One product for these layers, if they are plain and their weights (and biases) lie one behind the other."""
    if not all(type(linear) is nn.Linear for linear in linears):
        return None
    layers = [linear for linear in linears if isinstance(linear, nn.Linear)]
    biases = [linear.bias for linear in layers]
    if joined([linear.weight for linear in layers]) is None:
        return None
    return SharedProduct(layers) if all(b is None for b in biases) or joined(biases) is not None else None


def noise(*shape: int, like: Tensor) -> Tensor:
    """Always the same numbers, from a generator of their own: training's random numbers do not depend on what is tried here."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def activation_of(act: Any, like: Tensor) -> Activation | None:
    x = torch.linspace(-6, 6, 99, device=like.device, dtype=like.dtype)
    expected = act(x)
    if agree(F.silu(x), expected):
        return "silu"
    return "gelu_tanh" if agree(F.gelu(x, approximate="tanh"), expected) else None
