"""The texts on the device from which decoding sequences draft: their own, their siblings', and earlier answers to the same prompt.

    | slot 0: START x 16, tokens so far, free | slot 1 | ... | START x 16, an ended answer | START x 16, another one | ... free |

Each slot's text grows on the device. Ended answers are uploaded once per generation, when a sequence with their prompt decodes. If
there is no room for more and a quarter of it is of other prompts, all are dropped and those of the current prompts uploaded again.
"""

from collections.abc import Iterable, Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.history import AnswerHistory
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.kernels.draft_rows import kind_priors
from lockstep.kernels.draft_search import LIVE, MAX_SEGMENTS
from lockstep.kernels.draft_settings import MAX_MATCH, START
from lockstep.utils.device import to_device

MAX_ENDED_TOKENS = 16 << 20
"""Room for ended answers: 64 MiB."""
MAX_LIVE = 32
"""Most siblings that a sequence drafts from, with itself."""


class DraftTexts:
    """
    width:      places of a slot's text.
    tokens:     all texts.
    lengths:    (slots + 1,) tokens of each slot's text.
    segments:   (slots + 1, MAX_SEGMENTS, 2) what each slot drafts from, see `find_drafts`.
    row_rates:  (slots + 1, 2) drafts that were right and tried lately, of each slot's sequence.
    kind_rates: (kinds, 2) the same by kind of match, drawn to `priors`.
    """

    def __init__(
        self,
        history: AnswerHistory,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
        max_ended: int = MAX_ENDED_TOKENS,
    ) -> None:
        self.width = MAX_MATCH + max_model_len
        self.tokens = torch.full(((num_slots + 1) * self.width + max_ended,), START, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.segments = torch.zeros(num_slots + 1, MAX_SEGMENTS, 2, dtype=torch.int64, device=device)
        self._host_segments = np.zeros(tuple(self.segments.shape), np.int64)
        self.row_rates = torch.zeros(num_slots + 1, 2, device=device)
        self.priors = kind_priors(device)
        self.kind_rates = self.priors.clone()
        self._history = history
        self._first_ended = self._next_ended = (num_slots + 1) * self.width
        self._sequences: dict[int, tuple[Sequence, int]] = {}  # by slot, with how often it was preempted
        self._ended: dict[int, tuple[np.ndarray, int]] = {}  # by identity of the answer: it, and its place
        self._known: dict[bytes, Rows[np.ndarray]] = {}  # answers of the prompts that have segments
        self._seen_version = -1

    def clear(self) -> None:
        """Forget all texts."""
        self._sequences.clear()
        self._known.clear()
        self._drop_ended()

    def update(self, sequences: Rows[Sequence], slots: Rows[int]) -> None:
        """Before a launch with these sequences, whose tokens are all known if they are new in their slots."""
        changed: set[bytes] = set()
        new = []
        for sequence, slot in zip(sequences, slots):
            name = sequence, sequence.num_preempted
            if (old := self._sequences.get(slot)) != name:
                self._sequences[slot] = name
                new.append((sequence, slot))
                changed |= {sequence.prompt_key} if old is None else {sequence.prompt_key, old[0].prompt_key}
        if self._seen_version != self._history.version:
            self._seen_version = self._history.version
            running = {sequence.prompt_key for sequence, _ in self._sequences.values()}
            changed |= {key for key in running if self._known.get(key) is not self._history.answers(key)}
        if new:
            self._begin(new)
        if changed:
            self._write_segments(changed)

    def _begin(self, new: list[tuple[Sequence, int]]) -> None:
        slots = self._upload([slot for _, slot in new])
        answers = [sequence.tokens[sequence.num_prompt :] for sequence, _ in new]
        self.lengths.index_copy_(0, slots, self._upload([len(answer) for answer in answers], np.int32))
        self.row_rates.index_fill_(0, slots, 0.0)
        for (_, slot), answer in zip(new, answers):
            if answer:  # a sequence that was preempted
                first = slot * self.width + MAX_MATCH
                self.tokens[first : first + len(answer)] = self._upload(answer, np.int32)

    def _write_segments(self, keys: set[bytes]) -> None:
        """Of all running sequences with these prompts."""
        slots_of: dict[bytes, list[int]] = {}
        for slot, (sequence, num_preempted) in self._sequences.items():
            if sequence.stop_reason is None and sequence.num_preempted == num_preempted:
                slots_of.setdefault(sequence.prompt_key, []).append(slot)
        if not self._upload_answers(keys & slots_of.keys()) and self._is_stale(slots_of):
            self._drop_ended()
            keys = set(slots_of)
            self._upload_answers(keys)
        self._known = {key: self._history.answers(key) for key in slots_of}
        rows: list[int] = []
        for key in keys & slots_of.keys():
            self._set_segments(key, slots_of[key])
            rows += slots_of[key]
        if rows:
            self.segments.index_copy_(0, self._upload(rows), self._upload(self._host_segments[rows]))

    def _set_segments(self, key: bytes, slots: list[int]) -> None:
        """On the host: the latest ended answers, then running sequences with the same prompt, last the own one."""
        ended = [self._ended[id(a)] for a in self._known[key] if id(a) in self._ended][MAX_LIVE - MAX_SEGMENTS :]
        places = [(place, place + len(answer)) for answer, place in ended]
        places += [(slot, LIVE) for slot in slots[:MAX_LIVE]]
        common, first = np.array(places), len(ended)
        for number, slot in enumerate(slots):
            segments = self._host_segments[slot]
            segments[: len(common)] = common
            segments[len(common) :] = 0
            if number < MAX_LIVE:
                segments[first + number] = common[-1]
            segments[len(common) - 1] = slot, LIVE

    def _upload_answers(self, keys: Iterable[bytes]) -> bool:
        """Those that are not there yet, as far as there is room; whether all are there."""
        missing = [a for key in keys for a in self._history.answers(key) if id(a) not in self._ended]
        stops = self._next_ended + np.cumsum([MAX_MATCH + len(answer) for answer in missing])
        fitting = missing[: int(np.searchsorted(stops, len(self.tokens), side="right"))]
        if fitting:
            before = np.full(MAX_MATCH, START, np.int32)
            first, self._next_ended = self._next_ended, int(stops[len(fitting) - 1])
            texts = np.concatenate([part for answer in fitting for part in (before, answer)])
            self.tokens[first : self._next_ended] = self._upload(texts, np.int32)
            self._ended |= {id(a): (a, int(stop) - len(a)) for a, stop in zip(fitting, stops)}
        return len(fitting) == len(missing)

    def _is_stale(self, keys: Iterable[bytes]) -> bool:
        """Whether answers to other prompts take a quarter of the room, so that it is worth to upload the rest again."""
        wanted = {id(answer) for key in keys for answer in self._history.answers(key)}
        stale = [len(answer) + MAX_MATCH for name, (answer, _) in self._ended.items() if name not in wanted]
        return 4 * sum(stale) >= len(self.tokens) - self._first_ended

    def _drop_ended(self) -> None:
        self._ended.clear()
        self._next_ended = self._first_ended

    def _upload(self, values: object, dtype: type = np.int64) -> Tensor:
        return to_device(torch.from_numpy(np.array(values, dtype=dtype)), self.tokens.device)
