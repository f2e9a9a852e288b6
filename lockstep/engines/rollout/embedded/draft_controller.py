"""Decides how many draft tokens pay, from measured step times and measured acceptance.

A decode step of N rows takes `plain(N)` seconds and gives N tokens. One with drafts computes S tokens, one of a few sizes, takes
`drafted(S)` seconds and gives N plus those of its S - N drafts that are accepted: the k-th draft of a row with probability p^k,
where p is the row's acceptance. The likeliest drafts come first. The size that gives the most tokens per second is chosen, and none
if plain steps give more. The choice depends on times, the sampled tokens do not.

On a CPU the rows' drafts are known when it is decided how many to compute (`lengths`). On CUDA the device finds them, and says how
many drafts are how likely: the curve (`size_for`).

The first step of a size may need a CUDA graph. It is captured once the steps since the last capture would have gained as much time
by that size as a capture takes; until then the best of the sizes at hand is taken. So captures cost at most about as much time as
they can gain.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.kernels.draft_settings import MAX_ACCEPTANCE, ROW_WEIGHT

STEPS_BETWEEN_SEARCHES = 8
"""Plain steps of a window for which no drafts were computed although they would pay."""

MAX_SURPRISE = 1.5
"""A step that takes longer than this many times its expected time counts as that."""
MIN_SPEEDUP = 1.05
"""Expected gain below which nothing is drafted."""
PROBE_INTERVAL = 128
"""Plain windows after which some rows are drafted although it is not expected to pay, to measure again."""
PROBE_ROWS = 4
"""Rows that are drafted then."""
PROBE_TOKENS = 4
"""Drafts of each of them."""
PRIOR_ACCEPTANCE = 0.6
LINE_WEIGHT = 1.0
"""The line through the times of all sizes counts as this many measurements of a size."""
MAX_CAPTURE_S = 0.5
"""A first step that takes longer also compiles kernels, once for all sizes."""
MAX_TRIED_SIZES = 16
"""Sizes for which the gain is estimated before drafts are looked for."""
CALIBRATION_SHARE = 0.1
"""Share of a window in what is known of the curves' errors."""
FORGETTING_SHARE = 0.01
"""Share of that which is forgotten per decision against drafts, so that they are tried again."""
USELESS_ACCEPTANCE = 0.05
USELESS_TOKENS = 4096
"""Draft tokens in a row with less than that acceptance after which the history is dropped."""


def graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """Tokens of the steps for which a CUDA graph is captured: two sizes per power of two, up to `max_tokens`."""
    sizes = [size for power in range(3, max_tokens.bit_length()) for size in (1 << power, 3 << power - 1)]
    return (*(size for size in sizes if size < max_tokens), max_tokens)


class LinearCost:
    """Seconds of a step as a line over its size: least squares with exponentially decaying weights.

    decay: of the weights per measurement.
    Until sizes differ, the line has a slope of `PRIOR_SLOPE` times the mean seconds per mean size.
    """

    PRIOR_SLOPE = 0.25

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.num_measured = 0
        self._weight = 0.0
        self._sums = [0.0] * 4  # of size, seconds, size^2, size * seconds
        self._line = 0.0, 0.0, 0.0  # offset, slope, least seconds

    def measure(self, size: int, seconds: float) -> None:
        if self.num_measured >= 2:  # a pause of the machine counts little
            seconds = min(seconds, MAX_SURPRISE * float(self.predict(size)))
        self.num_measured += 1
        self._weight = self.decay * self._weight + 1
        new = (size, seconds, size * size, size * seconds)
        self._sums = [self.decay * old + x for old, x in zip(self._sums, new)]
        x, y, xx, xy = (total / self._weight for total in self._sums)
        prior = self.PRIOR_SLOPE * y / x
        variance = xx - x * x
        trust = 1e-3 * x * x  # weight of the prior
        slope = max(0.0, (xy - x * y + trust * prior) / (variance + trust))
        self._line = y - slope * x, slope, 0.1 * y

    def predict(self, size: np.ndarray | float) -> np.ndarray | float:
        assert self.num_measured, "nothing was measured"
        offset, slope, least = self._line
        return np.maximum(offset + slope * size, least)


