"""Decode steps with drafts as CUDA graphs: a row per token, one graph per number of tokens, captured when first needed.

    tokens, positions, cache slots and sampling state of all rows, uploaded ─► model ─► logits ─► sample ─► read by the host

The rows of a sequence have one block table and consecutive positions. All keys and values are written before any are read.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_attention import CudaDecodeAttention
from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots, sampling_state
from lockstep.engines.rollout.embedded.cuda.graphs import DecodeGraphs, padded_batch_size
from lockstep.engines.rollout.embedded.draft_step import sampled_positions
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import PrefillRow
from lockstep.kernels import sampling
from lockstep.kernels.linear_log_prob import row_log_probs
from lockstep.utils.device import to_device

TOKEN, POSITION, ROTARY, SLOT_ID, CACHE_SLOT, NUM_INPUTS = range(6)
"""Rows of `DraftGraphs.inputs`, and their number."""


class DraftGraphs(DecodeGraphs):
    """
    inputs:         (NUM_INPUTS, R) of each row: token, positions in the sequence and for the rotary embedding, decode slot (for its
                    block table) and cache slot.
    state, options: what samples each row, like rows of `slot_state` and `slot_options`.
    tokens, log_probs: (1, R) outputs.
    """

    def __init__(
        self, runner: ModelRunner, slots: DecodeSlots, max_model_len: int, use_graphs: bool, max_tokens: int
    ) -> None:
        super().__init__(runner, slots, max_model_len, use_graphs)
        num_rows = padded_batch_size(max_tokens)
        device = slots.device
        self.inputs = torch.zeros(NUM_INPUTS, num_rows, dtype=torch.int64, device=device)
        self.state = torch.zeros(num_rows, sampling.STOPS + sampling.MIN_STOPS, dtype=torch.int64, device=device)
        self.options = torch.zeros(num_rows, sampling.NUM_OPTIONS, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(1, num_rows, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(1, num_rows, dtype=torch.float32, device=device)
        self._first_step = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_ids = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._nowhere = torch.full((num_rows,), -1, dtype=torch.int64, device=device)

    def sample_rows(self, rows: Rows[PrefillRow], slots: Rows[int]) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs (T,) of all positions of the rows, on the host. slots: the decode slot of each row.

        After `prepare` for as many tokens.
        """
        sequences, positions_T = sampled_positions(rows)
        num_tokens = len(sequences)
        filtered = any(row.sequence.request.sampling.filtered for row in rows)
        size = padded_batch_size(num_tokens)
        self._pad_rows(size)
        self.inputs[:, :num_tokens] = to_device(torch.from_numpy(self._inputs(rows, slots)), self.slots.device)
        state, options = sampling_state(sequences, positions_T, self.slots.device)
        self.state[:num_tokens] = state
        self.options[:num_tokens] = options
        self.run(num_tokens, filtered, num_steps=1)
        return self.tokens[0, :num_tokens].cpu().long(), self.log_probs[0, :num_tokens].cpu()

    @property
    def cache_slots(self) -> Tensor:
        return self.inputs[CACHE_SLOT]

    def _inputs(self, rows: Rows[PrefillRow], slots: Rows[int]) -> np.ndarray:
        parts = []
        size = self.runner.block_size
        for row, slot in zip(rows, slots):
            place = np.arange(row.start, row.stop)
            part = np.empty((NUM_INPUTS, len(place)), dtype=np.int64)
            part[TOKEN] = row.tokens
            part[POSITION] = place
            part[ROTARY] = place + row.sequence.rope_delta
            part[SLOT_ID] = slot
            part[CACHE_SLOT] = np.array(row.sequence.blocks)[place // size] * size + place % size
            parts.append(part)
        return np.concatenate(parts, 1)

    def _pad_rows(self, size: int) -> None:
        """Rows that read and write nothing."""
        self.inputs[:, :size] = 0
        self.inputs[SLOT_ID, :size] = self.slots.padding_slot
        self.inputs[CACHE_SLOT, :size] = -1
        self.state[:size] = 0

    def _step(self, size: int, filtered: bool) -> None:
        runner = self.runner
        inputs = self.inputs[:, :size]
        attention = CudaDecodeAttention(
            runner.cache_addresses,
            runner.block_size,
            self.slots.tables,
            inputs[SLOT_ID],
            inputs[POSITION],
            inputs[CACHE_SLOT],
            self.max_splits,
            runner.has_fp8_cache,
            nowhere=self._nowhere[:size],
        )
        hidden = runner.forward(inputs[TOKEN : TOKEN + 1], inputs[ROTARY : ROTARY + 1], attention)
        logits = runner.logits(hidden)
        row_ids = self._row_ids[:size]
        sampling.sample(
            logits,
            *(self.state, self.options, row_ids, self._first_step, self.tokens, self.log_probs),
            filtered=filtered,
            excluded=runner.placeholders,
        )
        if runner.exact:
            temperatures = self.options[:size, sampling.TEMPERATURE]
            temperatures = torch.where(temperatures > 0, temperatures, 1.0)
            self.log_probs[0, :size] = row_log_probs(logits, self.tokens[0, :size].clamp_min(0), temperatures)
