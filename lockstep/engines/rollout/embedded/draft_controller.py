"""Decides how many draft tokens pay, from measured step times and measured acceptance.

A decode step of N rows takes `plain(N)` seconds and gives N tokens. One that also computes d draft tokens takes
`drafted(N + d)` seconds and gives N plus the drafts that are accepted: the k-th draft of a row with probability p^k, where p is
the row's acceptance. The likeliest drafts come first; as many are computed as give the most tokens per second, and none if plain
steps give more. The choice depends on times, the sampled tokens do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
PRIOR_WEIGHT = 4.0
"""The prior of a row's acceptance counts as this many tokens."""
MAX_ACCEPTANCE = 0.98
USELESS_ACCEPTANCE = 0.05
USELESS_TOKENS = 4096
"""Draft tokens in a row with less than that acceptance after which the history is dropped."""


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

    def measure(self, size: int, seconds: float) -> None:
        if self.num_measured >= 2:  # a pause of the machine counts little
            seconds = min(seconds, MAX_SURPRISE * float(self.predict(size)))
        self.num_measured += 1
        self._weight = self.decay * self._weight + 1
        new = (size, seconds, size * size, size * seconds)
        self._sums = [self.decay * old + x for old, x in zip(self._sums, new)]

    def predict(self, size: np.ndarray | float) -> np.ndarray | float:
        assert self.num_measured, "nothing was measured"
        x, y, xx, xy = (total / self._weight for total in self._sums)
        prior = self.PRIOR_SLOPE * y / x
        variance = xx - x * x
        trust = 1e-3 * x * x  # weight of the prior
        slope = max(0.0, (xy - x * y + trust * prior) / (variance + trust))
        return np.maximum(y + slope * (size - x), 0.1 * y)


