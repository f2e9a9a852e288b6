"""The sizes of a decoder-only model, from its config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.kernels.activation_memory import layer_bytes

_TIED_BY_DEFAULT = ("gemma", "cohere")
_WITH_QKV_BIAS = ("qwen2",)
_WITH_QK_NORM = ("qwen3", "gemma3", "olmo2", "olmo3")


@dataclass(frozen=True)
class ModelShape:
    """Sizes per layer; a model with experts has `experts` MLPs of size `inner`, of which a token uses `active_experts`.

    shared_experts: of these, those that every token uses.
    """

    model_type: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    tied: bool
    experts: int = 1
    active_experts: int = 1
    shared_experts: int = 0

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelShape":
        return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """config: the content of config.json; ValueError if it has no decoder sizes."""
        text = {**config, **config.get("text_config", {})}
        model_type = str(text.get("model_type", "unknown"))

        def size(*names: str, default: int | None = None) -> int:
            found = next((text[name] for name in names if isinstance(text.get(name), int)), default)
            if found is None:
                raise ValueError(f"config.json of {model_type} has no {names[0]}, so its memory cannot be planned")
            return int(found)

        width, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "n_heads")
        experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
        inner = size("intermediate_size", "n_inner", "ffn_dim", default=4 * width)
        shared = size("n_shared_experts", default=0)
        return cls(
            model_type=model_type,
            vocabulary=size("vocab_size"),
            width=width,
            inner=size("moe_intermediate_size", default=inner) if experts else inner,
            layers=size("num_hidden_layers", "n_layer", "n_layers"),
            heads=heads,
            key_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=width // heads),
            tied=bool(text.get("tie_word_embeddings", model_type.startswith(_TIED_BY_DEFAULT))),
            experts=max(experts, 1) + shared,
            active_experts=size("num_experts_per_tok", default=1) + shared if experts else 1,
            shared_experts=shared if experts else 0,
        )

    @property
    def attention_parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        bias = queries + 2 * keys if self.model_type.startswith(_WITH_QKV_BIAS) else 0
        norms = 2 * self.head_dim if self.model_type.startswith(_WITH_QK_NORM) else 0
        return 2 * self.width * (queries + keys) + bias + norms

    @property
    def mlp_parameters(self) -> int:
        return 3 * self.width * self.inner

    @property
    def routed_experts(self) -> int:
        """Experts that the router chooses from; 0 without experts."""
        return self.experts - self.shared_experts if self.experts > 1 else 0

    @property
    def router_parameters(self) -> int:
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def norm_parameters(self) -> int:
        return 2 * self.width

    @cached_property
    def layer_parameters(self) -> int:
        mlps = self.experts * self.mlp_parameters
        return self.attention_parameters + mlps + self.router_parameters + self.norm_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.width

    @cached_property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.head_parameters * (1 if self.tied else 2) + self.width

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of a layer that one token is multiplied with."""
        return self.attention_parameters + self.active_experts * self.mlp_parameters

    def kv_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """KV cache of one token, on each of the `ranks` that split its heads; with more ranks than heads, several have the same."""
        return 2 * self.layers * math.ceil(self.key_heads / ranks) * self.head_dim * itemsize

    def activation_bytes(self, num_tokens: int, itemsize: int) -> int:
        """What the forward of one layer keeps for the backward."""
        heads = (self.heads + self.key_heads) * self.head_dim
        return layer_bytes(num_tokens, self.width, heads, self.active_experts * self.inner, itemsize)
