"""The engine's turns on a CUDA device, which runs ahead of the host.

    prompts:  schedule ─► forward ─► draw on the device         ┐
    windows:  reserve blocks for some steps ─► replay a graph   ├─► outputs copied behind each launch, read two launches later
                                                                ┘

The device decides which sequences go on: it stops them at a stop token or at their length and draws nothing for them until the host
has read that and takes them out. So the host never waits for a token, only for the launch before last.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.decode_steps import DecodeSteps, bucket
from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import Scheduler, StepPlan, Window
from lockstep.engines.rollout.embedded.seats import Seats
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.engines.rollout.embedded.step_inputs import StepInputs
from lockstep.utils.device import to_device

WINDOW = 8
"""Steps launched at a time."""
MAX_IN_FLIGHT = 2
"""Launches that the host has not read."""


@dataclass
class Launch:
    """What was launched and is to be read.

    draws:     sequences with the most tokens that each may have drawn, and their seats.
    drawn:     (steps, seats) tokens on the host once `done` has passed, -1 where nothing was drawn; log_probs alike.
    decoding:  whether each token drawn cost the computation of one.
    """

    draws: list[tuple[Sequence, int]]
    seats: list[int]
    drawn: Tensor
    log_probs: Tensor
    done: torch.cuda.Event
    decoding: bool


class RunAhead:
    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, max_length: int, graphs: bool, num_stops: int
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        num_seats = scheduler.max_num_seqs
        width = scheduler.blocks.num_for(max_length)
        self.seats = Seats(num_seats, bucket(num_seats), width, num_stops, WINDOW, runner.device)
        self.steps = DecodeSteps(runner, self.seats, max_length, graphs)
        self._in_flight: deque[Launch] = deque()
        self._finished: list[Sequence] = []
        scheduler.settle = self.settle

    def reset(self) -> None:
        """Forget what is in flight and who sits where."""
        self._in_flight.clear()
        self._finished.clear()
        self.seats.clear()

    def take_over(self, before: "RunAhead") -> None:
        """Tell later of the sequences that another one found finished and has not told of."""
        self._finished += before._finished

    def turn(self) -> list[Sequence]:
        """Launch something, or read where nothing can be launched; gives the sequences found finished."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._read()
        if not self._launch() and not self._finished:  # making room for a launch may have read the last ones
            assert self._in_flight, "nothing can be launched: one sequence does not fit the cache"
            self._read()
        finished, self._finished = self._finished, []
        return finished

    def settle(self) -> bool:
        """Read all that is in flight; whether there was anything."""
        any_in_flight = bool(self._in_flight)
        while self._in_flight:
            self._read()
        return any_in_flight

    @torch.no_grad()
    def _launch(self) -> bool:
        if self.scheduler.wants_prompts:
            plan = self.scheduler.schedule(prompts_only=True)
            if plan.rows:
                self._launch_prompts(plan)
                return True
        window = self.scheduler.run_ahead(WINDOW)
        if window.draws:
            self._launch_window(window)
        return bool(window.draws)

    def _launch_prompts(self, plan: StepPlan) -> None:
        runner = self.runner
        assert runner.cache is not None
        runner.cache.copy_blocks(plan.copies)
        inputs = StepInputs(plan.rows, runner.cache)
        runner.num_tokens_computed += plan.num_tokens
        hidden_TE = runner.forward(inputs.token_ids, inputs.position_ids, inputs.attention)
        if not inputs.samplers:
            return
        seats = self.seats.seat(inputs.samplers)
        for sequence in inputs.samplers:
            sequence.num_ahead += 1
        self.seats.step.zero_()
        rows = to_device(torch.tensor(seats, dtype=torch.int32), runner.device)
        filtered = any(s.request.sampling.filtered for s in inputs.samplers)
        self.steps.draw(runner.logits(hidden_TE[inputs.sampled]), rows, filtered)
        self._follow([(s, 1) for s in inputs.samplers], seats, num_steps=1, decoding=False)

    def _launch_window(self, window: Window) -> None:
        assert self.runner.cache is not None
        self.runner.cache.copy_blocks(window.copies)
        sequences = [s for s, _ in window.draws]
        filtered = any(s.request.sampling.filtered for s in sequences)
        self.steps.prepare(len(sequences), filtered)
        seats = self.seats.seat(sequences)
        self.seats.set_tables(sequences)
        self.seats.set_rows(seats, bucket(len(sequences)))
        self.steps.run(len(sequences), filtered, window.num_steps)
        self._follow(window.draws, seats, window.num_steps, decoding=True)

    def _follow(self, draws: list[tuple[Sequence, int]], seats: list[int], num_steps: int, decoding: bool) -> None:
        """Copy the outputs to the host behind what was launched."""
        drawn, log_probs = (
            torch.empty((num_steps, *source.shape[1:]), dtype=source.dtype, pin_memory=True)
            for source in (self.seats.drawn, self.seats.log_probs)
        )
        drawn.copy_(self.seats.drawn[:num_steps], non_blocking=True)
        log_probs.copy_(self.seats.log_probs[:num_steps], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._in_flight.append(Launch(draws, seats, drawn, log_probs, done, decoding))

    def _read(self) -> None:
        launch = self._in_flight.popleft()
        launch.done.synchronize()
        drawn, log_probs = (t.numpy()[:, launch.seats].T.tolist() for t in (launch.drawn, launch.log_probs))
        for (sequence, count), tokens, values in zip(launch.draws, drawn, log_probs):
            if sequence.stop_reason is not None:
                continue  # launched before its end was read
            sequence.num_ahead -= count
            if tokens[-1] < 0:
                tokens = tokens[: tokens.index(-1)]
            sequence.extend(tokens, values[: len(tokens)])
            if launch.decoding:
                self.runner.num_tokens_computed += len(tokens)
            if sequence.stop_reason is not None:
                self.scheduler.finish(sequence)
                self._finished.append(sequence)