class SizeCost:
    """Seconds of steps of a few sizes: each size's own mean, drawn to a line through all of them. Weights decay as the line's."""

    def __init__(self) -> None:
        self.line = LinearCost()
        self._means: dict[int, tuple[float, float]] = {}  # of each size: seconds, weight

    @property
    def num_measured(self) -> int:
        return self.line.num_measured

    def measure(self, size: int, seconds: float) -> None:
        if self.num_measured >= 2:
            seconds = min(seconds, MAX_SURPRISE * float(self.predict(np.array([size]))[0]))
        self.line.measure(size, seconds)
        decayed = {each: (mean, self.line.decay * weight) for each, (mean, weight) in self._means.items()}
        mean, weight = decayed.get(size, (0.0, 0.0))
        decayed[size] = (mean * weight + seconds) / (weight + 1), weight + 1
        self._means = {each: (mean, weight) for each, (mean, weight) in decayed.items() if weight > 0.01}

    def predict(self, sizes: np.ndarray) -> np.ndarray:
        seconds = np.array(self.line.predict(sizes))
        for place, size in enumerate(sizes.tolist()):
            if size in self._means:
                mean, weight = self._means[size]
                seconds[place] += (mean - seconds[place]) * weight / (weight + LINE_WEIGHT)
        return seconds


