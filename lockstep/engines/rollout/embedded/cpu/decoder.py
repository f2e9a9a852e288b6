"""Decode windows on the CPU, in plain torch.

    rows ─► [ model ─► logits ─► sample ─► check stops ]* ─► tokens and log-probs, read at the end of the window

The cached keys and values and the states of all rows are gathered once per window. A row that has stopped keeps decoding (wasted)
until the window ends, which happens as soon as a fixed share of the rows have stopped.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cpu.decode_attention import CpuDecodeAttention
from lockstep.engines.rollout.embedded.draft_step import KeptTokens, draft_rows, kept_tokens, sampled_positions
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.prefill import PrefillInputs
from lockstep.engines.rollout.embedded.sampler import SampledTokens, SamplingBatch, sample, uniform
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow
from lockstep.engines.rollout.embedded.sequence import Sequence

MAX_STOPPED = 1 / 8
"""A window ends once this share of its rows have stopped."""
CPU = torch.device("cpu")


class CpuDecoder:
    finds_drafts = False
    max_in_flight = 0
    num_steps = 32

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def reset(self) -> None:
        """Nothing is kept between windows."""

    def free_memory(self) -> None:
        """Nothing is kept between windows."""

    def disable_graphs(self) -> bool:
        return False

    def sample_first(self, sequences: Rows[Sequence], logits_NV: Tensor) -> SampledTokens:
        batch, uniform_SN = self._sampling(sequences, num_steps=1)
        tokens_N, log_probs_N = sample(logits_NV, batch, uniform_SN[0])
        return SampledTokens(tokens_N[None], log_probs_N[None], list(range(len(tokens_N))))

    def prepare(self, window: DecodeWindow) -> bool:
        return False

    def run(self, window: DecodeWindow) -> SampledTokens:
        runner = self.runner
        assert runner.cache is not None
        window.rows.sort(key=lambda row: len(row[0].blocks))  # short tables first, as `CpuDecodeAttention` expects
        sequences = [sequence for sequence, _ in window.rows]
        batch, uniform_SN = self._sampling(sequences, window.num_steps)
        stop_ids = frozenset[int]().union(*(s.stop_ids for s in sequences))
        ends_N = np.array(
            [s.request.sampling.max_tokens - s.num_generated for s in sequences]
        )  # steps until each stops
        steps_S1 = np.arange(window.num_steps)[:, None]
        first_N = np.array([len(s.tokens) - 1 for s in sequences])
        positions_SN = torch.from_numpy(first_N + np.minimum(steps_S1, ends_N - 1))
        state_slots = [s.state_slot for s in sequences if s.state_slot is not None]
        slots_N = torch.tensor(state_slots) if state_slots else None
        attention = CpuDecodeAttention(runner.cache, [s.blocks for s in sequences], positions_SN, slots_N)
        slots_SN = _cache_slots(sequences, positions_SN.numpy(), runner.block_size) if runner.records_routes else None
        rotary_SN = positions_SN + torch.tensor([s.rope_delta for s in sequences])
        tokens_N = torch.tensor([s.tokens[-1] for s in sequences])
        sampled = []
        for step, (rotary_N, uniform_N) in enumerate(zip(rotary_SN, uniform_SN), start=1):
            attention.begin()
            hidden_NE = runner.forward(tokens_N[None], rotary_N[None], attention)
            if slots_SN is not None:
                runner.keep_routes(torch.from_numpy(np.where(ends_N >= step, slots_SN[step - 1], -1)), runner.routes)
            tokens_N, log_probs_N = sample(runner.logits(hidden_NE), batch, uniform_N)
            sampled.append((tokens_N, log_probs_N))
            new = tokens_N.tolist()
            if not stop_ids.isdisjoint(new):
                stopped = [token in s.stop_ids for token, s in zip(new, sequences)]
                ends_N = np.where(stopped, np.minimum(ends_N, step), ends_N)
            if (ends_N <= step).mean() >= MAX_STOPPED:
                break
        if ends_N.max() > step:
            attention.write_back()
        tokens_SN, log_probs_SN = (torch.stack(rows) for rows in zip(*sampled))
        tokens_SN[torch.from_numpy(steps_S1[:step] >= ends_N)] = -1
        return SampledTokens(tokens_SN, log_probs_SN, list(range(len(sequences))))

    def run_drafts(self, window: DecodeWindow) -> KeptTokens:
        runner = self.runner
        assert runner.cache is not None
        counts = {sequence.index: count for sequence, count in window.rows}
        inputs = PrefillInputs(draft_rows(window), runner.cache)
        window.rows = [(row.sequence, counts[row.sequence.index]) for row in inputs.rows]
        hidden_TE = runner.forward(inputs.token_ids, inputs.position_ids, inputs.attention)
        runner.keep_routes(inputs.attention.slots, runner.routes)
        sequences, positions_T = sampled_positions(inputs.rows)
        batch = SamplingBatch([s.request.sampling for s in sequences], CPU, runner.placeholders)
        uniform_T = uniform([s.request.seed for s in sequences], positions_T)
        tokens_T, log_probs_T = sample(runner.logits(hidden_TE), batch, uniform_T)
        return kept_tokens(inputs.rows, tokens_T.numpy(), log_probs_T.numpy())

    def _sampling(self, sequences: Rows[Sequence], num_steps: int) -> tuple[SamplingBatch, Tensor]:
        """The sampling parameters, and random numbers (steps, N)."""
        positions = np.array([len(s.tokens) for s in sequences]) + np.arange(num_steps)[:, None]
        batch = SamplingBatch([s.request.sampling for s in sequences], CPU, self.runner.placeholders)
        return batch, uniform([s.request.seed for s in sequences], positions)


def _cache_slots(sequences: Rows[Sequence], positions_SN: np.ndarray, block_size: int) -> np.ndarray:
    """(steps, N) where the tokens at these positions are cached."""
    columns = zip(sequences, positions_SN.T)
    slots = [np.array(s.blocks)[place // block_size] * block_size + place % block_size for s, place in columns]
    return np.stack(slots, 1)
