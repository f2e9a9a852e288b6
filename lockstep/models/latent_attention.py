"""Multi-head latent attention (MLA, DeepSeek-V2): one latent and one rope key per token give the keys and values of all heads.

    key of head h = [K_h latent, rope]        value of head h = V_h latent        K_h, V_h: rows of `kv_b_proj`

    expanded   query_h · key_h                                  training, and the prefill of new sequences
    absorbed   [K_h^T q_h, q_rope] · [latent, rope]             over the KV cache: all heads have one key of R + DR numbers, which
               output of head h = V_h Σ probability * latent    is also its value

The absorbed form reads the weight of `kv_b_proj` itself, so that there is nothing to refresh after an update.
Legend: B rows of T tokens, H heads, R latent size, DR size of the rope key, DK other numbers of a key, DV value size, L LoRA rank.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.linear import linear_and_adapter
from lockstep.models.key_index import KeyIndex

LATENT_LAYERS = {
    "AXK1Attention",
    "AXK2Attention",
    "DeepseekV2Attention",
    "DeepseekV3Attention",
    "DeepseekV32Attention",
    "Glm4MoeLiteAttention",
    "GlmMoeDsaAttention",
    "HYV4Attention",
    "KimiLinearAttention",
    "LongcatFlashMLA",
    "MiniCPM3Attention",
    "Mistral4Attention",
    "YoutuAttention",
}
"""Names of attention classes in `transformers.models` whose `expand_kv` makes keys and values of latents."""


def can_absorb(kv_b_proj: nn.Module) -> bool:
    """Whether the layer is a product with a weight that can be read: a linear layer, or one with a LoRA adapter."""
    found = linear_and_adapter(kv_b_proj)
    return found is not None and found[0].bias is None


@dataclass(frozen=True)
class LatentKeys:
    """Keys and values of some tokens before they are expanded.

    layer:  transformers' attention layer.
    latent: (B, 1, T, R), normed.
    rope:   (B, 1, T, DR), rotated.
    """

    layer: Any
    latent: Tensor
    rope: Tensor

    def from_token(self, start: int) -> "LatentKeys":
        """Of the tokens from `start` on."""
        return replace(self, latent=self.latent[:, :, start:], rope=self.rope[:, :, start:])

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys (B, H, T, DK + DR) and values (B, H, T, DV), as transformers computes them."""
        expanded: tuple[Tensor, Tensor] = type(self.layer).expand_kv(self.layer, self.latent, self.rope)
        return expanded

    def join(self, index: KeyIndex | None) -> tuple[Tensor, Tensor]:
        """What is cached: keys (B, 1, T, R + DR) of one head, with the scorer's keys if there are, and values (B, 1, T, 0)."""
        keys = torch.cat((self.latent, self.rope), -1)
        return keys if index is None else index.join_keys(keys), keys[..., :0]

    def absorb(self, query: Tensor) -> Tensor:
        """query (B, H, T, DK + DR) -> (B, H, T, R + DR): queries of the joined keys."""
        own, rope = query.split([self.layer.qk_nope_head_dim, self.rope.shape[-1]], -1)
        linear, adapter = self._key_value_layer()
        absorbed = own @ self._of_keys(linear.weight)
        if adapter is not None:
            absorbed = absorbed + own @ self._of_keys(adapter.b) @ adapter.a * adapter.scale
        return torch.cat((absorbed, rope), -1)

    def project(self, mixed: Tensor) -> Tensor:
        """Mixed keys (B, T, H, R + DR) of each head -> its output (B, T, H, DV)."""
        mixed = mixed[..., : self.latent.shape[-1]].transpose(1, 2)
        linear, adapter = self._key_value_layer()
        out = mixed @ self._of_values(linear.weight).mT
        if adapter is not None:
            out = out + mixed @ adapter.a.T @ self._of_values(adapter.b).mT * adapter.scale
        return out.transpose(1, 2)

    def _key_value_layer(self) -> Any:
        found = linear_and_adapter(self.layer.kv_b_proj)
        assert found is not None, "see `can_absorb`"
        return found

    def _of_keys(self, rows: Tensor) -> Tensor:
        """The rows (H, DK, R or L) of keys, of all rows of `kv_b_proj`."""
        return self._by_head(rows)[:, : self.layer.qk_nope_head_dim]

    def _of_values(self, rows: Tensor) -> Tensor:
        return self._by_head(rows)[:, self.layer.qk_nope_head_dim :]

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self.layer.qk_nope_head_dim + self.layer.v_head_dim))
