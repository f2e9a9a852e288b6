"""Steps of one token for all rows, as CUDA graphs: one graph for each batch size of a ladder, captured when first needed.

    begin (tokens, positions, slots from the seats) ─► decoder ─► head ─► draw (token, log-prob, seats move on)

Nothing in a step returns to the host. A graph holds addresses: of the seats' buffers and of the parameters. The seats stay
where they are, the KV cache is reached through a table of addresses; where the parameters have moved, graphs are captured anew.
"""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.seats import Seats
from lockstep.kernels import sampling
from lockstep.kernels.paged_decode import MAX_SPLITS, TILE
from lockstep.models.attention import no_mask
from lockstep.models.paged_attention import DecodeAttention

logger = logging.getLogger(__name__)

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes of graphs; from the last on in steps of a quarter of the next power of two."""
PROGRAMS = 512
"""Programs of the attention kernel that keep the device busy; few rows are split to so many."""


def bucket(num_rows: int) -> int:
    """The batch size at which so many rows run."""
    for size in LADDER:
        if num_rows <= size:
            return size
    step = max(32, (1 << (num_rows - 1).bit_length()) // 8)
    return -(-num_rows // step) * step


@contextmanager
def without_collector() -> Iterator[None]:
    """A graph that the garbage collector frees while another is captured would spoil that one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class DecodeSteps:
    """
    max_length: longest sequence, which bounds how often one row's cache is split.
    graphs:     whether to capture; otherwise, and where the model cannot be captured, each step is launched op by op.
    """

    def __init__(self, runner: ModelRunner, seats: Seats, max_length: int, graphs: bool) -> None:
        self.runner = runner
        self.seats = seats
        self.max_splits = min(MAX_SPLITS, -(-max_length // TILE))
        self.graphs = graphs
        device = seats.device
        self._mask = no_mask(device)
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._weights_version = runner.weights_version

    def prepare(self, num_rows: int, filtered: bool) -> None:
        """Have the graph for so many rows; the rows are the spare seat's afterwards if it had to be captured."""
        if self._weights_version != self.runner.weights_version:
            self._captured.clear()
            self._pool = None  # it ends with the last graph that used it
            self._weights_version = self.runner.weights_version
        key = (bucket(num_rows), filtered)
        if self.graphs and key not in self._captured:
            self.seats.empty_rows(key[0])
            try:
                with without_collector():
                    self._warm_up(*key)
                    self._captured[key] = self._capture(*key)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graphs = False
                self._captured.clear()
                self._pool = None
                reason = str(error).splitlines()[0]
                logger.warning("%s decodes without CUDA graphs: %s", type(self.runner.model).__name__, reason)

    def run(self, num_rows: int, filtered: bool, num_steps: int) -> None:
        """Draw `num_steps` tokens for each of the rows, into the seats' outputs from step 0 on."""
        self.seats.step.fill_(-1)
        size = bucket(num_rows)
        graph = self._captured.get((size, filtered))
        for _ in range(num_steps):
            if graph is not None:
                graph.replay()
            else:
                self._step(size, filtered)

    def _warm_up(self, size: int, filtered: bool) -> None:
        """Compile what the step needs; a model that waits for the device in it cannot be captured, and raises here."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._step(size, filtered)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def _capture(self, size: int, filtered: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(size, filtered)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool = graph.pool()
        return graph

    def _step(self, size: int, filtered: bool) -> None:
        seats, cache = self.seats, self.runner.cache
        assert cache is not None
        rows, slots = seats.rows[:size], seats.slots[:size]
        tokens, positions = seats.tokens[:, :size], seats.positions[:, :size]
        sampling.begin_step(
            seats.state,
            seats.tables,
            rows,
            tokens,
            positions,
            slots,
            seats.step,
            ring=len(seats.drawn),
            block_size=cache.block_size,
        )
        attention = DecodeAttention(
            self.runner.addresses, cache.block_size, seats.tables, rows, positions[0], slots, self._splits
        )
        hidden = self.runner.forward(tokens, positions, attention, self._mask)
        self.draw(self.runner.logits(hidden), rows, filtered)

    def draw(self, logits: Tensor, rows: Tensor, filtered: bool) -> None:
        """Draw for the seats in `rows` and move them on."""
        seats = self.seats
        sampling.draw(
            logits, seats.state, seats.options, rows, seats.step, seats.drawn, seats.log_probs, filtered=filtered
        )

    def _splits(self, num_programs: int) -> int:
        """Stretches of the cache per row and key head."""
        return max(1, min(PROGRAMS // num_programs, self.max_splits))
