"""A decoder's forward on the CPU without its modules: at small sizes they take longer than what they compute.

    embedding ─► [ norm ─► q, k, v ─► rotary ─► attention ─► += output ─► norm ─► gate, up ─► += down ]* ─► norm

For decoders of this form only: `flat_form` looks at the parts, and compares the result, and what every layer attends with, with
those of the model's own forward. The weights are looked up when serving begins, and let go when it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.adjacent import joined
from lockstep.models.attention import AttentionContext, LayerOptions, PackedAttention

Forward = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""(1, T) tokens and positions, attention context -> (T, E) hidden states."""


FEW_ROWS, LARGE = 64, 1 << 16
"""Up to so many rows a large weight is multiplied from the left, which the matrix library does faster."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, I) @ weight (O, I).T + bias"""
    if len(x) > FEW_ROWS or weight.numel() < LARGE:
        return F.linear(x, weight, bias)
    out = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return out.t().contiguous()


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total (T, O) += x (T, I) @ weight (O, I).T"""
    if len(x) > FEW_ROWS or weight.numel() < LARGE:
        total.addmm_(x, weight.t())
    else:
        total.add_(torch.mm(weight, x.t()).t())


class Product:
    """Linear layers of one input, as one product where their weights lie one behind the other."""

    def __init__(self, *linears: nn.Linear) -> None:
        self.sizes = [linear.out_features for linear in linears]
        weight, bias = joined([m.weight for m in linears]), joined([m.bias for m in linears])
        plain = all(m.bias is None for m in linears)
        if weight is not None and (plain or bias is not None):
            self._parts = [(weight, bias)]
        else:
            self._parts = [(m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in linears]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = [product(x, weight, bias) for weight, bias in self._parts]
        return outputs[0].split(self.sizes, -1) if len(outputs) < len(self.sizes) else tuple(outputs)


@dataclass(frozen=True)
class FlatForm:
    """What the parts do not tell. offset: whether a norm's factor is 1 + weight; hows: how each layer attends."""

    offset: bool
    hows: list[LayerOptions]


class Norm:
    def __init__(self, module: Any, offset: bool) -> None:
        weight = module.weight.detach()
        self._shape = weight.shape
        self._factor = 1 + weight if offset else weight
        self._eps: float = getattr(module, "variance_epsilon", None) or module.eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self._factor, self._eps)


class Layer(NamedTuple):
    attention: Any
    how: LayerOptions
    input_norm: Norm
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    head_dim: int
    output: Tensor
    mlp_norm: Norm
    gate_up: Product
    act: Callable[[Tensor], Tensor]
    down: Tensor

    @classmethod
    def of(cls, layer: Any, how: LayerOptions, offset: bool) -> "Layer":
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            attention=attention,
            how=how,
            input_norm=Norm(layer.input_layernorm, offset),
            qkv=Product(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=Norm(attention.q_norm, offset) if hasattr(attention, "q_norm") else None,
            k_norm=Norm(attention.k_norm, offset) if hasattr(attention, "k_norm") else None,
            head_dim=attention.head_dim,
            output=attention.o_proj.weight.detach(),
            mlp_norm=Norm(layer.post_attention_layernorm, offset),
            gate_up=Product(mlp.gate_proj, mlp.up_proj),
            act=mlp.act_fn,
            down=mlp.down_proj.weight.detach(),
        )

    def add_to(self, stream: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> None:
        """stream (T, E), cos and sin (T, 1, D), the first half of sin negated."""
        q, k, v = (t.unflatten(1, (-1, self.head_dim)) for t in self.qkv(self.input_norm(stream)))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        heads = torch.cat((q, k), 1)
        turned = torch.addcmul(heads * cos, heads.roll(self.head_dim // 2, -1), sin)
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = context.attend(self.attention, q, k, v, self.how)
        add_product(stream, out.flatten(2)[0], self.output)
        gate, up = self.gate_up(self.mlp_norm(stream))
        add_product(stream, self.act(gate) * up, self.down)


class FlatDecoder:
    """decoder: its weights must stay where they are while this one is used."""

    def __init__(self, decoder: Any, form: FlatForm) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._layers = [Layer.of(layer, how, form.offset) for layer, how in zip(decoder.layers, form.hows)]
        self._norm = Norm(decoder.norm, form.offset)

    def __call__(self, token_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        embedded = self._embed(token_ids)
        cos, sin = (t[0, :, None] for t in self._rotary(embedded, position_ids))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        stream = embedded[0]
        for layer in self._layers:
            layer.add_to(stream, cos, sin, context)
        return self._norm(stream)


@torch.no_grad()
def flat_form(decoder: Any, own: Forward) -> FlatForm | None:
    """The form in which a flat forward computes what the decoder's own does; None where there is none."""
    names = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if set(dict(decoder.named_children())) != names or not all(_is_usual(layer) for layer in decoder.layers):
        return None
    ids = torch.arange(5)[None]
    expected = _Witness(5)
    hidden = own(ids, ids, expected)
    for offset in (False, True):
        form, got = FlatForm(offset, expected.hows), _Witness(5)
        try:
            same = agree(FlatDecoder(decoder, form)(ids, ids, got), hidden)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None  # parts of the same names that want other arguments
        if same and all(agree(*pair) for pair in zip(got.seen, expected.seen)):
            return form
    return None


def _is_usual(layer: Any) -> bool:
    parts = {name: set(dict(part.named_children())) for name, part in layer.named_children()}
    if set(parts) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not linears <= parts["self_attn"] <= linears | {"q_norm", "k_norm"}:
        return False
    if parts["mlp"] != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    plain = [*(getattr(attention, n) for n in linears), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(linear) is nn.Linear for linear in plain)
        and attention.o_proj.bias is None
        and mlp.down_proj.bias is None
        and hasattr(attention, "head_dim")
    )


class _Witness:
    """An attention context that keeps what the layers attend with."""

    def __init__(self, length: int) -> None:
        self._context = PackedAttention([length], torch.device("cpu"))
        self.hows: list[LayerOptions] = []
        self.seen: list[Tensor] = []

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        self.hows.append(how)
        self.seen += [query, key, value]
        return self._context.attend(layer, query, key, value, how)


def agree(got: Tensor, expected: Tensor) -> bool:
    """Up to rounding in the tensors' own type."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    bound = 1e-4 if got.dtype == torch.float32 else 5e-2
    error = (got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20)
    return bool(error < bound)
