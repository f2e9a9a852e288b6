"""What some attention layers of transformers compute from the whole row that they are given, on packed tokens.

    Llama 4:        queries of layers without rope are scaled by position ─► by position_ids rather than by place in the row
    DeepSeek-V3.2:  the indexer picks keys of its row ─► it returns a `KeyIndex`, and the attention context picks
    DeepSeek-V2:    keys and values are expanded from latents ─► the latents go to the attention context, which may cache them
    Nemotron:       layers pass no keyword arguments to their attention ─► a hook hands it the attention context

All do what transformers does if the model attends by transformers' own functions.
"""

import sys
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lockstep.models.attention import ATTENTION_NAME, AttentionContext
from lockstep.models.key_index import KeyIndex
from lockstep.models.latent_attention import LATENT_LAYERS, LatentKeys, can_absorb


@dataclass(frozen=True)
class IndexerForm:
    """How an indexer rotates its queries and keys.

    rope:       name of the rotary function in the module of the class.
    rope_first: whether it turns the first part of a head, or the last.
    """

    rope: str = "apply_rotary_pos_emb"
    rope_first: bool = True


INDEXERS: dict[str, IndexerForm] = {
    "DeepseekV32Indexer": IndexerForm(),
    "AXK2Indexer": IndexerForm(),
    "GlmMoeDsaIndexer": IndexerForm(rope="apply_rotary_pos_emb_interleave"),
    "HYV4Indexer": IndexerForm(rope_first=False),
}
"""Name of an indexer class in `transformers.models` -> its form."""


def install_attention_variants(model: nn.Module) -> None:
    """Prepare those layers of a transformers model that compute from their whole row."""
    for layer in list(model.modules()):
        if type(layer).__name__ in LATENT_LAYERS and type(layer).__module__.startswith("transformers.models."):
            cast(Any, layer).expand_kv = _KeepLatents(layer)
        attention: Any = getattr(layer, "self_attn", None)
        if type(attention).__name__ == "Llama4TextAttention" and not layer._forward_pre_hooks:
            layer.register_forward_pre_hook(_ScaleByPosition(bool(attention.attn_temperature_tuning)), with_kwargs=True)
        if type(attention).__name__ == "NemotronAttention" and not layer._forward_pre_hooks:
            _HandDown(layer, attention)
        indexer: Any = getattr(attention, "indexer", None)
        form = INDEXERS.get(type(indexer).__name__)
        if form is not None and type(indexer).__module__.startswith("transformers.models."):
            attention.indexer = PackedIndexer(indexer, form)


class _HandDown:
    """Hooks of a layer and of its attention: the context that the layer is given and drops reaches the attention."""

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        self.context: AttentionContext | None = None
        layer.register_forward_pre_hook(self.take, with_kwargs=True)
        attention.register_forward_pre_hook(self.give, with_kwargs=True)
        layer.register_forward_hook(self.drop, always_call=True)

    def take(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.context = options.get("lockstep_context")

    def give(self, attention: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options | {"lockstep_context": self.context}

    def drop(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.context = None  # it may refer to a cache


class _ScaleByPosition:
    """Hook of a Llama 4 layer: its attention leaves the scale of queries to `lockstep_attention`, which knows their positions."""

    def __init__(self, is_scaled: bool) -> None:
        self.is_scaled = is_scaled

    def __call__(self, layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        attention = layer.self_attn
        is_packed = options.get("lockstep_context") is not None
        attention.attn_temperature_tuning = self.is_scaled and not is_packed
        if is_packed and self.is_scaled and not attention.use_rope:
            count = torch.floor((options["position_ids"].float() + 1.0) / attention.floor_scale)
            options = options | {"query_scale": torch.log1p(count) * attention.attn_scale + 1.0}
        return args, options


class _KeepLatents:
    """`expand_kv` of a layer with latents: under our attention function they go to the attention context as they are."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[LatentKeys, None] | tuple[Tensor, Tensor]:
        keys = LatentKeys(self.layer, latent, rope)
        is_ours = self.layer.config._attn_implementation == ATTENTION_NAME
        return (keys, None) if is_ours and can_absorb(self.layer.kv_b_proj) else keys.expand()


class PackedIndexer(nn.Module):
    """indexer: the module that this one replaces, with the same children."""

    reference: Any

    def __init__(self, indexer: Any, form: IndexerForm) -> None:
        super().__init__()
        self._modules = indexer._modules
        self.__dict__["reference"] = indexer  # not a child
        self.form = form
        self.config = indexer.config

    def train(self, mode: bool = True) -> Self:
        self.reference.training = mode
        return super().train(mode)

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        **options: Any,
    ) -> Any:
        if self.config._attn_implementation != ATTENTION_NAME:
            return self.reference(hidden_states, q_resid, position_embeddings, *args, **options)
        return self._index(hidden_states, q_resid, position_embeddings)

    @torch.no_grad()
    def _index(self, x: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> KeyIndex:
        own = self.reference
        queries = own.wq_b(q_resid).unflatten(-1, (own.n_heads, own.head_dim))
        keys = own.k_norm(own.wk(x).to(own.k_norm.weight.dtype)).to(x.dtype).unsqueeze(2)
        queries, keys = self._rotated(queries, keys, position_embeddings)
        weights = own.weights_proj(x.to(own.weights_proj.weight.dtype)).float()
        weights = weights * (own.n_heads**-0.5 * own.softmax_scale)
        return KeyIndex(queries, weights, own.index_topk, keys.squeeze(2))

    def _rotated(
        self, queries: Tensor, keys: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        own = self.reference
        rope = getattr(sys.modules[type(own).__module__], self.form.rope)
        rest = own.head_dim - own.qk_rope_head_dim
        place = 0 if self.form.rope_first else 1
        sizes = (own.qk_rope_head_dim, rest) if self.form.rope_first else (rest, own.qk_rope_head_dim)
        q, k = list(queries.split(sizes, -1)), list(keys.split(sizes, -1))
        q[place], k[place] = rope(q[place], k[place], *position_embeddings, unsqueeze_dim=2)
        return torch.cat(q, -1), torch.cat(k, -1)
