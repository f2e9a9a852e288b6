"""The engine's loop: each step launches a prefill or a window of decode steps, and reads outputs.

    prefill:  schedule ─► forward ─► sample the first tokens        ┐
    decode:   schedule ─► allocate blocks for some steps ─► run     ├─► outputs read at once (CPU) or two launches later (CUDA)
                                                                    ┘

The decoder stops sequences itself, at a stop token or at `max_tokens`; so the host looks at tokens once per window, and on CUDA it
schedules the next launch while the device still runs the previous one.

A launch for which memory does not suffice is taken back, and a limit is lowered (`memory_limits.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cpu.decoder import CpuDecoder
from lockstep.engines.rollout.embedded.draft_controller import STEPS_BETWEEN_SEARCHES
from lockstep.engines.rollout.embedded.drafter import DraftCounts, Drafter
from lockstep.engines.rollout.embedded.memory_limits import MemoryLimits
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.prefill import PrefillInputs
from lockstep.engines.rollout.embedded.sampler import SampledTokens
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow, PrefillStep, Scheduler
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.engines.rollout.rollout_engine import shortage_of
from lockstep.protocol.generation import first_routes
from lockstep.utils.device import HostCopy

now = time.perf_counter

DRAFT_STEPS = 4
"""Steps of a window for which the decoder finds drafts. Between windows it is decided how many drafts pay."""
SHORT_STEPS = 4
"""Steps of plain windows before it is known whether drafts pay."""


class StepOutputs(Protocol):
    """What a launch samples."""

    @property
    def curve(self) -> HostCopy | None:
        """Of `draft_rows.allot`, if it is known."""

    @property
    def counts(self) -> DraftCounts | None:
        """Of steps for which the decoder found drafts."""

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs of each sequence; a sequence that stops has fewer, or -1 after its last token."""


