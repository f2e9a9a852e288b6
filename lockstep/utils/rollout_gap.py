"""The gap between the rollout's log-probs and the trainer's: its mean, its buckets, and the bounds on them (audit `rollout_gap`).

A token is in one bucket of each kind:

    position   the first 16 tokens of a response, its last token, or the quarter of the response that it is in
    length     the length of its response
    turn       the number of its turn: of its run of sampled tokens

A defect that concerns few tokens, such as a wrong position after a tool's answer, hides in the mean and shows in its bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.utils.device import HostCopy
from lockstep.utils.metrics import MaxOverRanks

GAP_METRIC = "training/rollout_log_probs_gap"
BUCKET_METRIC = "training/rollout_gap"
NUM_FIRST = 16
"""Tokens of a response that are its first."""
LENGTHS = (64, 256, 1024, 4096, 16384)
"""Longest response of each bucket but the last."""
NUM_TURNS = 4
"""Turns with an own bucket, the last for all later ones."""
POSITIONS = ("first_16", "quarter_1", "quarter_2", "quarter_3", "quarter_4", "last")
BUCKETS = (
    *(f"position/{name}" for name in POSITIONS),
    *(f"length/to_{length}" for length in LENGTHS),
    "length/longer",
    *(f"turn/{number}" for number in range(1, NUM_TURNS)),
    f"turn/{NUM_TURNS}_on",
)
NUM_TOTALS = 6
"""Numbers before those of the buckets in `RolloutGap.sums`."""
LEAST_TOKENS = 32
"""A bucket with fewer is not compared, nor are its tokens with as few others."""


@dataclass(frozen=True)
class Bucket:
    """name: of `BUCKETS`; count: its tokens; gap, error: mean |log p_rollout - log p_trainer|, and the standard error of that;
    others: the mean of all other tokens, None if they are few."""

    name: str
    count: int
    gap: float
    error: float
    others: float | None

    @property
    def description(self) -> str:
        kind, _, which = self.name.partition("/")
        if kind == "length":
            return f"tokens of responses {'longer than' if which == 'longer' else 'of at most'} " + (
                f"{LENGTHS[-1]} tokens" if which == "longer" else f"{which.removeprefix('to_')} tokens"
            )
        if kind == "turn":
            return f"tokens of turn {which.replace('_on', ' and later')}"
        if which == "first_16":
            return f"tokens 0-{NUM_FIRST - 1} of each response"
        return (
            "the last token of each response"
            if which == "last"
            else f"tokens in {which.replace('_', ' ')} of each response"
        )


def buckets_of(sums: Sequence[float]) -> list[Bucket]:
    """Those with enough tokens, from the sums over all ranks."""
    total, distance = sums[0], sums[1]
    found = []
    for number, name in enumerate(BUCKETS):
        count, own, squares = sums[NUM_TOTALS + 3 * number :][:3]
        if count < LEAST_TOKENS:
            continue
        gap = own / count
        variance = max(squares / count - gap**2, 0.0)
        num_others = total - count
        others = (distance - own) / num_others if num_others >= LEAST_TOKENS else None
        found.append(Bucket(name, int(count), gap, math.sqrt(variance / count), others))
    return found


class GapBound:
    """The largest mean |log p_rollout - log p_trainer| that a run allows; it lives as long as the run.

    The first step's gap is what the two forwards differ by on this model. It must stay below a cap, and later gaps below a
    multiple of it. A floor keeps a first gap of nearly zero from being held against later batches. A bucket is held against the
    other tokens of its step.
    dtype:   the compute type.
    exact:   no token may differ at all (`rollout.exact`).
    largest: the cap at every step, if the rollout quantises what is the trainer's (`rollout.quantization_max_gap`).
    """

    MULTIPLE = 4.0
    BUCKET_FLOORS = 2.0
    """A bucket is named if its gap is above these multiples of the floor and of the gap of the other tokens."""
    BUCKET_MULTIPLE = 8.0

    def __init__(self, dtype: torch.dtype, *, exact: bool = False, largest: float | None = None) -> None:
        self.dtype = dtype
        self.exact = exact
        self.largest = largest
        # With the same weights float32 forwards differ by 1e-6 to 1e-4 per token (TF32: 1e-3), bfloat16 and float16 by 1e-3 to
        # 3e-2. A wrong temperature or unrelated weights differ by 0.1 and more.
        self.floor, self.cap = (1e-3, 0.01) if dtype == torch.float32 else (0.03, 0.1)
        if largest is not None:
            self.floor, self.cap = largest / 4, largest
        self.bound: float | None = None

    def problem(self, sums: Sequence[float]) -> str | None:
        """What is wrong with the gap of a step, given by the sums over all ranks; None if nothing, or without tokens."""
        if not sums[0]:
            return None
        gap = sums[1] / sums[0]
        if self.exact:
            return self._inexact(sums, gap)
        bound = self.cap if self.bound is None else self.bound
        if not gap <= bound:
            if self.largest is not None:
                return self._quantized_problem(gap, bound)
            return (
                f"the rollout's log-probs differ from the trainer's by {gap:.4f} per token on average; the bound for "
                f"{str(self.dtype).removeprefix('torch.')} is {bound:.4f}"
                f"{' at the first step' if self.bound is None else ''}. Likely causes: the rollout's weights are not in sync, "
                "a different temperature, or a model whose rollout and training forwards differ. If the difference is "
                "expected, set algorithm.rollout_correction.rollout_is or rollout_rs: then it is corrected and only reported"
            )
        if self.bound is None:
            self.bound = max(self.floor, self.MULTIPLE * gap)
            if self.largest is not None:
                self.bound = min(self.bound, self.largest)
        beyond = [bucket for bucket in buckets_of(sums) if self._is_beyond(bucket)]
        if not beyond:
            return None
        worst = max(beyond, key=lambda bucket: bucket.gap - 3 * bucket.error)
        return (
            f"the rollout's log-probs of {worst.description} differ from the trainer's by {worst.gap:.4f}, those of other tokens "
            f"by {worst.others:.4f}. Likely causes: positions, attention or a cache that go wrong there, or sampling that treats "
            "these tokens differently, such as a forced or cut token"
        )

    def _quantized_problem(self, gap: float, bound: float) -> str:
        origins = {self.largest: "", self.floor: " (a quarter of quantization_max_gap)"}
        origin = origins.get(bound, " (four times that of the first step)")
        return (
            f"the log-probs of the rollout in 8 bits differ from the trainer's by {gap:.4f} per token on average; the bound is "
            f"{bound:.4f}{origin}. Likely causes: a model that 8 bits do not serve well, or a rollout whose weights are not in "
            "sync (then it differs with actor_rollout_ref.rollout.quantization=null and kv_cache_dtype=null too). To accept more, "
            "raise actor_rollout_ref.rollout.quantization_max_gap"
        )

    @staticmethod
    def _inexact(sums: Sequence[float], gap: float) -> str | None:
        num_tokens, num_differing = int(sums[0]), int(sums[NUM_TOTALS - 1])
        if not num_differing:
            return None
        return (
            f"actor_rollout_ref.rollout.exact=true: the rollout's log-probs of {num_differing} of {num_tokens} tokens differ from "
            f"the trainer's, by {gap:.3g} per token on average. Likely causes: the rollout's weights are not in sync, or a product "
            "of this machine's libraries depends on the other rows. Set actor_rollout_ref.rollout.exact=false to train with the "
            "usual bound"
        )

    def _is_beyond(self, bucket: Bucket) -> bool:
        if bucket.others is None:
            return False
        bound = max(self.BUCKET_FLOORS * self.floor, self.BUCKET_MULTIPLE * bucket.others)
        return bucket.gap - 3 * bucket.error > bound


class RolloutGap:
    """Distance between the rollout's probabilities and the trainer's, summed over parts of a batch.

    Also how often their experts differ, if the rollout recorded its own.
    """

    def __init__(self) -> None:
        self._has_routes = False
        self._sums: list[HostCopy] = []
        self._largest: list[HostCopy] = []

    @torch.no_grad()
    def add(
        self,
        rollout: Tensor,
        trainer: Tensor,
        mask: Tensor,
        route_mismatch: Tensor | None = None,
    ) -> None:
        """(B, R) log-probs of one part, and the share of layers with other experts."""
        chosen = mask.bool()
        distance = (rollout - trainer).abs().masked_fill(~chosen, 0.0)
        difference = (rollout.exp() - trainer.exp()).abs().masked_fill(~chosen, 0.0)
        self._has_routes = route_mismatch is not None
        rerouted = torch.zeros_like(distance) if route_mismatch is None else route_mismatch * chosen
        totals = torch.stack(
            [
                *(chosen.sum(), distance.sum(), difference.sum(), (difference**2).sum(), rerouted.sum()),
                (distance != 0).sum(),
            ]
        )
        self._sums.append(HostCopy(torch.cat([totals.double(), _bucket_sums(distance, chosen)])))
        self._largest.append(HostCopy(difference.max()))

    def restart(self) -> None:
        """Drop all parts: they are computed again."""
        self._sums.clear()
        self._largest.clear()

    def sums(self) -> list[float]:
        """The argument of `metrics` and `GapBound.problem`, summed over this rank's parts; sum them over ranks as well."""
        if not self._sums:
            return [0.0] * (NUM_TOTALS + 3 * len(BUCKETS))
        values: list[float] = torch.stack([part.read() for part in self._sums]).double().sum(0).tolist()
        return values

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """From the sums over all ranks; the largest difference is this rank's. Empty if there was no token."""
        count, distance, difference, squares, rerouted, _ = sums[:NUM_TOTALS]
        if not count:
            return {}
        mean = difference / count
        variance = (squares - count * mean**2) / (count - 1) if count > 1 else 0.0
        return {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": MaxOverRanks(
                max((float(part.read()) for part in self._largest), default=0.0)
            ),
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5,
            GAP_METRIC: distance / count,
            **({"training/route_mismatch": rerouted / count} if self._has_routes else {}),
            **{f"{BUCKET_METRIC}/{b.name}": b.gap for b in buckets_of(sums) if b.others is not None},
        }


