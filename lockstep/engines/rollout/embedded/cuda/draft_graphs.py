"""Decode steps with drafts as CUDA graphs: a row per token, one graph per number of tokens, captured when first needed.

    texts ─► best match of each sequence ─► drafts that are likeliest to be right ─► a row per token
          ─► model ─► logits ─► sample each row ─► keep what agrees ─► texts, decode slots, outputs

A step never returns to the host. The rows of a sequence have one block table and consecutive positions. All keys and values are
written first, then read once for each group of up to `GROUP_ROWS` rows.
"""

from bisect import bisect_left
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_attention import CudaDecodeAttention
from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots
from lockstep.engines.rollout.embedded.cuda.draft_texts import DraftTexts
from lockstep.engines.rollout.embedded.cuda.graphs import DecodeGraphs
from lockstep.engines.rollout.embedded.drafter import DraftCounts
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.kernels import draft_rows, sampling
from lockstep.kernels.draft_decode import GROUP_ROWS
from lockstep.kernels.draft_rows import CACHE_SLOT, POSITION, ROTARY, SLOT_ID, TOKEN
from lockstep.kernels.draft_search import LANES, MAX_FOLLOWING, find_drafts
from lockstep.kernels.linear_log_prob import row_log_probs
from lockstep.utils.device import HostCopy


@dataclass(frozen=True)
class DraftOutputs:
    """What steps with drafts sampled.

    tokens, log_probs: (steps, slots, 1 + most drafts) what was kept, then token -1.
    drafted:           (steps, slots) draft tokens that were computed.
    curve:             of `draft_rows.allot` in the last step.
    columns:           the slot of each sequence.
    """

    tokens: HostCopy
    log_probs: HostCopy
    drafted: HostCopy
    curve: HostCopy
    columns: list[int]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """The kept tokens of each sequence, of all steps, and their log-probs."""
        tokens, log_probs = (self._of_sequences(each).swapaxes(0, 1) for each in (self.tokens, self.log_probs))
        is_kept = tokens >= 0
        ends = np.cumsum(is_kept.sum((1, 2)))[:-1]
        parts = (np.split(values[is_kept], ends) for values in (tokens, log_probs))
        found_tokens, found_log_probs = ([part.tolist() for part in each] for each in parts)
        return found_tokens, found_log_probs

    @cached_property
    def counts(self) -> DraftCounts:
        num_kept = (self._of_sequences(self.tokens) >= 0).sum(2)
        drafted = self._of_sequences(self.drafted)
        runs = num_kept > 0
        num_failed = int((runs & (num_kept <= drafted)).sum())
        return DraftCounts(int(runs.sum()), int(num_kept.sum()), int(drafted.sum()), num_failed)

    def _of_sequences(self, copy: HostCopy) -> np.ndarray:
        values: np.ndarray = copy.read().numpy()[:, self.columns]
        return values


