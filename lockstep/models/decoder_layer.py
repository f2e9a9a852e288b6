"""The decoder layer: norm, attention, gated MLP on a residual stream. Training and decoding, CPU and CUDA.

    stream ─► norm ─► q, k, v (one product) ─► rotary ─► context.attend ─► stream += o_proj
           ─► norm ─► gate, up (one product) ─► activation(gate) * up    ─► stream += down_proj

`DecoderLayer` computes with the children of the transformers layer that it replaces, so parameters keep their names, checkpoints
their format and adapters their place. What differs between architectures is in `LayerForm`; `models/known_models.py` has one per
layer class. The stream is in float32 whatever the weights are: rounding it in every layer is what makes two computations with the
same weights differ most. What a token may see is up to the attention context (`models/attention.py`).

Shapes: x (B, T, E); q (B, H, T, D); k, v (B, HK, T, D). B is 1 for packed tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.kernels.activation_memory import layer_bytes
from lockstep.kernels.linear import add_linear, joint_linear, linear_and_adapter
from lockstep.kernels.ops import NormKind, norm, rotary
from lockstep.models.attention import AttentionContext
from lockstep.models.layer_options import LayerOptions
from lockstep.models.stream_layer import StreamLayer, norm_eps

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerForm:
    """What an architecture does differently.

    norm:       kind of all its norms.
    order:      pre: x + f(norm(x)); sandwich: x + norm(f(norm(x))) (Gemma 2); post: x + norm(f(x)) (OLMo 2);
                parallel: x + attention(norm(x)) + mlp(norm(x)) (Cohere).
    mlp_norm:   name of the norm before the MLP, for orders that have one.
    qk_norm:    what a norm of queries and keys spans, if the layer has one: each head, or all heads together.
    rope:       halves: x1 and x2 are the halves of a head; interleaved: neighbours; half_table: halves, with cos and sin of
                half a head's size.
    rope_on:    all layers, or only those with a sliding window (Cohere 2); SmolLM3's `use_rope` is read too.
    window:     where the sliding window is found: an attribute of the attention module, or the config.
    softcap:    whether attention logits are capped at the attention module's `attn_logit_softcapping`.
    gate:       whether q_proj gives each head a query and a gate, whose sigmoid multiplies the head's output (Qwen3-Next).
    """

    norm: NormKind = "rms"
    order: Literal["pre", "sandwich", "post", "parallel"] = "pre"
    mlp_norm: str = "post_attention_layernorm"
    qk_norm: Literal["head", "all"] = "head"
    rope: Literal["halves", "interleaved", "half_table"] = "halves"
    rope_on: Literal["all", "sliding"] = "all"
    window: Literal["module", "config"] = "module"
    softcap: bool = False
    gate: bool = False


class DecoderLayer(StreamLayer):
    """layer: the transformers layer that this one replaces. Heads are counted per rank if a `tensor_group` holds the weights."""

    self_attn: Any

    def __init__(self, layer: Any, form: LayerForm) -> None:
        attention = layer.self_attn
        config = layer.self_attn.config
        hidden_act = getattr(config, "hidden_activation", None) or config.hidden_act
        super().__init__(layer, attention.o_proj.out_features, form.norm, hidden_act)
        self.form = form
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_key_heads: int = config.num_key_value_heads
        self.scaling: float = attention.scaling
        self.window: int | None = getattr(attention if form.window == "module" else config, "sliding_window", None)
        self.softcap: float | None = attention.attn_logit_softcapping if form.softcap else None
        self.use_rope = getattr(attention, "use_rope", True) and (form.rope_on == "all" or self.window is not None)
        self.residual_multiplier: float = getattr(layer, "residual_multiplier", 1.0)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rope | None = None,
        lockstep_context: AttentionContext | None = None,
        **options: Any,
    ) -> Tensor:
        if lockstep_context is None:  # transformers' own forward and attention, see `reference_layers`
            out: Tensor = self.reference(hidden_states, position_embeddings=position_embeddings, **options)
            return out
        return self._block()(hidden_states.float(), position_embeddings, lockstep_context)

    def _plain(self, stream: Tensor, rope: Rope | None, context: AttentionContext) -> Tensor:
        """x + f(norm(x)) for attention and MLP. Their last product adds to the stream."""
        stream = self._attention(*self._norm_stream("input_layernorm", stream), rope, context)
        return self._mlp(*self._norm_stream(self.form.mlp_norm, stream))

    def _parallel(self, stream: Tensor, rope: Rope | None, context: AttentionContext) -> Tensor:
        x, stream = self._norm_stream("input_layernorm", stream)
        return stream + self._attention(x, None, rope, context) + self._mlp(x)

    def _adjusted(self, stream: Tensor, rope: Rope | None, context: AttentionContext) -> Tensor:
        """With a norm or a factor between f and the stream."""
        x, stream = self._norm_stream("input_layernorm", stream)
        stream = self._add(stream, self._attention(x, None, rope, context), "post_attention_layernorm")
        x, stream = self._norm_stream(self.form.mlp_norm, stream)
        return self._add(stream, self._mlp(x), "post_feedforward_layernorm")

    def _block(self) -> Callable[[Tensor, Rope | None, AttentionContext], Tensor]:
        """The form of the block, see `LayerForm.order`."""
        if self.form.order == "parallel":
            return self._parallel
        return self._plain if self.form.order == "pre" and self.residual_multiplier == 1.0 else self._adjusted

    def _attention(self, x: Tensor, stream: Tensor | None, rope: Rope | None, context: AttentionContext) -> Tensor:
        """The attention's output, added to `stream` if given."""
        attended = self._attend(x, rope, context)
        project = self.self_attn.o_proj
        if stream is None:
            return self._sum(joint_linear(attended, [project]))
        return self._sum(add_linear(self._once(stream), attended, project))

    def _attend(self, x: Tensor, rope: Rope | None, context: AttentionContext) -> Tensor:
        """x (B, T, E) -> (B, T, H * D), before the output projection."""
        attention = self.self_attn
        form = self.form
        qkv = joint_linear(x, self._qkv())
        width = self.num_key_heads * self.head_dim
        q, k, v = qkv.split((self.query_width, width, width), -1)
        if form.qk_norm == "all":
            q, k = self._norm(attention, "q_norm", q), self._norm(attention, "k_norm", k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if form.gate:
            q, gate = q.unflatten(2, (-1, 2)).unbind(3)
        if form.qk_norm == "head":
            q, k = self._norm(attention, "q_norm", q), self._norm(attention, "k_norm", k)
        if v.requires_grad:
            v = v.contiguous()  # attention keeps v for its backward: a view would keep q and k too
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.use_rope:
            assert rope is not None
            if form.rope == "half_table":
                rope = (torch.cat((rope[0], rope[0]), -1), torch.cat((rope[1], rope[1]), -1))
            q, k = rotary(q, k, *rope, interleaved=form.rope == "interleaved")
        options = LayerOptions(self.scaling, self.window, self.softcap, getattr(attention, "sinks", None))
        out = context.attend(attention, q, k, v, options)
        return (out * torch.sigmoid(gate) if form.gate else out).flatten(2)

    def _qkv(self) -> list[nn.Module]:
        attention = self.self_attn
        names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        return [getattr(attention, name) for name in names]

    def products(self) -> list[list[nn.Module]]:
        """The linear layers of attention and MLP, those of one product together; experts are not among them."""
        of_mlp = [] if self.activation is None else [self._gate_up(), [self.mlp.down_proj]]
        return [self._qkv(), [self.self_attn.o_proj], *of_mlp]

    def _add(self, stream: Tensor, update: Tensor, norm_name: str) -> Tensor:
        if self.form.order in ("sandwich", "post"):
            update = self._norm(self, norm_name, update)
        return stream + (update if self.residual_multiplier == 1.0 else update * self.residual_multiplier)

    def _norm_stream(self, name: str, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The norm before attention or MLP, and the stream to add to. OLMo 2 has none: the stream in the weights' dtype."""
        if self.form.order == "post":
            after: Any = self.post_attention_layernorm
            return stream.to(after.weight.dtype), stream
        return super()._norm_stream(name, stream)

    @property
    def query_width(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim * (2 if self.form.gate else 1)

    def activation_bytes(self, num_tokens: int, itemsize: int) -> int | None:
        """None if modules compute it their own way."""
        if self.activation is None or linear_and_adapter(self.self_attn.o_proj) is None:
            return None
        heads = self.query_width + self.num_key_heads * self.head_dim
        return layer_bytes(num_tokens, self.width, heads, self.self_attn.config.intermediate_size, itemsize)


class FinalNorm(nn.Module):
    """The norm after the last layer, from the float32 stream to the weights' dtype; `reference`: the module it replaces."""

    weight: nn.Parameter
    reference: Any

    def __init__(self, module: Any, kind: NormKind) -> None:
        super().__init__()
        self._parameters = module._parameters
        self.__dict__["reference"] = module
        self.kind: NormKind = kind
        self.use_reference = False

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reference:
            out: Tensor = self.reference(x)
            return out
        return norm(x, self.weight, norm_eps(self.reference), self.kind)


def use_reference_layers(model: nn.Module) -> list[Any]:
    """Run transformers' own layers from now on: calls without an attention context go to them, and so does the final norm.

    Returns the modules that did not before.
    """
    replaced: list[Any] = [module for module in model.modules() if not getattr(module, "use_reference", True)]
    for module in replaced:
        module.use_reference = True
    return replaced


@contextmanager
def reference_layers(model: nn.Module) -> Iterator[None]:
    """`use_reference_layers` inside."""
    replaced = use_reference_layers(model)
    try:
        yield
    finally:
        for module in replaced:
            module.use_reference = False
