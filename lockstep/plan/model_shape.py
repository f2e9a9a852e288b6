"""The sizes of a decoder-only model, from its config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.kernels.activation_memory import layer_bytes
from lockstep.plan.mlp_layers import dense_inner, dense_mlps
from lockstep.plan.state_layers import (
    LayerCounts,
    SharedBlocks,
    StateLayer,
    layer_counts,
    shared_blocks,
    state_layer,
    with_plain_keys,
)

_TIED_BY_DEFAULT = ("gemma", "cohere")
_WITH_QKV_BIAS = ("qwen2",)
_WITH_QK_NORM = ("qwen3", "gemma3", "olmo2", "olmo3", "lfm2")
_WITH_OUTPUT_GATE = ("qwen3_next", "qwen3_5")
_WITHOUT_MLP_GATE = ("nemotron_h",)


@dataclass(frozen=True)
class ModelShape:
    """Sizes per layer; a model with experts has `experts` MLPs of size `inner`, of which a token uses `active_experts`.

    counts:         layers that attend, that have a state, and that have an MLP: all, none and all in most models.
    shared_experts: of the experts, those that every token uses.
    dense_mlps:     of the layers with an MLP, those in a model with experts that have a single one, of size `dense_inner`.
    state:          of a recurrent or hybrid model.
    blocks:         of a model whose layers share their attention and MLPs; None of others.
    kv_entries:     a key and a value of one head.
    latent:         entries of a token's latent and rope key, from which keys and values are expanded (MLA), and of its key for an
                    index; 0 if there is no latent.
    """

    model_type: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    counts: LayerCounts
    heads: int
    key_heads: int
    head_dim: int
    tied: bool
    kv_entries: int
    latent: int = 0
    experts: int = 1
    active_experts: int = 1
    shared_experts: int = 0
    dense_mlps: int = 0
    dense_inner: int = 0
    state: StateLayer | None = None
    blocks: SharedBlocks | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelShape":
        return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """config: the content of config.json; ValueError if it has no decoder sizes."""
        text = with_plain_keys({**config, **config.get("text_config", {})})
        model_type = str(text.get("model_type", "unknown"))

        def size(*names: str, default: int | None = None) -> int:
            found = next((text[name] for name in names if isinstance(text.get(name), int)), default)
            if found is None:
                raise ValueError(f"config.json of {model_type} has no {names[0]}, so its memory cannot be planned")
            return int(found)

        width, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "n_heads")
        experts = size("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
        inner = dense_inner(text, size("intermediate_size", "block_ff_dim", "n_inner", "ffn_dim", default=4 * width))
        expert = size("moe_intermediate_size", default=inner)
        shared = size(
            *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
            default=math.ceil(size("shared_expert_intermediate_size", default=0) / expert),
        )
        kinds = text.get("layers_block_type") or text.get("hybrid_override_pattern")  # which has no number of layers
        layers = size("num_hidden_layers", "n_layer", "n_layers", default=len(kinds) if kinds else None)
        state = state_layer(text, width)
        counts = LayerCounts(layers, 0, layers) if state is None else layer_counts(text, layers)
        num_dense = min(dense_mlps(text, layers), counts.mlp) if experts else 0
        if num_dense == counts.mlp:
            experts = 0
        active = size("num_experts_per_tok", "num_experts_per_token", "moe_k", default=1)
        head_dim = size("head_dim", "attention_head_dim", default=width // heads)
        rank, rope = size("kv_lora_rank", default=0), size("qk_rope_head_dim", default=0)
        indexed = size("index_head_dim", default=0)
        expanded = size("qk_nope_head_dim", default=0) + rope + size("v_head_dim", default=0)
        return cls(
            model_type=model_type,
            vocabulary=size("vocab_size"),
            width=width,
            inner=expert if experts else inner,
            layers=layers,
            counts=counts,
            heads=heads,
            key_heads=size("num_key_value_heads", default=heads),
            head_dim=head_dim,
            kv_entries=expanded if rank else 2 * head_dim,
            latent=rank + rope + indexed if rank else 0,
            tied=bool(text.get("tie_word_embeddings", model_type.startswith(_TIED_BY_DEFAULT))),
            experts=experts + shared if experts else 1,
            active_experts=active + shared if experts else 1,
            shared_experts=shared if experts else 0,
            dense_mlps=num_dense if experts else 0,
            dense_inner=inner if experts else 0,
            state=state,
            blocks=shared_blocks(text, width),
        )

    @property
    def attention_parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        bias = queries + 2 * keys if self.model_type.startswith(_WITH_QKV_BIAS) else 0
        norms = 2 * self.head_dim if self.model_type.startswith(_WITH_QK_NORM) else 0
        gate = self.width * queries if self.model_type.startswith(_WITH_OUTPUT_GATE) else 0
        inputs, own = (self.width, 0) if self.blocks is None else (self.blocks.input_width, self.blocks.own_parameters)
        return inputs * (queries + 2 * keys) + self.width * queries + gate + bias + norms + own

    @property
    def repeated_parameters(self) -> int:
        """Of shared blocks, which the model holds once: what counting them in each layer that uses one adds."""
        if self.blocks is None:
            return 0
        block = self.attention_parameters - self.blocks.own_parameters + self.mlp_parameters
        return (self.counts.attention - self.blocks.number) * block

    @property
    def mlp_parameters(self) -> int:
        return (2 if self.model_type in _WITHOUT_MLP_GATE else 3) * self.width * self.inner

    @property
    def routed_experts(self) -> int:
        """Experts that the router chooses from; 0 without experts."""
        return self.experts - self.shared_experts if self.experts > 1 else 0

    @property
    def routed_parameters(self) -> float:
        """Of a layer's experts that the router chooses from, on average."""
        return (self.counts.mlp - self.dense_mlps) * self.routed_experts * self.mlp_parameters / self.layers

    def used_mlp_parameters(self, experts: float) -> float:
        """Of a layer's MLP, on average, if tokens use this many of its experts."""
        of_dense = self.dense_mlps * self.mlp_parameters * self.dense_inner / self.inner
        return (of_dense + (self.counts.mlp - self.dense_mlps) * experts * self.mlp_parameters) / self.layers

    @property
    def router_parameters(self) -> int:
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def norm_parameters(self) -> int:
        """Of a layer: before its mixer and before its MLP, if it has both."""
        return self.width if self.model_type in _WITHOUT_MLP_GATE else 2 * self.width

    @property
    def mixer_parameters(self) -> float:
        """Attention and states of a layer, on average."""
        states = 0 if self.state is None else self.counts.state * self.state.parameters
        return (self.counts.attention * self.attention_parameters + states) / self.layers

    @cached_property
    def layer_parameters(self) -> int:
        """That the model holds, on average, rounded."""
        return round(self._all_layer_parameters / self.layers)

    @cached_property
    def _all_layer_parameters(self) -> int:
        mlps = round(self.layers * self.used_mlp_parameters(self.experts))
        routers = (self.counts.mlp - self.dense_mlps) * self.router_parameters
        norms = self.layers * self.norm_parameters
        return round(self.layers * self.mixer_parameters) + mlps + routers + norms - self.repeated_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.width

    @cached_property
    def parameters(self) -> int:
        return self._all_layer_parameters + self.head_parameters * (1 if self.tied else 2) + self.width

    @property
    def active_layer_parameters(self) -> float:
        """Parameters of a layer that one token is multiplied with, and entries of its state, on average."""
        states = 0.0 if self.state is None else self.counts.state * self.state.products / self.layers
        return self.mixer_parameters + states + self.used_mlp_parameters(self.active_experts)

    def kv_bytes(self, itemsize: int, ranks: int = 1, *, expanded: bool = False) -> int:
        """KV cache of one token, on each of the `ranks` that split its heads; with more ranks than heads, several have the same.

        expanded: keys and values are cached for each head even if the model has latents.
        """
        if self.latent and not expanded:
            return self.counts.attention * self.latent * itemsize
        return self.counts.attention * math.ceil(self.key_heads / ranks) * self.kv_entries * itemsize

    def state_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """States of one sequence, on each of the `ranks` that split them; 0 for most models."""
        return 0 if self.state is None else math.ceil(self.counts.state * self.state.num_bytes(itemsize) / ranks)

    def activation_bytes(self, num_tokens: int, itemsize: int) -> int:
        """What the forward of one layer keeps for the backward."""
        heads = (self.heads + self.key_heads) * self.head_dim
        if self.state is not None:  # of its projections before and after the convolution, and of the gated output
            entries = (2 * self.state.projected + self.state.inner) // 3
            heads = (self.counts.attention * heads + self.counts.state * entries) // self.layers
        return layer_bytes(num_tokens, self.width, heads, self.active_experts * self.inner, itemsize)
