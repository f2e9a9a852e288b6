"""Prompts' first tokens and windows of decode steps on a CUDA device, launched ahead of the host.

    seats (`seats.py`) ─► steps as graphs (`decode_steps.py`) ─► outputs copied behind each launch, read when the copy has arrived

The device stops a sequence at a stop token or at its length and draws nothing for it until the host has read that and takes it out.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.decode_steps import DecodeSteps, bucket
from lockstep.engines.rollout.embedded.rehearsal import Rehearsal
from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import Scheduler, Window
from lockstep.engines.rollout.embedded.seats import Seats
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.utils.device import to_device


@dataclass(frozen=True)
class DrawnOnDevice:
    """tokens, log_probs: (steps, seats) on the host once `done` has passed; seats: those of the sequences."""

    tokens: Tensor
    log_probs: Tensor
    seats: list[int]
    done: torch.cuda.Event

    @property
    def num_steps(self) -> int:
        return len(self.tokens)

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        self.done.synchronize()
        tokens, log_probs = (t.numpy()[:, self.seats].T.tolist() for t in (self.tokens, self.log_probs))
        return tokens, log_probs


class CudaDecoder:
    """num_stops: most stop tokens of a sequence."""

    max_in_flight = 2
    num_steps = 8

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_length: int,
        graphs: bool,
        num_stops: int,
    ) -> None:
        self.runner = runner
        num_seats = scheduler.max_num_seqs
        width = scheduler.blocks.num_for(max_length)
        self.seats = Seats(num_seats, bucket(num_seats), width, num_stops, self.num_steps, runner.device)
        self.steps = DecodeSteps(runner, self.seats, max_length, graphs)
        self.rehearsal = Rehearsal(runner, self.seats, self.steps.max_splits)

    def reset(self) -> None:
        self.seats.clear()

    def draw_first(self, samplers: Rows[Sequence], logits_NV: Tensor) -> DrawnOnDevice:
        self.rehearsal.end_first()
        seats = self.seats.seat(samplers)
        self.seats.step.zero_()
        rows = to_device(torch.tensor(seats, dtype=torch.int32), self.runner.device)
        filtered = any(s.request.sampling.filtered for s in samplers)
        self.steps.draw(logits_NV, rows, filtered)
        return self._follow(seats, num_steps=1)

    def run(self, window: Window) -> DrawnOnDevice:
        self.rehearsal.end()
        sequences = [s for s, _ in window.draws]
        filtered = any(s.request.sampling.filtered for s in sequences)
        self.steps.prepare(len(sequences), filtered)
        seats = self.seats.seat(sequences)
        self.seats.set_tables(sequences)
        self.seats.set_rows(seats, bucket(len(sequences)))
        self.steps.run(len(sequences), filtered, window.num_steps)
        return self._follow(seats, window.num_steps)

    def _follow(self, seats: list[int], num_steps: int) -> DrawnOnDevice:
        """Copy the outputs to the host behind what was launched."""
        tokens, log_probs = (
            torch.empty((num_steps, *source.shape[1:]), dtype=source.dtype, pin_memory=True)
            for source in (self.seats.drawn, self.seats.log_probs)
        )
        tokens.copy_(self.seats.drawn[:num_steps], non_blocking=True)
        log_probs.copy_(self.seats.log_probs[:num_steps], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return DrawnOnDevice(tokens, log_probs, seats, done)
