"""Windows of decode steps on the CPU, in plain torch.

    rows of the window ─► [ decoder ─► head ─► draw ─► stop or move on ]* ─► tokens and log-probs, read at the end

What a row needs is put into tensors once a window; the keys and values it sees are gathered once a window too. A row that has
stopped goes on, for nothing, until the window ends, which it does as soon as a good part of the rows have stopped.
"""

from bisect import bisect_right
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.sampler import SamplingBatch, draw
from lockstep.engines.rollout.embedded.scheduler import Window
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.models.paged_attention import WindowAttention

IDLE_SHARE = 8
"""A window ends when one in so many rows has stopped: going on would compute too much for nothing."""


@dataclass(frozen=True)
class DrawnOnHost:
    """tokens, log_probs: (N, steps), -1 where nothing was drawn."""

    tokens: Tensor
    log_probs: Tensor

    @property
    def num_steps(self) -> int:
        return self.tokens.shape[1]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return self.tokens.tolist(), self.log_probs.tolist()


class CpuDecoder:
    max_in_flight = 0
    num_steps = 32

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def reset(self) -> None:
        """Nothing is kept from one window to the next."""

    def draw_first(self, samplers: Rows[Sequence], logits_NV: Tensor) -> DrawnOnHost:
        batch = sampling_of(samplers, num_steps=1)
        tokens_N1, probs_N1 = draw(logits_NV, batch, batch.uniform_N.T)
        return DrawnOnHost(tokens_N1, probs_N1.log_())

    def run(self, window: Window) -> DrawnOnHost:
        runner = self.runner
        assert runner.cache is not None
        window.draws.sort(key=lambda pair: len(pair[0].blocks))  # as `WindowAttention` wants them
        rows = [s for s, _ in window.draws]
        sampling = sampling_of(rows, window.num_steps)
        stop_ids = frozenset[int]().union(*(s.stop_ids for s in rows))
        tokens_1N = torch.tensor([[s.tokens[-1] for s in rows]])
        ends = [s.request.sampling.max_tokens - s.num_generated for s in rows]  # steps of each row
        sorted_ends = sorted(ends)
        steps_S = torch.arange(window.num_steps)
        lengths_N = torch.tensor([len(s.tokens) - 1 for s in rows])
        positions_SN = lengths_N + torch.minimum(steps_S[:, None], torch.tensor(ends) - 1)
        attention = WindowAttention(runner.cache, [s.blocks for s in rows], positions_SN)
        drawn, probs = [], []
        inputs = zip(positions_SN[:, None], sampling.uniform_N[..., None])
        for step, (positions_1N, uniform_N1) in enumerate(inputs, start=1):
            attention.begin()
            hidden_NE = runner.forward(tokens_1N, positions_1N, attention)
            tokens_N1, probs_N1 = draw(runner.logits(hidden_NE), sampling, uniform_N1)
            drawn.append(tokens_N1)
            probs.append(probs_N1)
            tokens_1N = tokens_N1.T
            [new] = tokens_1N.tolist()
            if not stop_ids.isdisjoint(new):
                ends = [min(end, step) if token in s.stop_ids else end for end, token, s in zip(ends, new, rows)]
                sorted_ends = sorted(ends)
            if bisect_right(sorted_ends, step) * IDLE_SHARE >= len(rows):
                break
        if max(ends) > step:
            attention.write_back()
        tokens_NS = torch.cat(drawn, 1).masked_fill_(steps_S[:step] >= torch.tensor(ends)[:, None], -1)
        return DrawnOnHost(tokens_NS, torch.cat(probs, 1).log_())


def sampling_of(rows: Rows[Sequence], num_steps: int) -> SamplingBatch:
    """With random numbers (steps, N) for all steps: what makes them costs the same for one."""
    positions = np.array([len(s.tokens) for s in rows]) + np.arange(num_steps)[:, None]
    params, seeds = [s.request.sampling for s in rows], [s.request.seed for s in rows]
    return SamplingBatch.build(params, seeds, positions, torch.device("cpu"))
