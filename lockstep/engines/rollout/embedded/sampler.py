"""Logits to tokens and log-probs, with each row's own sampling parameters and random number.

    logits ─► / temperature ─► log-prob of the full distribution
                  └─► without excluded tokens ─► min-p, top-k, top-p ─► inverse CDF at uniform(seed, position) ─► token

A row's token depends only on its logits, seed and position: not on other rows or on earlier samples.
Legend: _N rows, _V vocabulary, _K the likeliest tokens, most likely first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.protocol.generation import SamplingParams
from lockstep.utils.device import HostCopy

_MASK_64 = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class SamplingBatch:
    """The sampling parameters of N rows.

    temperatures_N: None if all are 1.
    greedy_N:       rows that take the likeliest token; num_greedy of them.
    filtered:       indices of the rows with min-p, top-k or top-p.
    excluded:       tokens that are never sampled; None if there are none.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device, excluded: Tensor | None = None) -> None:
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        self.params = params
        self.temperatures_N = torch.tensor(temperatures, device=device) if set(temperatures) != {1.0} else None
        self.greedy_N = torch.tensor([p.greedy for p in params], device=device)
        self.num_greedy = sum(p.greedy for p in params)
        self.filtered = [i for i, p in enumerate(params) if p.filtered]
        self.excluded = excluded


@dataclass(frozen=True)
class SampledTokens:
    """What some steps sampled, on the host once `ready` has passed (None: already there).

    tokens, log_probs: (steps, columns); token -1 if a sequence had stopped before.
    columns:           the column of each sequence.
    curve:             what drafts of the sequences are expected to give, see `DraftController.note_curve`; None if unknown.
    """

    tokens: Tensor
    log_probs: Tensor
    columns: list[int]
    ready: torch.cuda.Event | None = None
    curve: HostCopy | None = None
    counts: None = None

    @property
    def num_steps(self) -> int:
        return len(self.tokens)

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs of each sequence."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, log_probs = (t.numpy()[:, self.columns].T.tolist() for t in (self.tokens, self.log_probs))
        return tokens, log_probs


def sample(logits_NV: Tensor, batch: SamplingBatch, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (N,) int64 and their log-probs (N,) float32. uniform_N: random numbers from `uniform`."""
    scaled_NV = logits_NV.float()
    if batch.temperatures_N is not None:
        scaled_NV = scaled_NV / batch.temperatures_N[:, None]
    log_probs_NV = scaled_NV.log_softmax(-1)
    if batch.excluded is not None:
        scaled_NV = scaled_NV.index_fill(1, batch.excluded, float("-inf"))
    if batch.num_greedy == len(batch.params):
        tokens_N = scaled_NV.max(-1).indices  # on a CPU faster than argmax
    else:
        weights_NV = log_probs_NV.exp()
        if batch.excluded is not None:
            weights_NV.index_fill_(1, batch.excluded, 0.0)
        if batch.filtered:
            rows = torch.tensor(batch.filtered, device=logits_NV.device)
            weights_NV[rows] *= keep_mask(scaled_NV[rows], [batch.params[i] for i in batch.filtered])
        tokens_N = inverse_cdf(weights_NV, uniform_N)
        if batch.num_greedy:
            tokens_N = torch.where(batch.greedy_N, scaled_NV.argmax(-1), tokens_N)
    return tokens_N, log_probs_NV.gather(1, tokens_N[:, None])[:, 0]


def keep_mask(scaled_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(N, V) bool: tokens kept by min-p and top-k, then by top-p of the rest."""
    vocab = scaled_NV.shape[1]
    device = scaled_NV.device
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    likely_NV = scaled_NV >= scaled_NV.amax(-1, keepdim=True) + min_p.log()
    if all(p.top_k <= 0 and p.top_p == 1 for p in params):
        return likely_NV
    ks = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    ranked_NK, order_NK = scaled_NV.masked_fill(~likely_NV, float("-inf")).topk(max(ks), dim=-1)
    within_k = torch.arange(max(ks), device=device) < torch.tensor(ks, device=device)[:, None]
    probs_NK = ranked_NK.masked_fill(~within_k, float("-inf")).softmax(-1)
    before_NK = probs_NK.cumsum(-1) - probs_NK
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    # top_p = 1 keeps all: the rounded sum may reach 1 before the last token
    kept_NK = within_k & ((before_NK < top_p) | (top_p == 1))
    kept_NK[:, 0] = True
    return likely_NV & torch.zeros_like(likely_NV).scatter_(1, order_NK, kept_NK)


def inverse_cdf(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """(N,) the first token at which the cumulative weight exceeds uniform * total; never a token of weight 0.

    uniform_N: at most 1 - 2^-24, so that its product with a float32 stays below that float32.
    """
    cdf_NV = weights_NV.cumsum(-1)
    return torch.searchsorted(cdf_NV, uniform_N[:, None] * cdf_NV[:, -1:], right=True)[:, 0]


def uniform(seeds: Sequence[int], positions: Sequence[int] | np.ndarray) -> Tensor:
    """One float32 in [0, 1) with 24 random bits per (seed, position), by splitmix64 over the low 64 bits of the seeds.

    positions: (N,) or (S, N) of the tokens to sample.
    """
    state = _mix(np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64) + _GOLDEN)
    state = state + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return torch.from_numpy((_mix(state) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