class Decoder(Protocol):
    """
    max_in_flight: launches whose outputs may stay unread.
    num_steps:     most steps per window.
    finds_drafts:  whether it finds the drafts of a window itself, for several steps; else the host finds those of one step.
    """

    @property
    def max_in_flight(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def finds_drafts(self) -> bool: ...

    def sample_first(self, sequences: Rows[Sequence], logits_NV: Tensor) -> SampledTokens:
        """One token per sequence, after its prefill."""

    def prepare(self, window: DecodeWindow) -> bool:
        """Before `run` or `run_drafts`: make what windows of this size need. Whether this one takes longer than later ones."""

    def run(self, window: DecodeWindow) -> SampledTokens:
        """The steps of the window, or fewer. May reorder `window.rows`."""

    def run_drafts(self, window: DecodeWindow) -> StepOutputs:
        """The steps of a window with drafts. May reorder `window.rows`."""

    def reset(self) -> None:
        """Drop all sequences."""

    def free_memory(self) -> None:
        """Drop all sequences, and what can be made again."""

    def disable_graphs(self) -> bool:
        """Do without what takes memory for speed from now on; False if there is no such thing."""


@dataclass(frozen=True)
class Launch:
    """
    rows:       each sequence with the most tokens that it samples.
    num_steps:  0 for a prefill.
    draft_size: tokens per step if the decoder finds drafts, else 0.
    started:    by the clock of `now`.
    """

    rows: list[tuple[Sequence, int]]
    sampled: StepOutputs
    num_steps: int
    drafts: Mapping[int, list[int]]
    draft_size: int
    started: float


class StepLoop:
    """
    drafter:            makes the drafts of decode steps; None if there are none.
    num_prefill_tokens: computed so far in prefill steps.
    finished:           sequences found finished that `step` has not returned yet.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        limits: MemoryLimits,
        max_model_len: int,
        use_graphs: bool,
        drafter: Drafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.num_prefill_tokens = 0
        self._max_model_len = max_model_len
        self._use_graphs = use_graphs
        self._decoder: Decoder | None = None
        self._max_stop_ids = 0
        self._in_flight: deque[Launch] = deque()
        self._last_read = 0.0  # when the outputs of a launch were read
        self._last_delay = 0.0  # when a launch had been delayed by what later ones of its size need not do
        self._had_drafts = False  # whether the last launch had drafts
        self._num_moves = 0  # of parameters and states, after which graphs are captured again
        self.finished: list[Sequence] = []
        scheduler.drain = self.drain
        scheduler.on_release = self._read_routes

    def prepare(self, num_stop_ids: int) -> None:
        """Create the decoder if there is none for sequences with this many stop tokens."""
        if self.runner.device.type != "cuda":
            self._decoder = self._decoder or CpuDecoder(self.runner)
        elif self._decoder is None or self._max_stop_ids < num_stop_ids:
            from lockstep.engines.rollout.embedded.cuda.decoder import CudaDecoder

            self.drain()
            self._decoder = None  # its buffers are freed first
            if self.drafter is not None:
                self.drafter.forget_graphs()
            self._max_stop_ids = 1 << max(2, (num_stop_ids - 1).bit_length())
            self._decoder = CudaDecoder(
                self.runner,
                self.scheduler,
                self._max_model_len,
                self._use_graphs,
                self._max_stop_ids,
                self.drafter,
            )

    def reset(self) -> None:
        """Drop all outputs that were not read."""
        self._in_flight.clear()
        self.finished.clear()
        if self._decoder is not None:
            self._decoder.reset()

    @torch.no_grad()
    def step(self) -> list[Sequence]:
        """Launch a prefill or a decode window, and read outputs that are due. Returns the sequences found finished."""
        assert self._decoder is not None, "prepare was not called"
        max_in_flight = self._decoder.max_in_flight
        while len(self._in_flight) >= max(1, max_in_flight):
            self._read()
        if not self._launch(self._decoder) and not self.finished:  # scheduling may have drained the outputs
            assert self._in_flight, "nothing can be launched: a sequence does not fit the cache"
            self._read()
        if max_in_flight == 0:
            self.drain()
        finished, self.finished = self.finished, []
        return finished

    def drain(self) -> bool:
        """Read everything in flight; returns whether there was anything."""
        any_in_flight = bool(self._in_flight)
        while self._in_flight:
            self._read()
        return any_in_flight

    def _launch(self, decoder: Decoder) -> bool:
        if self.scheduler.prefill_is_due:
            prefill = self.scheduler.schedule_prefill()
            if prefill.rows:
                if shortage := self._shortage_of(lambda: self._run_prefill(prefill, decoder)):
                    self._retreat_from_prefill(prefill, decoder, shortage)
                return True
        if self.drafter is not None and self._num_moves != self.runner.num_moves:
            self._num_moves = self.runner.num_moves
            self.drafter.forget_graphs()
        started = now()
        num_steps = decoder.num_steps
        window: DecodeWindow | None = None
        if self.drafter is not None and decoder.finds_drafts:
            controller = self.drafter.controller
            if size := controller.size_for(len(self.scheduler.decodable()), DRAFT_STEPS):
                window = self.scheduler.schedule_draft_steps(DRAFT_STEPS, size, controller.max_draft_tokens)
            if controller.is_unsure:
                num_steps = SHORT_STEPS
        elif self.drafter is not None and self.drafter.is_due(sequences := self.scheduler.decodable()):
            if self.drain():
                sequences = self.scheduler.decodable()
            # between steps with drafts nothing is computed: what the host did since the last one is part of this one
            started = self._last_read if self._had_drafts else now()
            drafts = self.drafter.drafts(sequences)
            started += self.drafter.take_index_seconds()  # once per prompt, not per step
            num_steps = min(num_steps, STEPS_BETWEEN_SEARCHES)
            window = self.scheduler.schedule_drafts(sequences, drafts) if drafts else None
        if window is None:
            window = self.scheduler.schedule_decode(num_steps)
            if self.drafter is not None and decoder.finds_drafts:
                window.is_surveyed = self.drafter.controller.survey_is_due(len(window.rows))
        if window.rows and (shortage := self._shortage_of(lambda: self._run_window(window, decoder, started))):
            self._retreat_from_window(window, decoder, shortage)
        elif window.drafts:
            self.drain()  # the next launch needs the tokens on the host
        return bool(window.rows)

    def _shortage_of(self, launch: Callable[[], None]) -> str | None:
        if self.runner.tensor_group is None:
            return shortage_of(launch)
        launch()  # the other ranks may be waiting inside the step: it cannot be taken back
        return None

    def _run_window(self, window: DecodeWindow, decoder: Decoder, started: float) -> None:
        assert self.runner.cache is not None
        self.runner.cache.copy_blocks(window.copies)
        window.copies = []
        began = now()
        is_delayed = decoder.prepare(window)
        if is_delayed and self.drafter is not None:
            self.drafter.note_capture(now() - began, window.has_drafts)
        sampled: StepOutputs
        if window.drafts:
            sampled, num_steps = decoder.run_drafts(window), 1
        else:
            started = now()  # what came before is done while the device computes, or was a search that found nothing
            if window.draft_size:
                assert self.drafter is not None
                self.drafter.controller.note_size(window.draft_size)
                sampled, num_steps = decoder.run_drafts(window), window.draft_steps
            else:
                sampled = plain = decoder.run(window)
                num_steps = plain.num_steps
                window.truncate(num_steps)
        launch = Launch(window.rows, sampled, num_steps, window.drafts, window.draft_size, started)
        if is_delayed:
            self._last_delay = now()
        self._had_drafts = bool(window.drafts)
        self._in_flight.append(launch)

    def _run_prefill(self, prefill: PrefillStep, decoder: Decoder) -> None:
        runner = self.runner
        assert runner.cache is not None
        self._had_drafts = False
        runner.cache.copy_blocks(prefill.copies)
        inputs = PrefillInputs(prefill.rows, runner.cache)
        self.num_prefill_tokens += inputs.token_ids.numel()
        hidden_TE = runner.forward(inputs.token_ids, inputs.position_ids, inputs.attention, images=inputs.images)
        runner.keep_routes(inputs.attention.slots, runner.routes)
        if runner.cache.states is not None:
            runner.cache.states.copy(prefill.state_copies)
        prefill.is_computed = True
        if inputs.samplers:
            sampled = decoder.sample_first(inputs.samplers, runner.logits(hidden_TE[inputs.last_token_index]))
            for sequence in inputs.samplers:
                sequence.num_unread += 1
            rows = [(sequence, 1) for sequence in inputs.samplers]
            self._in_flight.append(Launch(rows, sampled, num_steps=0, drafts={}, draft_size=0, started=now()))

    def _retreat_from_prefill(self, prefill: PrefillStep, decoder: Decoder, shortage: str) -> None:
        """Take the step back, and lower the limit on tokens or, if they were computed, on sequences."""
        num_tokens = sum(row.stop - row.start for row in prefill.rows)
        num_running = len(self.scheduler.running)
        self.scheduler.undo_prefill(prefill)
        self._free_memory(decoder)
        if prefill.is_computed:
            lowered = self.limits.lower_seqs(num_running, shortage)
        else:
            lowered = self.limits.lower_tokens(num_tokens, shortage)
        if not lowered and not decoder.disable_graphs():
            self.limits.shrink_cache(self.runner, shortage)

    def _retreat_from_window(self, window: DecodeWindow, decoder: Decoder, shortage: str) -> None:
        """Take the window back, and let fewer sequences run or, if it has drafts, draft less."""
        window.truncate(0)
        self._free_memory(decoder)
        # copies not made: the blocks of some sequences are incomplete; steps that did run have changed the states
        if window.copies or self.scheduler.has_states:
            self.scheduler.preempt_above(0)
        if window.has_drafts:
            assert self.drafter is not None
            num_tokens = window.draft_size or len(window.rows) + sum(map(len, window.drafts.values()))
            self.drafter.lower_tokens(num_tokens, shortage)
        elif not self.limits.lower_seqs(len(window.rows), shortage) and not decoder.disable_graphs():
            self.limits.shrink_cache(self.runner, shortage)

    def _free_memory(self, decoder: Decoder) -> None:
        self.drain()
        decoder.free_memory()
        self._had_drafts = False
        if self.drafter is not None:
            self.drafter.forget_graphs()
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def _read_routes(self, sequence: Sequence) -> None:
        """Read the experts of a sequence that frees its blocks. Its last sampled token was not computed."""
        cache = self.runner.cache
        if cache is None or cache.routes is None:
            return
        num_known = len(sequence.tokens) - (sequence.num_generated > 0)
        routes = cache.read_routes(sequence.blocks, min(sequence.num_computed, num_known))
        sequence.routes = first_routes(sequence.routes, routes)

    def _read(self) -> None:
        launch = self._in_flight.popleft()
        outputs = launch.sampled.read()
        began, self._last_read = max(launch.started, self._last_read), now()
        if self.drafter is not None:
            is_usual = self._last_delay <= began
            self._note(self.drafter, launch, outputs[0], self._last_read - began if is_usual else None)
        for (sequence, count), tokens, log_probs in zip(launch.rows, *outputs):
            if sequence.stop_reason is not None:
                continue  # launched before its end was read
            sequence.num_unread -= count
            if tokens and tokens[-1] < 0:
                tokens = tokens[: tokens.index(-1)]
            sequence.num_computed -= count - len(tokens)  # with drafts it may have sampled fewer
            sequence.append(tokens, log_probs[: len(tokens)])
            if sequence.stop_reason is not None:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)
                if self.drafter is not None:
                    self.drafter.end(sequence)

    def _note(self, drafter: Drafter, launch: Launch, tokens: list[list[int]], seconds: float | None) -> None:
        """Tell the drafter. tokens: what the launch sampled. seconds: that it took; None if it was delayed."""
        sampled = launch.sampled
        if launch.drafts:
            rows = [(sequence, len(new)) for (sequence, _), new in zip(launch.rows, tokens)]
            drafter.note_step(rows, launch.drafts, seconds)
        elif counts := sampled.counts:
            drafter.note_steps(launch.draft_size, launch.num_steps, len(launch.rows), counts, seconds)
        elif launch.num_steps and seconds is not None:
            drafter.note_window(len(launch.rows), launch.num_steps, seconds)
        if curve := sampled.curve:
            drafter.controller.note_curve(curve.read().numpy())
