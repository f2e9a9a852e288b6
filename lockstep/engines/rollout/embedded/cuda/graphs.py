"""Decode steps as CUDA graphs: one graph per batch size, captured when first needed.

    begin_step (tokens, positions, cache slots from the decode slots) ─► model ─► logits ─► sample (token, log-prob, slot state)

A step never returns to the host. Graphs hold addresses: the decode slots never move, the KV cache is reached through a tensor of
addresses, and graphs are captured again if the parameters or the states have moved.
"""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_attention import CudaDecodeAttention
from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.state_slots import DecodeStates
from lockstep.kernels import sampling
from lockstep.kernels.linear_log_prob import row_log_probs
from lockstep.kernels.paged_decode import MAX_SPLITS, TILE
from lockstep.utils.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes of the graphs; larger ones are multiples of an eighth of the next power of two."""


def padded_batch_size(num_rows: int) -> int:
    for size in BATCH_SIZES:
        if num_rows <= size:
            return size
    step = max(32, (1 << (num_rows - 1).bit_length()) // 8)
    return -(-num_rows // step) * step


class DecodeGraphs:
    """
    max_model_len: longest sequence, which bounds the attention splits of a row.
    use_graphs:    if false, or if the model cannot be captured, every step is launched op by op.
    step:          row of the outputs that the last step wrote.
    """

    def __init__(self, runner: ModelRunner, slots: DecodeSlots, max_model_len: int, use_graphs: bool) -> None:
        self.runner = runner
        self.slots = slots
        self.max_splits = min(MAX_SPLITS, -(-max_model_len // TILE))
        self.use_graphs = use_graphs
        self.step = slots.step
        self._stream = torch.cuda.Stream(slots.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._routes: dict[tuple[int, bool], Tensor | None] = {}  # where each graph leaves `runner.routes`
        self._pool: Any = None
        self._captured_at = 0  # moves of the parameters and states
        self._known: set[tuple[int, bool]] = set()  # sizes whose kernels are compiled

    def prepare(self, num_rows: int, filtered: bool) -> bool:
        """Capture the graph for this batch if there is none; capturing resets the rows of the slots.

        Returns whether its next step takes longer than others: a graph was captured, or kernels may be compiled.
        """
        if self._captured_at != self.runner.num_moves:
            self.clear()
            self._captured_at = self.runner.num_moves
        size = self.size_of(num_rows)
        is_new = (size, filtered) not in self._known
        self._known.add((size, filtered))
        if not self.use_graphs or (size, filtered) in self._graphs:
            return is_new
        self._pad_rows(size)
        try:
            with _no_garbage_collection():
                self._warm_up(size, filtered)
                self._graphs[size, filtered] = self._capture(size, filtered)
                self._routes[size, filtered] = self.runner.routes
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.use_graphs = False
            self.clear()
            reason = str(error).splitlines()[0]
            logger.warning("CUDA graphs disabled for %s: %s", type(self.runner.model).__name__, reason)
        return True

    def run(self, num_rows: int, filtered: bool, num_steps: int) -> None:
        """Sample `num_steps` tokens per row into the outputs of the slots, from step 0 on."""
        self.step.fill_(-1)
        size = self.size_of(num_rows)
        graph = self._graphs.get((size, filtered))
        for _ in range(num_steps):
            if graph is not None:
                graph.replay()
                routes = self._routes[size, filtered]
            else:
                self._step(size, filtered)
                routes = self.runner.routes
            self.runner.keep_routes(self.cache_slots[:size], routes)

    def size_of(self, num_rows: int) -> int:
        """Rows of the graph for a step of `num_rows`."""
        return padded_batch_size(num_rows)

    @property
    def cache_slots(self) -> Tensor:
        """(R,) where the tokens of the last step are cached."""
        return self.slots.cache_slots

    def _pad_rows(self, size: int) -> None:
        """Make the first rows ones that belong to no sequence."""
        self.slots.set_rows([], size)

    def sample(self, logits: Tensor, slot_ids: Tensor, filtered: bool) -> None:
        """Sample one token per row and update the slots."""
        slots = self.slots
        state = (slots.slot_state, slots.slot_options)
        outputs = (slots.step, slots.sampled, slots.log_probs)
        excluded = self.runner.placeholders
        sampling.sample(logits, *state, slot_ids, *outputs, filtered=filtered, excluded=excluded)
        if self.runner.exact:
            self._log_probs_of_trainer(logits, slot_ids)

    def _log_probs_of_trainer(self, logits: Tensor, slot_ids: Tensor) -> None:
        """Replace the log-probs of the sampled tokens by those of the trainer's kernel, which sums in another order."""
        slots = self.slots
        at = slots.step.long(), slot_ids.long()
        temperatures = slots.slot_options[at[1], sampling.TEMPERATURE]
        temperatures = torch.where(temperatures > 0, temperatures, 1.0)
        tokens = slots.sampled[at].clamp_min(0)  # -1 for a sequence that has stopped
        slots.log_probs[at] = row_log_probs(logits, tokens, temperatures)

    def clear(self) -> None:
        """Drop all graphs; they are captured again when needed."""
        self._graphs.clear()
        self._routes.clear()
        self._pool = None  # freed with the last graph that uses it

    def _warm_up(self, size: int, filtered: bool) -> None:
        """Compile the kernels. Raises if the model synchronises with the device, which cannot be captured."""
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
        slots = self.slots
        runner = self.runner
        slot_ids, cache_slots = slots.slot_ids[:size], slots.cache_slots[:size]
        tokens, positions = slots.tokens[:, :size], slots.positions[:, :size]
        inputs = slots.slot_state, slots.tables, slot_ids, tokens, positions, cache_slots, slots.step
        sampling.begin_step(*inputs, ring=len(slots.sampled), block_size=runner.block_size)
        attention = CudaDecodeAttention(
            runner.cache_addresses,
            runner.block_size,
            slots.tables,
            slot_ids,
            positions[0],
            cache_slots,
            self.max_splits,
            runner.has_fp8_cache,
            self._states(slot_ids, cache_slots),
        )
        hidden = runner.forward(tokens, self._rotary(positions, slot_ids), attention)
        self.sample(runner.logits(hidden), slot_ids, filtered)

    def _rotary(self, positions: Tensor, slot_ids: Tensor) -> Tensor:
        deltas = self.slots.rope_deltas
        return positions if deltas is None else positions + deltas.index_select(0, slot_ids)

    def _states(self, slot_ids: Tensor, cache_slots: Tensor) -> DecodeStates | None:
        states = None if self.runner.cache is None else self.runner.cache.states
        if states is None:
            return None
        return DecodeStates(states, self.slots.state_slots.index_select(0, slot_ids), cache_slots >= 0)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that is collected while another is captured would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
