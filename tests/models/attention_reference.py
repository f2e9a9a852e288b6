"""Attention by its formula, which the attention contexts are compared with."""

import torch
from torch import Tensor

from lockstep.models.layer_options import LayerOptions


def naive_attention(query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
    """query (Q, H, D) of the last Q of the tokens key (K, HK, D), value (K, HK, DV) -> (Q, H, DV)."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_key_heads, _ = key.shape
    key, value = (t.repeat_interleave(num_heads // num_key_heads, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = (distance >= 0) & (distance < (options.sliding_window or num_keys))
    if options.chunk is not None:
        chunk_of_query = torch.arange(num_keys - num_queries, num_keys) // options.chunk
        seen &= chunk_of_query[:, None] == torch.arange(num_keys) // options.chunk
    scores = scores.masked_fill(~seen.to(query.device), -torch.inf)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks[:, None, None].expand(-1, num_queries, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :num_keys], value)
