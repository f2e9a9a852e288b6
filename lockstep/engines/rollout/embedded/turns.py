"""The engine's turns: steps of prompts, and windows of decode steps.

    prompts:  schedule ─► forward ─► draw                       ┐
    windows:  reserve blocks for some steps ─► decode them      ├─► tokens read, at once (CPU) or two launches later (CUDA)
                                                                ┘

What decodes is of the device's kind: `cpu_decoder.py`, `cuda_decoder.py`. It stops sequences itself, at a stop token or at their
length, so that tokens are looked at once a window, and on CUDA the host waits for the launch before last only.
"""

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cpu_decoder import CpuDecoder
from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import Scheduler, StepPlan, Window
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.engines.rollout.embedded.step_inputs import StepInputs


class Drawn(Protocol):
    """What was drawn, in `num_steps` steps at most."""

    @property
    def num_steps(self) -> int: ...

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs of each sequence; tokens end, or go on with -1, where it drew no more."""


class Decoder(Protocol):
    """max_in_flight: launches that need not be read before the next one; num_steps: most steps of a window."""

    @property
    def max_in_flight(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    def draw_first(self, samplers: Rows[Sequence], logits_NV: Tensor) -> Drawn:
        """One token for each of the sequences."""

    def run(self, window: Window) -> Drawn:
        """The window's steps, or fewer; `window.draws` may be put into another order."""

    def reset(self) -> None:
        """Forget every sequence."""


@dataclass
class Launch:
    """What was launched and is to be read.

    draws:     sequences with the most tokens that each may have drawn.
    decoding:  whether each token drawn cost the computation of one.
    """

    draws: list[tuple[Sequence, int]]
    drawn: Drawn
    decoding: bool


class Turns:
    def __init__(self, runner: ModelRunner, scheduler: Scheduler, max_length: int, graphs: bool) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._max_length, self._graphs = max_length, graphs
        self._decoder: Decoder | None = None
        self._num_stops = 0
        self._in_flight: deque[Launch] = deque()
        self._finished: list[Sequence] = []
        scheduler.settle = self.settle

    def make_room(self, num_stops: int) -> None:
        """Have a decoder for sequences of so many stop tokens."""
        if self.runner.device.type != "cuda":
            self._decoder = CpuDecoder(self.runner)
        elif self._decoder is None or self._num_stops < num_stops:
            from lockstep.engines.rollout.embedded.cuda_decoder import CudaDecoder

            self.settle()
            self._num_stops = 1 << max(2, (num_stops - 1).bit_length())
            self._decoder = CudaDecoder(self.runner, self.scheduler, self._max_length, self._graphs, self._num_stops)

    @property
    def decoder(self) -> Decoder:
        assert self._decoder is not None, "no room was made for the sequences"
        return self._decoder

    def reset(self) -> None:
        """Forget what is in flight."""
        self._in_flight.clear()
        self._finished.clear()
        if self._decoder is not None:
            self._decoder.reset()

    def turn(self) -> list[Sequence]:
        """Launch something, or read where nothing can be launched; gives the sequences found finished."""
        most = self.decoder.max_in_flight
        while len(self._in_flight) >= max(1, most):
            self._read()
        if not self._launch() and not self._finished:  # making room for a launch may have read the last ones
            assert self._in_flight, "nothing can be launched: one sequence does not fit the cache"
            self._read()
        if most == 0:
            self.settle()
        finished, self._finished = self._finished, []
        return finished

    def settle(self) -> bool:
        """Read all that is in flight; whether there was anything."""
        any_in_flight = bool(self._in_flight)
        while self._in_flight:
            self._read()
        return any_in_flight

    def _launch(self) -> bool:
        # inference mode saves a tenth of a small model's time; a module's own forward might keep a tensor that training meets later
        with torch.inference_mode() if self.runner.is_flat else torch.no_grad():
            return self._launch_next()

    def _launch_next(self) -> bool:
        if self.scheduler.wants_prompts:
            plan = self.scheduler.schedule()
            if plan.rows:
                self._launch_prompts(plan)
                return True
        window = self.scheduler.plan_window(self.decoder.num_steps)
        if window.draws:
            self._launch_window(window)
        return bool(window.draws)

    def _launch_prompts(self, plan: StepPlan) -> None:
        runner = self.runner
        assert runner.cache is not None
        runner.cache.copy_blocks(plan.copies)
        inputs = StepInputs(plan.rows, runner.cache)
        runner.num_tokens_computed += plan.num_tokens
        wanted = inputs.sampled if inputs.samplers else None
        hidden_NE = runner.forward(inputs.token_ids, inputs.position_ids, inputs.attention, wanted=wanted)
        if not inputs.samplers:
            return
        drawn = self.decoder.draw_first(inputs.samplers, runner.logits(hidden_NE))
        for sequence in inputs.samplers:
            sequence.num_ahead += 1
        self._in_flight.append(Launch([(s, 1) for s in inputs.samplers], drawn, decoding=False))

    def _launch_window(self, window: Window) -> None:
        assert self.runner.cache is not None
        self.runner.cache.copy_blocks(window.copies)
        drawn = self.decoder.run(window)
        window.shorten(drawn.num_steps)
        self._in_flight.append(Launch(window.draws, drawn, decoding=True))

    def _read(self) -> None:
        launch = self._in_flight.popleft()
        for (sequence, count), tokens, log_probs in zip(launch.draws, *launch.drawn.read()):
            if sequence.stop_reason is not None:
                continue  # launched before its end was read
            sequence.num_ahead -= count
            if tokens[-1] < 0:
                tokens = tokens[: tokens.index(-1)]
            sequence.extend(tokens, log_probs[: len(tokens)])
            if launch.decoding:
                self.runner.num_tokens_computed += len(tokens)
            if sequence.stop_reason is not None:
                self.scheduler.finish(sequence)
                self._finished.append(sequence)
