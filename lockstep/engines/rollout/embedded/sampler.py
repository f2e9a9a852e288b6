"""Logits to tokens and log-probs, each row by its own parameters and its own random number.

    logits ─► / temperature ─► log-prob of the full distribution
                  └─► min-p, top-k, top-p ─► inverse CDF at uniform(seed, position) ─► token

The draw of a row depends on its logits, its seed and its position alone: not on the other rows, nor on earlier draws.
Legend: _N rows, _V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.base import SamplingParams

_WORD = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of N rows. What decides on the work is kept on the host, so that no step waits for the device.

    uniform_N:      random number of each row, (S, N) where they are those of S steps.
    temperatures_N: None where all are 1.
    greedy_N:       rows that take the likeliest token; num_greedy of them.
    filtered:       rows with min-p, top-k or top-p.
    """

    params: Sequence[SamplingParams]
    uniform_N: Tensor
    temperatures_N: Tensor | None
    greedy_N: Tensor
    num_greedy: int
    filtered: Sequence[int]

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int] | np.ndarray,
        device: torch.device,
    ) -> "SamplingBatch":
        """positions: place in the sequence of the token that each row is to draw."""
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        greedy = [p.greedy for p in params]
        return cls(
            params=params,
            uniform_N=torch.from_numpy(uniform(seeds, positions)).to(device),
            temperatures_N=torch.tensor(temperatures, device=device) if set(temperatures) != {1.0} else None,
            greedy_N=torch.tensor(greedy, device=device),
            num_greedy=sum(greedy),
            filtered=[i for i, p in enumerate(params) if p.filtered],
        )


def sample(logits_NV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Tokens (N,) int64 and their log-probs (N,) float32."""
    tokens_N1, probs_N1 = draw(logits_NV, batch, batch.uniform_N[:, None])
    return tokens_N1[:, 0], probs_N1[:, 0].log()


def draw(logits_NV: Tensor, batch: SamplingBatch, uniform_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (N, 1) int64 and their probabilities (N, 1) float32, by these random numbers in place of the batch's."""
    scaled_NV = logits_NV.float()
    if batch.temperatures_N is not None:
        scaled_NV = scaled_NV / batch.temperatures_N[:, None]
    probs_NV = scaled_NV.softmax(-1)
    if batch.num_greedy == len(batch.params):
        tokens_N1 = likeliest(scaled_NV)
    else:
        weights_NV = probs_NV
        if batch.filtered:
            rows = torch.tensor(batch.filtered, device=logits_NV.device)
            kept = keep_mask(scaled_NV[rows], [batch.params[i] for i in batch.filtered])
            weights_NV = probs_NV.index_copy(0, rows, probs_NV[rows] * kept)
        tokens_N1 = inverse_cdf(weights_NV, uniform_N1)
        if batch.num_greedy:
            tokens_N1 = torch.where(batch.greedy_N[:, None], likeliest(scaled_NV), tokens_N1)
    return tokens_N1, probs_NV.gather(1, tokens_N1)


def likeliest(scaled_NV: Tensor) -> Tensor:
    """(N, 1) the first of the largest; on the CPU by numpy, whose search is ten times as fast as torch's."""
    if scaled_NV.is_cuda:
        return scaled_NV.argmax(-1, keepdim=True)
    return torch.from_numpy(scaled_NV.numpy().argmax(-1, keepdims=True))


def keep_mask(scaled_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(N, V) bool: what min-p and top-k, then top-p of what remains, leave in."""
    vocab = scaled_NV.shape[1]
    device = scaled_NV.device
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    likely_NV = scaled_NV >= scaled_NV.amax(-1, keepdim=True) + min_p.log()
    if all(p.top_k <= 0 and p.top_p == 1 for p in params):
        return likely_NV
    ks = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    ranked_NK, order_NK = scaled_NV.masked_fill(~likely_NV, float("-inf")).topk(max(ks), dim=-1)  # the likeliest first
    within_k = torch.arange(max(ks), device=device) < torch.tensor(ks, device=device)[:, None]
    probs_NK = ranked_NK.masked_fill(~within_k, float("-inf")).softmax(-1)
    before_NK = probs_NK.cumsum(-1) - probs_NK
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    # top_p = 1 keeps all: the rounded sum may reach 1 before the last token
    kept_NK = within_k & ((before_NK < top_p) | (top_p == 1))
    kept_NK[:, 0] = True
    return likely_NV & torch.zeros_like(likely_NV).scatter_(1, order_NK, kept_NK)


def inverse_cdf(weights_NV: Tensor, uniform_N1: Tensor) -> Tensor:
    """(N, 1) the first token at which the running sum of the weights exceeds uniform * total; never one of weight 0.

    uniform_N1: at most 1 - 2^-24, which times a float32 stays below that float32.
    """
    cdf_NV = weights_NV.cumsum(-1)
    return torch.searchsorted(cdf_NV, uniform_N1 * cdf_NV[:, -1:], right=True)


def uniform(seeds: Sequence[int], positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One float32 in [0, 1) of 24 random bits for each (seed, position): splitmix64, by the last 64 bits of seeds.

    positions: (N,) or (S, N).
    """
    state = _mix(np.array([seed & _WORD for seed in seeds], dtype=np.uint64) + _GOLDEN)
    state = state + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def signed(x: int) -> int:
    """The number whose two's complement the last 64 bits are."""
    x &= _WORD
    return x - (1 << 64) if x >= 1 << 63 else x
