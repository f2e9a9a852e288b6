"""How long the answers to each prompt were: what the scheduler expects of the next one."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.engines.rollout.embedded.history import KEY_BYTES

MAX_PROMPTS = 65_536
"""Prompts that are remembered, some 12 MB; the least recently answered is forgotten first."""
NUM_LATEST = 16
"""Answers of a prompt in its mean, roughly: lengths change as the policy learns."""
NUM_LATEST_OF_ALL = 1024
"""The same for the mean over all prompts."""


@dataclass(slots=True)
class _Mean:
    """A mean in which each value after the first `num_latest` has the weight 1 / `num_latest`."""

    num_latest: int
    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.num_latest)
        self.value += (value - self.value) / self.count


class AnswerLengths:
    """Mean lengths by the key of the prompt (`history.prompt_key`), in tokens."""

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self.max_prompts = max_prompts
        self._prompts: OrderedDict[bytes, _Mean] = OrderedDict()  # least recently answered first
        self._all = _Mean(NUM_LATEST_OF_ALL)

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, key: bytes, length: int) -> None:
        """The length of an answer that ended by itself or at its limit."""
        self._prompts.setdefault(key, _Mean(NUM_LATEST)).add(length)
        self._prompts.move_to_end(key)
        self._all.add(length)
        if len(self._prompts) > self.max_prompts:
            self._prompts.popitem(last=False)

    def expected(self, key: bytes) -> float:
        """The mean of the prompt's answers, or of all answers if it has none; 0 before the first one."""
        known = self._prompts.get(key)
        return self._all.value if known is None else known.value

    def state_dict(self) -> dict[str, Any]:
        """As plain data for `utils.state_file`."""
        means = [self._all, *self._prompts.values()]
        return {
            "keys": b"".join(self._prompts),
            "counts": np.array([mean.count for mean in means], dtype=np.int64),
            "means": np.array([mean.value for mean in means], dtype=np.float64),
        }

    def load_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Replace all by what `state_dict` gave; of a prompt that several know, and over all prompts, the last one counts."""
        self._prompts.clear()
        for state in states:
            keys = [state["keys"][i : i + KEY_BYTES] for i in range(0, len(state["keys"]), KEY_BYTES)]
            (count, mean), *pairs = zip(state["counts"].tolist(), state["means"].tolist())
            self._all = _Mean(NUM_LATEST_OF_ALL, count, mean)
            for key, pair in zip(keys, pairs, strict=True):
                self._prompts[key] = _Mean(NUM_LATEST, *pair)
                self._prompts.move_to_end(key)
        while len(self._prompts) > self.max_prompts:
            self._prompts.popitem(last=False)
