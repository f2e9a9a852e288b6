"""What the device knows of the sequences that decode, in buffers that never move: graphs replay on them.

Each sequence has a seat: its next token, position, seed, limits and sampling parameters (`kernels/sampling.py`) and its block
table. The rows of a step name seats; a row without a sequence names the spare seat, which never draws.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.sampler import signed
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.kernels import sampling
from lockstep.utils.device import to_device


class Seats:
    """
    tables:            (seats + 1, width) blocks of each seat's sequence.
    rows:              (R,) seat of each row of a step.
    tokens, positions: (1, R) model inputs of the rows; slots (R,) where their keys and values go.
    drawn, log_probs:  (steps, seats + 1) outputs, by the step in `step` and the seat.
    """

    def __init__(
        self, num_seats: int, num_rows: int, table_width: int, num_stops: int, num_steps: int, device: torch.device
    ) -> None:
        self.device = device
        self.spare = num_seats
        self.num_stops = num_stops

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = zeros(num_seats + 1, sampling.STOPS + num_stops)
        self.options = zeros(num_seats + 1, sampling.OPTIONS, dtype=torch.float32)
        self.tables = zeros(num_seats + 1, table_width, dtype=torch.int32)
        self.rows = zeros(num_rows, dtype=torch.int32)
        self.tokens, self.positions, self.slots = zeros(1, num_rows), zeros(1, num_rows), zeros(num_rows)
        self.step = zeros(1, dtype=torch.int32)
        self.drawn = zeros(num_steps, num_seats + 1, dtype=torch.int32)
        self.log_probs = zeros(num_steps, num_seats + 1, dtype=torch.float32)
        self._host_tables = np.zeros((num_seats + 1, table_width), dtype=np.int32)
        self._occupants: dict[int, tuple[Sequence, int]] = {}  # by seat, with num_preempted when it sat down
        self._seat_of: dict[int, int] = {}  # by index of the sequence
        self._free = list(range(num_seats))
        self._rows_now: list[int] = []

    def clear(self) -> None:
        """Let everyone leave."""
        self._free += self._occupants
        self._occupants.clear()
        self._seat_of.clear()
        self._rows_now = []

    def seat(self, sequences: Rows[Sequence]) -> list[int]:
        """Seat of each sequence; those that have none yet sit down, with what the host knows of them."""
        new = [s for s in sequences if not self._sits(s)]
        if new:
            self._leave()
            for sequence in new:
                seat = self._free.pop()
                self._occupants[seat] = sequence, sequence.num_preempted
                self._seat_of[sequence.index] = seat
            seats = self._upload([self._seat_of[s.index] for s in new])
            params = [s.request.sampling for s in new]
            options = [(p.temperature, p.top_p, p.min_p) for p in params]
            self.state.index_copy_(0, seats, self._upload([self._fields(s) for s in new]))
            self.options.index_copy_(0, seats, self._upload(options, torch.float32))
        return [self._seat_of[s.index] for s in sequences]

    def set_tables(self, sequences: Rows[Sequence]) -> None:
        """Upload the sequences' block tables where they have changed."""
        changed = False
        for sequence in sequences:
            row, blocks = self._host_tables[self._seat_of[sequence.index]], sequence.blocks
            if row[len(blocks) - 1] != blocks[-1] or row[: len(blocks)].tolist() != blocks:
                row[: len(blocks)] = blocks
                changed = True
        if changed:
            self.tables.copy_(to_device(torch.from_numpy(self._host_tables), self.device), non_blocking=True)

    def set_rows(self, seats: list[int], num_rows: int) -> None:
        """Let the first rows be those of `seats`, and the rest up to `num_rows` the spare one's."""
        wanted = seats + [self.spare] * (num_rows - len(seats))
        if wanted != self._rows_now:
            self.rows[:num_rows].copy_(self._upload(wanted, torch.int32))
            self._rows_now = wanted

    def empty_rows(self, num_rows: int) -> None:
        self.rows[:num_rows].fill_(self.spare)
        self._rows_now = []

    def _upload(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)

    def _sits(self, sequence: Sequence) -> bool:
        seat = self._seat_of.get(sequence.index)
        return seat is not None and self._occupants[seat][1] == sequence.num_preempted

    def _leave(self) -> None:
        """Free the seats of sequences that have ended or lost their blocks since they sat down."""
        for seat, (sequence, num_preempted) in list(self._occupants.items()):
            if not sequence.blocks or sequence.num_preempted != num_preempted:
                del self._occupants[seat], self._seat_of[sequence.index]
                self._free.append(seat)

    def _fields(self, sequence: Sequence) -> list[int]:
        """In the order of `kernels/sampling.py`."""
        last = sequence.num_prompt + sequence.request.sampling.max_tokens - 1
        stops = sorted(sequence.stop_ids)
        return [
            len(sequence.tokens) - 1,
            1,
            signed(sequence.request.seed),
            last,
            sequence.tokens[-1],
            max(0, sequence.request.sampling.top_k),
            *stops,
            *[-1] * (self.num_stops - len(stops)),
        ]