@dataclass(slots=True)
class Acceptance:
    """Of draft tokens: how many were accepted of those that were sampled with all earlier ones accepted."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, num_accepted: int, num_failed: int, decay: float) -> None:
        """num_failed: rows whose drafts were not all accepted."""
        self.accepted = decay * self.accepted + num_accepted
        self.tried = decay * self.tried + num_accepted + num_failed

    def rate(self, prior: float) -> float:
        return min(MAX_ACCEPTANCE, (self.accepted + ROW_WEIGHT * prior) / (self.tried + ROW_WEIGHT))


class DraftController:
    """
    max_draft_tokens: most drafts of a row.
    sizes:            numbers of tokens that a step may have, of all rows, ascending. A step with fewer takes as long as the next.
    plain, drafted:   seconds of steps without drafts by rows, and of steps with drafts by size.
    overall:          acceptance of all rows.
    coverage:         share of the rows that had a draft when asked.
    capture_s:        seconds that the first step of a size takes longer; 0 until that was seen.
    has_paid:         whether the last window had drafts that were expected to pay. Then the next search needs no estimate: nothing
                      that decodes is in flight, and it takes hardly longer than what follows.
    is_unsure:        whether the next plain window should be short: drafts may pay, but something is not known yet.
    waits:            whether drafts would pay if the best size were captured, but nothing is drafted until that pays, too.
    """

    def __init__(self, max_draft_tokens: int, sizes: Sequence[int]) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.plain = LinearCost()
        self.drafted = SizeCost()
        self.overall = Acceptance()
        self.coverage = 1.0
        self.capture_s = 0.0
        self.waits = False
        self.has_paid = False
        self._plain_rows = 0  # of the last window without drafts
        self._num_plain = 0  # windows since the last step with drafts or probe
        self._num_skipped = 0
        self._num_to_skip = 0  # windows before drafts are looked for again
        self._curve: np.ndarray | None = None
        self._expected = 0.0  # right drafts per row and step, when drafts were last chosen from a curve
        self._calibration = 1.0  # of the curves: drafts that were right, over those that were expected
        self._is_fresh = True  # nothing was decided from a curve since `begin`
        self.is_unsure = True
        self._useless = Acceptance()
        self.use_sizes(sizes)

    def use_sizes(self, sizes: Sequence[int]) -> None:
        """Steps have these sizes from now on, none of which was computed."""
        self.sizes = tuple(sizes)
        self._sizes_S = np.array(self.sizes, dtype=np.int64)
        self._ready: set[int] = set()  # sizes that were computed
        self._missed_s = np.zeros(len(self.sizes))  # what each size would have saved since the last capture

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step."""
        return self.sizes[-1] if self.sizes else 0

    def lower_tokens(self, max_tokens: int) -> None:
        """Steps have at most this many tokens from now on, and no graphs yet."""
        self.use_sizes([size for size in self.sizes if size <= max_tokens])

    def forget_graphs(self) -> None:
        """All graphs are gone: no size is at hand."""
        self.use_sizes(self.sizes)

    def measure_plain(self, num_rows: int, seconds: float) -> None:
        """The time of one step without drafts."""
        self.plain.measure(num_rows, seconds)
        self._plain_rows = num_rows
        self._num_plain += 1
        self._num_skipped += 1
        self.has_paid = False

    def note_step(self, num_tokens: int, seconds: float | None) -> None:
        """A step with drafts, and its time with that of finding them; None if it says nothing about other steps."""
        size = self.note_size(num_tokens)
        self._num_plain = 0
        if seconds is not None:
            self.drafted.measure(size, seconds)

    def note_size(self, num_tokens: int) -> int:
        """A step of `num_tokens` is computed, so that its size is at hand. Returns the size."""
        size = self._size_of(num_tokens)
        if size not in self._ready:
            self._ready.add(size)
            self._missed_s[:] = 0.0  # compared with other sizes from now on
        return size

    def note_capture(self, seconds: float) -> None:
        """What the first step of a size took longer. The least counts: others also compiled kernels."""
        self.capture_s = min(self.capture_s or MAX_CAPTURE_S, seconds)

    def note_accepted(self, num_rows: int, num_accepted: int, num_failed: int) -> None:
        """What became of the drafts of all rows of a step that had some."""
        self.overall.add(num_accepted, num_failed, decay=0.998**num_rows)
        self._useless.add(num_accepted, num_failed, decay=1.0)

    def note_search(self, num_rows: int, num_with_draft: int, *, pays: bool, is_probe: bool = False) -> None:
        """Drafts were looked for. If none would pay, the next search waits, longer each time."""
        if num_rows:
            self.coverage = 0.95 * self.coverage + 0.05 * num_with_draft / num_rows
            self._num_plain = 0
        self._num_skipped = 0
        waits = self.waits and not is_probe
        self._num_to_skip = 0 if pays or waits else min(16, 2 * self._num_to_skip + 1)
        self.has_paid = pays and not is_probe

    def begin(self) -> None:
        """New requests: earlier ones say little about how many of them have drafts."""
        self.coverage = 1.0
        self._num_skipped = self._num_to_skip = 0
        self.has_paid = self.waits = False
        self._is_fresh = True
        self._curve = None

    def is_useless(self) -> bool:
        """Whether drafts were hardly ever accepted for long; asks again from now on."""
        if self._useless.tried < USELESS_TOKENS:
            return False
        rate = self._useless.accepted / self._useless.tried
        self._useless = Acceptance()
        return rate < USELESS_ACCEPTANCE

    @property
    def prior(self) -> float:
        """The acceptance of a row of which nothing is known."""
        return self.overall.rate(PRIOR_ACCEPTANCE)

    def is_probe(self, num_rows: int) -> bool:
        """Whether some rows of the next step are drafted although it is not expected to pay: no graph is captured for it but
        the first one."""
        num_tokens = num_rows + PROBE_ROWS * PROBE_TOKENS
        if self._num_plain < PROBE_INTERVAL or num_tokens > self.max_tokens:
            return False
        return not self.capture_s or not self._ready or self._size_of(num_tokens) in self._ready

    def is_open(self, num_rows: int) -> bool:
        """Whether a step of as many rows may have drafts at all, and the last search without success is long enough ago."""
        return self._knows_plain(num_rows) and num_rows < self.max_tokens and self._num_skipped >= self._num_to_skip

    def may_pay(self, rows: Sequence[Acceptance], num_rows: int) -> bool:
        """Whether drafts are worth looking for: they would pay if as many as usual of these rows had a draft of full length.

        num_rows: of the step, with those that have no history.
        """
        if not self.is_open(num_rows):
            return False
        num_drafting = self.coverage * len(rows)
        sizes_S = self._sizes(num_rows, int(num_drafting * self.max_draft_tokens))
        sizes_S = sizes_S[:: -(-len(sizes_S) // MAX_TRIED_SIZES) or 1]
        if not len(sizes_S) or not num_drafting:
            return False
        lengths_S = np.minimum((sizes_S - num_rows) / num_drafting, self.max_draft_tokens)
        rates_N1 = self._rates(rows)[:, None]
        gains_S = self.coverage * (rates_N1 * (1 - rates_N1**lengths_S) / (1 - rates_N1)).sum(0)
        return bool(self._speedup(num_rows, gains_S, sizes_S).max() > MIN_SPEEDUP)

    def survey_is_due(self, num_rows: int) -> bool:
        """Whether to find out, with the next plain window, what drafts would give."""
        return num_rows < self.max_tokens and self._num_skipped >= self._num_to_skip

    def note_curve(self, curve: np.ndarray) -> None:
        """What the decoder expects of the drafts that it finds: numbers of draft tokens, the likeliest first, each followed by how
        many of them are expected to be right; and the number of rows that they are for."""
        self._curve = curve if curve[-1] else None

    def note_expected(self, num_rows: int, num_accepted: int) -> None:
        """What became of drafts that were chosen from a curve. num_rows: of all steps."""
        if num_rows and self._expected:
            ratio = min(num_accepted / num_rows / self._expected, MAX_SURPRISE)
            self._calibration += CALIBRATION_SHARE * (ratio - self._calibration)

    def size_for(self, num_rows: int, num_steps: int) -> int:
        """Tokens of each of the next `num_steps` steps, for which the decoder finds drafts; 0 for plain steps."""
        self.waits = False
        if not num_rows:  # all are covered by what is in flight
            return 0
        fits = num_rows < self.max_tokens
        knows_plain = self._knows_plain(num_rows)
        self.is_unsure = fits and (self._is_fresh or (self._curve is not None and not knows_plain))
        if self._curve is None or not fits or not knows_plain:
            return 0
        self.is_unsure = self._is_fresh = False
        curve = self._curve[:-1] * num_rows / self._curve[-1]
        num_drafts, gains = curve[::2], curve[1::2]
        sizes_S = self._sizes(num_rows, int(num_drafts[-1]))
        if len(sizes_S):
            gains_S = np.interp(sizes_S - num_rows, num_drafts, gains)
            place = self._choose(num_rows, self._calibration * gains_S, sizes_S, num_steps)
            if place is not None:
                self._num_to_skip = 0
            else:
                place = self._probe(sizes_S)
            if place is not None:
                self._expected = float(gains_S[place]) / num_rows
                return int(sizes_S[place])
        if not self.waits:
            self._calibration += FORGETTING_SHARE * (1 - self._calibration)
        self._curve = None
        self.note_search(0, 0, pays=False)
        return 0

    def lengths(self, rows: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        """How many of each row's `available` drafts to compute."""
        self.waits = False
        num_rows = len(rows)
        most, num_available = max(available, default=0), sum(available)
        sizes_S = self._sizes(num_rows, num_available)
        if not len(sizes_S):
            return [0] * num_rows
        chances_NK = np.repeat(self._rates(rows)[:, None], most, 1).cumprod(1)
        chances_NK[np.arange(most) >= np.array(available)[:, None]] = 0.0
        num_drafts_S = np.minimum(sizes_S - num_rows, num_available)
        likeliest = np.argpartition(-chances_NK, num_drafts_S[-1] - 1, axis=None)[: num_drafts_S[-1]]
        order = likeliest[np.argsort(-chances_NK.flat[likeliest])]
        gains = np.cumsum(chances_NK.flat[order])
        place = self._choose(num_rows, gains[num_drafts_S - 1], sizes_S)
        if place is None:
            return [0] * num_rows
        chosen: list[int] = np.bincount(order[: num_drafts_S[place]] // most, minlength=num_rows).tolist()
        return chosen

    def saved_seconds(self, num_rows: int, num_sampled: int, seconds: float) -> float:
        """What plain steps would have taken for as many tokens, minus what the step with drafts took."""
        return float(self.plain.predict(num_rows)) * num_sampled / num_rows - seconds

    def _knows_plain(self, num_rows: int) -> bool:
        """Whether plain steps of about this size were measured."""
        return self._plain_rows / 2 <= num_rows <= 1.5 * self._plain_rows

    def _rates(self, rows: Sequence[Acceptance]) -> np.ndarray:
        accepted = np.array([row.accepted for row in rows])
        tried = np.array([row.tried for row in rows])
        rates: np.ndarray = (accepted + ROW_WEIGHT * self.prior) / (tried + ROW_WEIGHT)
        return np.minimum(rates, MAX_ACCEPTANCE)

    def _size_of(self, num_tokens: int) -> int:
        """The size of a step of `num_tokens`."""
        return self.sizes[bisect_left(self.sizes, num_tokens)]

    def _sizes(self, num_rows: int, num_available: int) -> np.ndarray:
        """Those of steps with 1 to `num_available` drafts."""
        first = bisect_left(self.sizes, num_rows + 1)
        last = bisect_left(self.sizes, num_rows + num_available, lo=first)
        return self._sizes_S[first : last + 1] if num_available > 0 else self._sizes_S[:0]

    def _probe(self, sizes_S: np.ndarray) -> int | None:
        """The place of the smallest size at hand, after many plain windows; else None."""
        if self._num_plain < PROBE_INTERVAL:
            return None
        return next((place for place, size in enumerate(sizes_S.tolist()) if size in self._ready), None)

    def _choose(self, num_rows: int, gains_S: np.ndarray, sizes_S: np.ndarray, num_steps: int = 1) -> int | None:
        """The place of the best size, or of the best one at hand if no capture pays yet; None for a plain step.

        num_steps: that will have the size.
        """
        speedups_S = self._speedup(num_rows, gains_S, sizes_S)
        if speedups_S.max() <= MIN_SPEEDUP:
            return None
        is_ready_S = np.array([size in self._ready for size in sizes_S.tolist()])
        ready_S = np.where(is_ready_S, speedups_S, 0.0)
        at_hand = int(ready_S.argmax()) if ready_S.max() > MIN_SPEEDUP else None
        # what each size that is not at hand would have saved, of the time of as many plain steps
        plain_s = float(self.plain.predict(num_rows))
        if at_hand is None:
            num_plain, share = float(STEPS_BETWEEN_SEARCHES), 1.0
        else:
            num_plain, share = num_steps * (1 + gains_S[at_hand] / num_rows), 1 / ready_S[at_hand]
        saved_S = num_plain * plain_s * np.where(is_ready_S, 0.0, share - 1 / speedups_S)
        first = int(np.searchsorted(self._sizes_S, sizes_S[0]))
        missed_S = self._missed_s[first : first + len(sizes_S)]
        missed_S += saved_S.clip(0.0)
        due_S = np.where((missed_S >= self.capture_s) & (saved_S > 0), speedups_S, 0.0)
        if due_S.max() > MIN_SPEEDUP:
            return int(due_S.argmax())
        self.waits = at_hand is None
        return at_hand

    def _speedup(self, num_rows: int, gains_S: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
        """Tokens per second of steps of these sizes with these gains, over those of plain steps."""
        plain = self.plain.predict(num_rows)
        hoped = plain * (1 + 0.1 * (sizes_S - num_rows) / num_rows)  # so that it is tried
        seconds = self.drafted.predict(sizes_S) if self.drafted.num_measured else hoped
        speedups: np.ndarray = (1 + gains_S / num_rows) * plain / seconds
        return speedups