class DraftGraphs(DecodeGraphs):
    """
    sizes:     tokens of the graphs, ascending.
    max_draft: most draft tokens of a sequence per step.
    inputs:    (NUM_INPUTS, R) of the model, per token; `row_state` and `row_options` are how it is sampled.
    outputs:   tokens, log-probs and numbers of drafts as in `DraftOutputs`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        slots: DecodeSlots,
        texts: DraftTexts,
        max_model_len: int,
        use_graphs: bool,
        sizes: Rows[int],
        max_draft: int,
    ) -> None:
        super().__init__(runner, slots, max_model_len, use_graphs)
        self.texts = texts
        self.sizes = sizes
        self.max_draft = min(max_draft, MAX_FOLLOWING)
        device, num_rows, num_slots = slots.device, sizes[-1], slots.padding_slot + 1
        num_steps = len(slots.sampled)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.inputs = zeros(draft_rows.NUM_INPUTS, num_rows)
        self.row_state = zeros(num_rows, sampling.STOPS + sampling.MIN_STOPS)
        self.row_state[:, sampling.STOPS :] = -1
        self.row_options = zeros(num_rows, sampling.NUM_OPTIONS, dtype=torch.float32)
        self.outputs = (
            zeros(num_steps, num_slots, 1 + self.max_draft, dtype=torch.int32),
            zeros(num_steps, num_slots, 1 + self.max_draft, dtype=torch.float32),
            zeros(num_steps, num_slots, dtype=torch.int32),
        )
        self.step = zeros(1, dtype=torch.int32)
        self._group_starts = zeros(self._num_groups(num_rows) + 1)
        self._curve = zeros(2 * draft_rows.NUM_LEVELS + 1, dtype=torch.float32)
        self._found = zeros(len(slots.slot_ids), LANES)
        self._rows = zeros(len(slots.slot_ids), draft_rows.NUM_ROW_FIELDS)
        self._totals = zeros(2, dtype=torch.int32)
        self._row_ids = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._sampled = zeros(1, num_rows, dtype=torch.int32)
        self._log_probs = zeros(1, num_rows, dtype=torch.float32)
        self._first_step = zeros(1, dtype=torch.int32)

    def survey(self, num_rows: int) -> None:
        """Fill the curve for the sequences in the first rows, and compute no drafts."""
        self._allot(self.slots.slot_ids[:num_rows], budget=0)

    def copy_outputs(self, columns: list[int], num_steps: int) -> DraftOutputs:
        """The outputs of the last `num_steps` steps."""
        tokens, log_probs, drafted = (HostCopy(each[:num_steps]) for each in self.outputs)
        return DraftOutputs(tokens, log_probs, drafted, self.copy_curve(), columns)

    def copy_curve(self) -> HostCopy:
        return HostCopy(self._curve)

    def size_of(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def num_sequences(self, size: int) -> int:
        """Rows of the decode slots that a step of `size` tokens reads."""
        return min(size, len(self.slots.slot_ids))

    @property
    def cache_slots(self) -> Tensor:
        return self.inputs[CACHE_SLOT]

    def _pad_rows(self, size: int) -> None:
        self.slots.set_rows([], self.num_sequences(size))

    def _num_groups(self, num_rows: int) -> int:
        """Most groups of the rows: of sequences in all slots, whose last groups have a single row, and of padding."""
        num_sequences = self.slots.padding_slot + 1
        return min(num_rows, (num_rows + (GROUP_ROWS - 1) * num_sequences) // GROUP_ROWS)

    def _allot(self, slot_ids: Tensor, budget: int) -> None:
        slots, texts = self.slots, self.texts
        find_drafts(
            *(texts.tokens, texts.lengths, texts.segments, slots.slot_state, slot_ids, self._found),
            width=texts.width,
            max_draft=self.max_draft,
        )
        draft_rows.allot(
            *(self._found, slots.slot_state, slot_ids, texts.lengths, texts.row_rates, texts.kind_rates, texts.priors),
            *(self._rows, self._totals, self._curve, self.step),
            budget=budget,
            ring=len(self.outputs[0]),
            max_draft=self.max_draft,
        )

    def _step(self, size: int, filtered: bool) -> None:
        runner, slots, texts = self.runner, self.slots, self.texts
        slot_ids = slots.slot_ids[: self.num_sequences(size)]
        inputs = self.inputs[:, :size]
        group_starts = self._group_starts[: self._num_groups(size) + 1]
        self._allot(slot_ids, size)
        draft_rows.fill(
            *(self._rows, self._totals, texts.tokens, slots.slot_state, slots.slot_options, slot_ids, slots.tables),
            *(slots.rope_deltas, self.inputs, self.row_state, self.row_options, group_starts),
            size=size,
            block_size=runner.block_size,
            max_draft=self.max_draft,
        )
        attention = CudaDecodeAttention(
            runner.cache_addresses,
            runner.block_size,
            slots.tables,
            inputs[SLOT_ID],
            inputs[POSITION],
            inputs[CACHE_SLOT],
            self.max_splits,
            runner.has_fp8_cache,
            group_starts=group_starts,
        )
        hidden = runner.forward(inputs[TOKEN : TOKEN + 1], inputs[ROTARY : ROTARY + 1], attention)
        logits = runner.logits(hidden)
        sampling.sample(
            logits,
            *(self.row_state, self.row_options, self._row_ids[:size], self._first_step, self._sampled, self._log_probs),
            filtered=filtered,
            excluded=runner.placeholders,
        )
        if runner.exact:
            temperatures = self.row_options[:size, sampling.TEMPERATURE]
            temperatures = torch.where(temperatures > 0, temperatures, 1.0)
            self._log_probs[0, :size] = row_log_probs(logits, self._sampled[0, :size].clamp_min(0), temperatures)
        draft_rows.accept(
            *(self._rows, slot_ids, slots.slot_state, self.inputs, self._sampled, self._log_probs),
            *(texts.tokens, texts.lengths, texts.row_rates, texts.kind_rates, self.step, *self.outputs),
            width=texts.width,
        )