@dataclass
class Acceptance:
    """Of draft tokens: how many were accepted of those that were sampled with all earlier ones accepted."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, num_drafted: int, num_accepted: int, decay: float) -> None:
        self.accepted = decay * self.accepted + num_accepted
        self.tried = decay * self.tried + num_accepted + (num_accepted < num_drafted)

    def rate(self, prior: float) -> float:
        return min(MAX_ACCEPTANCE, (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT))


class DraftController:
    """
    max_draft_tokens: most drafts of a row.
    max_tokens:       most tokens of a step, of all rows.
    plain, drafted:   seconds of steps without drafts by rows, and of steps with drafts by tokens.
    overall:          acceptance of all rows.
    coverage:         share of the rows that had a draft when asked.
    """

    def __init__(self, max_draft_tokens: int, max_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.max_tokens = max_tokens
        self.plain = LinearCost()
        self.drafted = LinearCost()
        self.overall = Acceptance()
        self.coverage = 1.0
        self._plain_rows = 0  # of the last window without drafts
        self._num_plain = 0  # windows since the last step with drafts or probe
        self._num_skipped = 0
        self._num_to_skip = 0  # windows before drafts are looked for again
        self._paid = False  # whether the last window had drafts that were expected to pay
        self._useless = Acceptance()

    def measure_plain(self, num_rows: int, seconds: float) -> None:
        """The time of one step without drafts."""
        self.plain.measure(num_rows, seconds)
        self._plain_rows = num_rows
        self._num_plain += 1
        self._num_skipped += 1
        self._paid = False

    def measure_drafted(self, num_tokens: int, seconds: float) -> None:
        """The time of one step with drafts, finding them included."""
        self.drafted.measure(num_tokens, seconds)
        self._num_plain = 0

    def note(self, row: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """What became of the drafts of a row."""
        row.add(num_drafted, num_accepted, decay=0.9)
        self.overall.add(num_drafted, num_accepted, decay=0.998)
        self._useless.add(num_drafted, num_accepted, decay=1.0)

    def note_search(self, num_rows: int, num_with_draft: int, *, pays: bool, is_probe: bool = False) -> None:
        """Drafts were looked for. If none pay, the next search waits, longer each time."""
        if num_rows:
            self.coverage = 0.95 * self.coverage + 0.05 * num_with_draft / num_rows
        self._num_plain = self._num_skipped = 0
        self._num_to_skip = 0 if pays else min(16, 2 * self._num_to_skip + 1)
        self._paid = pays and not is_probe

    def begin(self) -> None:
        """New requests: earlier ones say little about how many of them have drafts."""
        self.coverage = 1.0
        self._num_skipped = self._num_to_skip = 0
        self._paid = False

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
        """Whether some rows of the next step are drafted although it is not expected to pay."""
        return self._num_plain >= PROBE_INTERVAL and num_rows + PROBE_ROWS * PROBE_TOKENS <= self.max_tokens

    def is_open(self, num_rows: int) -> bool:
        """Whether a step of as many rows may have drafts at all, and the last search without success is long enough ago."""
        # plain steps of about this size must be known
        if not self._plain_rows / 2 <= num_rows <= 1.5 * self._plain_rows or num_rows >= self.max_tokens:
            return False
        return self._num_skipped >= self._num_to_skip

    def may_pay(self, rows: Sequence[Acceptance], num_rows: int) -> bool:
        """Whether drafts are worth looking for: they would pay if as many as usual of these rows had a draft of full length.

        num_rows: of the step, with those that have no history.
        """
        if not self.is_open(num_rows):
            return False
        if self._paid:  # nothing that decodes is in flight, and a search takes hardly longer than what follows
            return True
        rates_N = self._rates(rows)
        lengths_D = np.unique(np.minimum([1, 2, 4, 8, 16, 32, 64], self.max_draft_tokens))
        lengths_D = lengths_D[(num_rows + len(rows) * lengths_D <= self.max_tokens) | (lengths_D == 1)]
        gains_ND = (rates_N * (1 - rates_N ** lengths_D[:, None])).T / (1 - rates_N)[:, None]
        gains_D = self.coverage * gains_ND.sum(0)
        speedups_D = self._speedup(num_rows, gains_D, self.coverage * len(rows) * lengths_D)
        return bool(speedups_D.max() > MIN_SPEEDUP)

    def lengths(self, rows: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        """How many of each row's `available` drafts to compute."""
        num_rows = len(rows)
        most = max(available, default=0)
        if most == 0 or num_rows >= self.max_tokens:
            return [0] * num_rows
        powers_K = np.arange(1, most + 1)
        chances_NK = np.where(powers_K <= np.array(available)[:, None], self._rates(rows)[:, None] ** powers_K, 0.0)
        order = np.argsort(-chances_NK, axis=None, kind="stable")
        order = order[: min(sum(available), self.max_tokens - num_rows)]
        gains = np.cumsum(chances_NK.flatten()[order])
        speedups = self._speedup(num_rows, gains, np.arange(1, len(order) + 1))
        best = int(speedups.argmax())
        if speedups[best] <= MIN_SPEEDUP:
            return [0] * num_rows
        chosen: list[int] = np.bincount(order[: best + 1] // most, minlength=num_rows).tolist()
        return chosen

    def saved_seconds(self, num_rows: int, num_sampled: int, seconds: float) -> float:
        """What plain steps would have taken for as many tokens, minus what the step with drafts took."""
        return float(self.plain.predict(num_rows)) * num_sampled / num_rows - seconds

    def _rates(self, rows: Sequence[Acceptance]) -> np.ndarray:
        prior = self.prior
        return np.array([row.rate(prior) for row in rows])

    def _speedup(self, num_rows: int, gains: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """Tokens per second with these drafts and gains, over those without."""
        plain = self.plain.predict(num_rows)
        hoped = plain * (1 + 0.1 * num_drafts / num_rows)  # so that it is tried
        seconds = self.drafted.predict(num_rows + num_drafts) if self.drafted.num_measured else hoped
        speedups: np.ndarray = (1 + gains / num_rows) * plain / seconds
        return speedups
