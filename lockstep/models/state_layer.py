"""The layer with a state (Gated DeltaNet): norm, mixer, gated MLP on a residual stream. Training and decoding, CPU and CUDA.

    stream ─► norm ─► q, k, v, b, a, z (one product) ─► context.mix: convolution, delta rule ─► silu(z) * norm ─► stream += out_proj
           ─► norm ─► gate, up (one product) ─► activation(gate) * up                                         ─► stream += down_proj

`StateLayer` is to layers with a state what `DecoderLayer` (`models/decoder_layer.py`) is to layers with attention: it computes with
the children of the transformers layer that it replaces. What differs between architectures is in `StateForm`, of which
`models/known_models.py` has one per mixer class. Which tokens are one sequence, and with which state it begins, is up to the
context (`models/attention.py`); the mathematics on rows is in `models/gated_delta.py`.

Shapes: x (B, T, E); HK key heads of DK, HV value heads of DV. B is 1 for packed tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.activation_memory import state_layer_bytes
from lockstep.kernels.linear import gated_linear, joint_linear, linear_and_adapter
from lockstep.kernels.ops import NormKind, norm
from lockstep.models.attention import AttentionContext, require_context
from lockstep.models.gated_delta import gated_delta, trains_with_kernels
from lockstep.models.stream_layer import StreamLayer, norm_eps


@dataclass(frozen=True)
class StateForm:
    """What an architecture does differently.

    projections: names of the linear layers from the stream, computed as one product.
    by_key_head: whether their outputs are q, k, v, z of the first key head, of the second, …, then b, a of the first, of the
                 second, … (Qwen3-Next); otherwise q, k, v, b, a, z of all heads.
    norm:        kind of the norms of the stream.
    """

    projections: tuple[str, ...]
    by_key_head: bool = False
    norm: NormKind = "rms_offset"


class StateLayer(StreamLayer):
    """layer: the transformers layer that this one replaces. config: of the model."""

    linear_attn: Any

    def __init__(self, layer: Any, form: StateForm, config: Any) -> None:
        mixer = layer.linear_attn
        super().__init__(layer, mixer.hidden_size, form.norm, mixer.activation)
        self.form = form
        self.config = config
        self.layer_idx: int = mixer.layer_idx

    def forward(
        self, hidden_states: Tensor, lockstep_context: AttentionContext | None = None, **options: Any
    ) -> Tensor:
        require_context(self.reference, lockstep_context, self.config)
        if lockstep_context is None:  # transformers' own forward, see `reference_layers`
            out: Tensor = self.reference(hidden_states, **options)
            return out
        x, stream = self._norm_stream("input_layernorm", hidden_states.float())
        stream = gated_linear(self._mix(x, lockstep_context), self.linear_attn.out_proj, "silu", stream)
        return self._mlp(*self._norm_stream("post_attention_layernorm", stream))

    def activation_bytes(self, num_tokens: int, itemsize: int) -> int | None:
        """None without the kernels of flash-linear-attention, or if modules compute it their own way."""
        mixer = self.linear_attn
        is_known = self.activation is not None and linear_and_adapter(mixer.out_proj) is not None
        if not is_known or itemsize != 2 or not trains_with_kernels():
            return None
        keys = mixer.num_v_heads * mixer.head_k_dim
        inner = self.config.get_text_config().intermediate_size
        return state_layer_bytes(
            num_tokens, self.width, keys, mixer.num_v_heads, mixer.value_dim, mixer.conv_dim, inner, itemsize
        )

    def _mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x (B, T, E) -> (B, T, 2 HV * DV): the gate z, and what it gates before the output projection."""
        mixer = self.linear_attn
        projected = joint_linear(x, [getattr(mixer, name) for name in self.form.projections])
        inputs, z = (
            self._by_key_head(projected)
            if self.form.by_key_head
            else projected.split((mixer.conv_dim + 2 * mixer.num_v_heads, mixer.value_dim), -1)
        )
        mixed = context.mix(mixer, gated_delta(mixer, inputs), inputs)
        mixed = norm(mixed.unflatten(-1, (-1, mixer.head_v_dim)), mixer.norm.weight, norm_eps(mixer.norm), "rms")
        return torch.cat((z, mixed.reshape(z.shape)), 2).flatten(2)

    def _by_key_head(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """q, k, v, b, a of all heads, and z (B, T, HK, -1), not copied; see `StateForm.by_key_head`."""
        mixer = self.linear_attn
        values = mixer.value_dim // mixer.num_k_heads
        qkvz, ba = projected.split((2 * mixer.key_dim + 2 * mixer.value_dim, 2 * mixer.num_v_heads), -1)
        qkvz, ba = (t.unflatten(-1, (mixer.num_k_heads, -1)) for t in (qkvz, ba))
        qk, v, z = qkvz.split((2 * mixer.head_k_dim, values, values), -1)
        return torch.cat((_halves(qk), v.flatten(2), _halves(ba)), -1), z


def _halves(x: Tensor) -> Tensor:
    """(B, T, H, 2 D) -> (B, T, 2 H D): the first half of every head, then the second."""
    return x.unflatten(-1, (2, -1)).transpose(2, 3).flatten(2)
