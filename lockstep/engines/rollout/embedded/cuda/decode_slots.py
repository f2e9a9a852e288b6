"""Device-side state of the decoding sequences, in buffers that never move because CUDA graphs replay on them.

Each decoding sequence has a slot: next token, position, seed, limits and sampling parameters (see `kernels/sampling.py`), its
block table and the number of its state slot. Each row of a decode step has a slot id; rows that pad the batch use the padding
slot, which is never active.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.kernels import sampling
from lockstep.utils.device import to_device


class DecodeSlots:
    """
    slot_state, slot_options: (slots + 1, fields) of each slot's sequence.
    tables:                   (slots + 1, width) block tables.
    state_slots:              (slots + 1,) state slots; unused if the model has no states.
    rope_deltas:              (slots + 1,) what rotary positions have more than `positions`; None if there are no images.
    slot_ids:                 (R,) slot of each row of a step.
    tokens, positions:        (1, R) model inputs; cache_slots (R,) where their keys and values go.
    sampled, log_probs:       (steps, slots + 1) outputs; `step` is the current one.
    """

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        table_width: int,
        max_stop_ids: int,
        num_steps: int,
        device: torch.device,
        takes_images: bool = False,
    ) -> None:
        self.device = device
        self.padding_slot = num_slots
        self.max_stop_ids = max_stop_ids

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slot_state = zeros(num_slots + 1, sampling.STOPS + max_stop_ids)
        self.slot_options = zeros(num_slots + 1, sampling.NUM_OPTIONS, dtype=torch.float32)
        self.tables = zeros(num_slots + 1, table_width, dtype=torch.int32)
        self.state_slots = zeros(num_slots + 1)
        self.rope_deltas = zeros(num_slots + 1) if takes_images else None
        self.slot_ids = zeros(num_rows, dtype=torch.int32)
        self.tokens, self.positions, self.cache_slots = zeros(1, num_rows), zeros(1, num_rows), zeros(num_rows)
        self.step = zeros(1, dtype=torch.int32)
        self.sampled = zeros(num_steps, num_slots + 1, dtype=torch.int32)
        self.log_probs = zeros(num_steps, num_slots + 1, dtype=torch.float32)
        self._host_tables = np.zeros((num_slots + 1, table_width), dtype=np.int32)
        # blocks in each row of it, and the last one; 0 for a sequence that is new in its slot
        self._table_lengths = [0] * (num_slots + 1)
        self._last_blocks = [0] * (num_slots + 1)
        self._assigned: dict[tuple[int, int], tuple[int, Sequence]] = {}
        self._outdated: set[int] = set()  # slots whose state is not that of their sequence
        self._free = list(range(num_slots))

    def clear(self) -> None:
        """Free all slots."""
        self._free += [slot for slot, _ in self._assigned.values()]
        self._assigned.clear()

    def assign(self, sequences: Rows[Sequence]) -> list[int]:
        """The slot of each sequence; those without one get a free slot."""
        known = [self._assigned.get(_key(s)) for s in sequences]
        if None not in known:
            return [place[0] for place in known if place is not None]
        self._free_unused()
        for sequence in [s for s, place in zip(sequences, known) if place is None]:
            slot = self._free.pop()
            self._assigned[_key(sequence)] = slot, sequence
            self._table_lengths[slot] = 0
            self._outdated.add(slot)
        return [self._assigned[_key(s)][0] for s in sequences]

    def set_states(self, sequences: Rows[Sequence], slots: Rows[int]) -> None:
        """Upload the states that are not up to date."""
        new = [(sequence, slot) for sequence, slot in zip(sequences, slots) if slot in self._outdated]
        if not new:
            return
        self._outdated.difference_update(slots)
        at = self._upload([slot for _, slot in new])
        params = [s.request.sampling for s, _ in new]
        options = [(p.temperature, p.top_p, p.min_p) for p in params]
        self.slot_state.index_copy_(0, at, self._upload([self._state(s) for s, _ in new]))
        self.slot_options.index_copy_(0, at, self._upload(options, torch.float32))
        state_slots = [s.state_slot for s, _ in new if s.state_slot is not None]
        if state_slots:
            self.state_slots.index_copy_(0, at, self._upload(state_slots))
        if self.rope_deltas is not None:
            self.rope_deltas.index_copy_(0, at, self._upload([s.rope_delta for s, _ in new]))

    def set_tables(self, sequences: Rows[Sequence], slots: Rows[int]) -> None:
        """Upload the block tables that changed.

        A table grows at its end, where the last block may also be replaced, by a copy if others share it. Earlier blocks stay.
        """
        changed = []
        lengths, last_blocks = self._table_lengths, self._last_blocks
        for sequence, slot in zip(sequences, slots):
            blocks = sequence.blocks
            if lengths[slot] != len(blocks) or last_blocks[slot] != blocks[-1]:
                last = max(0, lengths[slot] - 1)
                self._host_tables[slot, last : len(blocks)] = blocks[last:]
                lengths[slot], last_blocks[slot] = len(blocks), blocks[-1]
                changed.append(slot)
        if changed:
            rows = to_device(torch.from_numpy(self._host_tables[changed]), self.device)
            self.tables.index_copy_(0, self._upload(changed), rows)

    def set_rows(self, slots: list[int], num_rows: int) -> None:
        """Make the first rows those of `slots`, padded to `num_rows` with the padding slot."""
        slot_ids = slots + [self.padding_slot] * (num_rows - len(slots))
        self.slot_ids[:num_rows].copy_(self._upload(slot_ids, torch.int32))

    def _upload(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)

    def _free_unused(self) -> None:
        """Free the slots of sequences that have finished or were preempted."""
        for key, (slot, sequence) in list(self._assigned.items()):
            if not sequence.blocks or key != _key(sequence):
                del self._assigned[key]
                self._free.append(slot)

    def _state(self, sequence: Sequence) -> list[int]:
        """A row of `slot_state`."""
        params = sequence.request.sampling
        stop_ids = sorted(sequence.stop_ids)
        return [
            len(sequence.tokens) - 1,
            1,
            as_int64(sequence.request.seed),
            sequence.num_prompt + params.max_tokens - 1,
            sequence.tokens[-1],
            max(0, params.top_k),
            *stop_ids,
            *[-1] * (self.max_stop_ids - len(stop_ids)),
        ]


def _key(sequence: Sequence) -> tuple[int, int]:
    """A preempted sequence needs a new slot when it comes back."""
    return sequence.index, sequence.num_preempted


def as_int64(x: int) -> int:
    """The signed number with the same low 64 bits."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)
