"""Decode steps with drafts as CUDA graphs: a row per token, one graph per size, captured when first needed.

    tokens, positions, cache slots and sampling state of all rows, one upload ─► model ─► logits ─► sample ─► one copy to the host

The rows of a sequence have one block table and consecutive positions. All keys and values are written first, then read once for
each group of up to `GROUP_ROWS` rows. The host waits for every step, so it prepares one with few operations on whole arrays.
"""

from bisect import bisect_left
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_attention import CudaDecodeAttention
from lockstep.engines.rollout.embedded.cuda.decode_slots import ROPE_DELTA, SEED, TOP_K, DecodeSlots
from lockstep.engines.rollout.embedded.cuda.graphs import DecodeGraphs
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import PrefillRow
from lockstep.kernels import sampling
from lockstep.kernels.draft_decode import GROUP_ROWS
from lockstep.kernels.linear_log_prob import row_log_probs

TOKEN, POSITION, ROTARY, SLOT_ID, CACHE_SLOT, NUM_INPUTS = range(6)
"""Rows of `RowInputs.inputs`, and their number."""
NUM_FIELDS = sampling.STOPS + sampling.MIN_STOPS


class RowInputs:
    """What the rows of a step compute and how they are sampled, in one piece of memory.

    inputs:       (NUM_INPUTS, R) of each row: token, positions in the sequence and for the rotary embedding, decode slot (for its
                  block table) and cache slot.
    state:        (R, NUM_FIELDS) like a row of `DecodeSlots.slot_state`.
    options:      (R, NUM_OPTIONS) like a row of `DecodeSlots.slot_options`.
    group_starts: (P + 1,) groups of rows, as in `draft_attention`.
    """

    def __init__(self, num_rows: int, num_groups: int, **where: Any) -> None:
        num_floats = num_rows * sampling.NUM_OPTIONS
        sizes = [num_rows * NUM_INPUTS, num_rows * NUM_FIELDS, -(-num_floats // 2), num_groups + 1]
        self.words = torch.zeros(sum(sizes), dtype=torch.int64, **where)
        inputs, state, options, self.group_starts = self.words.split(sizes)
        self.inputs = inputs.view(NUM_INPUTS, num_rows)
        self.state = state.view(num_rows, NUM_FIELDS)
        self.options = options.view(torch.float32)[:num_floats].view(num_rows, sampling.NUM_OPTIONS)


class DraftGraphs(DecodeGraphs):
    """
    sizes:             tokens of the graphs, ascending.
    rows:              inputs of the graphs.
    tokens, log_probs: (1, R) outputs.
    """

    def __init__(
        self, runner: ModelRunner, slots: DecodeSlots, max_model_len: int, use_graphs: bool, sizes: Rows[int]
    ) -> None:
        super().__init__(runner, slots, max_model_len, use_graphs)
        self.sizes = sizes
        num_rows = sizes[-1]
        device = slots.device
        num_groups = self._num_groups(num_rows)
        self.rows = RowInputs(num_rows, num_groups, device=device)
        self._host = RowInputs(num_rows, num_groups, pin_memory=device.type == "cuda")
        self._outputs = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        self.tokens, self.log_probs = self._outputs[:1], self._outputs[1:].view(torch.float32)
        self._first_step = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_ids = torch.arange(num_rows, dtype=torch.int32, device=device)

    def sample_rows(self, rows: Rows[PrefillRow], slots: Rows[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs (T,) of all positions of the rows. slots: the decode slot of each row, with its table.

        After `prepare` for as many tokens.
        """
        counts = np.array([row.stop - row.start for row in rows])
        num_tokens = int(counts.sum())
        self._fill(rows, slots, counts, num_tokens)
        self.run(num_tokens, any(row.sequence.is_filtered for row in rows), num_steps=1)
        outputs = self._outputs[:, :num_tokens].cpu()
        return outputs[0].numpy(), outputs[1].view(torch.float32).numpy()

    def size_of(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    @property
    def cache_slots(self) -> Tensor:
        return self.rows.inputs[CACHE_SLOT]

    def _fill(self, rows: Rows[PrefillRow], slots: Rows[int], counts: np.ndarray, num_tokens: int) -> None:
        """Upload what the rows compute. counts: tokens of each, `num_tokens` in all."""
        inputs, state, options = (t.numpy() for t in (self._host.inputs, self._host.state, self._host.options))
        block_size = self.runner.block_size
        before = np.cumsum(counts) - counts  # tokens of earlier rows
        place = np.arange(num_tokens) - np.repeat(before, counts)
        position = np.repeat([row.start for row in rows], counts) + place
        slot = np.repeat(slots, counts)
        constants = self.slots.host_constants[slot]
        inputs[TOKEN, :num_tokens] = [token for row in rows for token in row.tokens]
        inputs[POSITION, :num_tokens] = position
        inputs[ROTARY, :num_tokens] = position + constants[:, ROPE_DELTA]
        inputs[SLOT_ID, :num_tokens] = slot
        blocks = self.slots.host_tables[slot, position // block_size].astype(np.int64)
        inputs[CACHE_SLOT, :num_tokens] = blocks * block_size + position % block_size
        state = state[:num_tokens]
        state[:] = -1
        state[:, sampling.POSITION] = position
        state[:, sampling.ACTIVE] = 1
        state[:, sampling.SEED] = constants[:, SEED]
        state[:, sampling.LAST] = position + 1
        state[:, sampling.TOKEN] = 0
        state[:, sampling.TOP_K] = constants[:, TOP_K]
        options[:num_tokens] = self.slots.host_options[slot]
        self._upload(num_tokens, self.size_of(num_tokens), np.flatnonzero(place % GROUP_ROWS == 0))

    def _pad_rows(self, size: int) -> None:
        self._upload(0, size, np.arange(0))

    def _num_groups(self, num_rows: int) -> int:
        """Most groups of the rows: of sequences in all slots, whose last groups have a single row, and of padding."""
        num_sequences = self.slots.padding_slot + 1
        return min(num_rows, (num_rows + (GROUP_ROWS - 1) * num_sequences) // GROUP_ROWS)

    def _upload(self, num_tokens: int, size: int, group_starts: np.ndarray) -> None:
        """The rows from `num_tokens` on write nothing. group_starts: the first row of each group of the others."""
        inputs, state, starts = (t.numpy() for t in (self._host.inputs, self._host.state, self._host.group_starts))
        inputs[:, num_tokens:size] = 0
        inputs[SLOT_ID, num_tokens:size] = self.slots.padding_slot
        inputs[CACHE_SLOT, num_tokens:size] = -1
        state[num_tokens:size] = 0
        num_groups = len(group_starts)
        of_padding = np.arange(num_tokens, size, GROUP_ROWS)
        starts[:num_groups] = group_starts
        starts[num_groups:] = size
        starts[num_groups : num_groups + len(of_padding)] = of_padding
        # the next one follows at once if these are only padding
        self.rows.words.copy_(self._host.words, non_blocking=num_tokens > 0)

    def _step(self, size: int, filtered: bool) -> None:
        runner = self.runner
        rows, inputs = self.rows, self.rows.inputs[:, :size]
        attention = CudaDecodeAttention(
            runner.cache_addresses,
            runner.block_size,
            self.slots.tables,
            inputs[SLOT_ID],
            inputs[POSITION],
            inputs[CACHE_SLOT],
            self.max_splits,
            runner.has_fp8_cache,
            group_starts=rows.group_starts[: self._num_groups(size) + 1],
        )
        hidden = runner.forward(inputs[TOKEN : TOKEN + 1], inputs[ROTARY : ROTARY + 1], attention)
        logits = runner.logits(hidden)
        row_ids = self._row_ids[:size]
        sampling.sample(
            logits,
            *(rows.state, rows.options, row_ids, self._first_step, self.tokens, self.log_probs),
            filtered=filtered,
            excluded=runner.placeholders,
        )
        if runner.exact:
            temperatures = rows.options[:size, sampling.TEMPERATURE]
            temperatures = torch.where(temperatures > 0, temperatures, 1.0)
            self.log_probs[0, :size] = row_log_probs(logits, self.tokens[0, :size].clamp_min(0), temperatures)