def _bucket_sums(distance: Tensor, chosen: Tensor) -> Tensor:
    """(3 * buckets,) of each bucket the tokens, their distances, and those squared.

    Plain sums of rows, which are deterministic on GPUs too: of what is at a place or after it, of which a bucket is a difference.
    """
    numbers = (chosen.to(distance.dtype), distance, distance.square())
    place = torch.arange(chosen.shape[1], device=chosen.device)
    lengths = ((place + 1) * chosen).amax(1, keepdim=True)  # up to the last sampled token

    def sums_of(is_in: Tensor) -> Tensor:
        """(B, 3) in float64, so that differences of them are exact enough."""
        return torch.stack([(values * is_in).sum(1) for values in numbers], 1).double()

    total = torch.stack([values.sum(1) for values in numbers], 1).double()
    none = torch.zeros_like(total)
    starts = [
        torch.full_like(lengths, NUM_FIRST),
        *((quarter * lengths + 3) // 4 for quarter in (1, 2, 3)),
        lengths - 1,
    ]
    position = [total, *(sums_of(place >= start.clamp_min(NUM_FIRST)) for start in starts), none]
    begins = chosen & ~torch.nn.functional.pad(chosen, (1, 0))[:, :-1]
    turn = [total, *[none] * NUM_TURNS]
    if chosen.is_cuda or bool((begins.sum(1) > 1).any()):  # on a GPU, to ask would be to wait
        numbers_of_turns = begins.cumsum(1)
        turn = [total, *(sums_of(numbers_of_turns > number) for number in range(1, NUM_TURNS)), none]
    bounds = torch.tensor(LENGTHS, device=chosen.device)
    of_length = torch.bucketize(lengths, bounds)
    by_length = [(total * (of_length == number)).sum(0) for number in range(len(LENGTHS) + 1)]
    by_position, by_turn = ([(a - b).sum(0) for a, b in pairwise(after)] for after in (position, turn))
    return torch.cat([*by_position, *by_length, *by_turn])
