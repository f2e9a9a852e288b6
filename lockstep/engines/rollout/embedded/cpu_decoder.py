"""Windows of decode steps on the CPU, in plain torch.

    rows of the window ─► [ decoder ─► head ─► draw ─► stop or move on ]* ─► tokens and log-probs, read at the end

What a row needs is put into tensors once a window; the keys and values it sees are gathered once a window too. A row that has
stopped repeats its last step until the window ends, which it does as soon as a good part of the rows have stopped.
"""

from collections.abc import Sequence as Rows
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample
from lockstep.engines.rollout.embedded.scheduler import Window
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.models.paged_attention import WindowAttention

IDLE_SHARE = 8
"""A window ends when one in so many rows has stopped: going on would compute too much for nothing."""


@dataclass(frozen=True)
class DrawnOnHost:
    """tokens, log_probs: (steps, N), -1 where nothing was drawn."""

    tokens: Tensor
    log_probs: Tensor

    @property
    def num_steps(self) -> int:
        return len(self.tokens)

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return self.tokens.T.tolist(), self.log_probs.T.tolist()


class CpuDecoder:
    max_in_flight = 0
    num_steps = 32

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def reset(self) -> None:
        """Nothing is kept from one window to the next."""

    def draw_first(self, samplers: Rows[Sequence], logits_NV: Tensor) -> DrawnOnHost:
        batch = sampling_of(samplers, num_steps=1)
        tokens_N, log_probs_N = sample(logits_NV, replace(batch, uniform_N=batch.uniform_N[0]))
        return DrawnOnHost(tokens_N[None], log_probs_N[None])

    def run(self, window: Window) -> DrawnOnHost:
        # inference mode saves a tenth of a small model's time; a module's own forward might keep a tensor that training meets later
        with torch.inference_mode() if self.runner.is_flat else nullcontext():
            return self._run(window)

    def _run(self, window: Window) -> DrawnOnHost:
        runner = self.runner
        assert runner.cache is not None
        window.draws.sort(key=lambda draw: len(draw[0].blocks))  # as `WindowAttention` wants them
        rows = [s for s, _ in window.draws]
        sampling, stops_NS = sampling_of(rows, window.num_steps), stops_of(rows)
        tokens_N = torch.tensor([s.tokens[-1] for s in rows])
        lengths = [len(s.tokens) - 1 for s in rows]
        positions_N = torch.tensor(lengths)
        lasts_N = torch.tensor([s.num_prompt + s.request.sampling.max_tokens - 1 for s in rows])
        active_N = torch.ones(len(rows), dtype=torch.bool)
        attention = WindowAttention(runner.cache, [s.blocks for s in rows], lengths, window.num_steps)
        drawn, log_probs = [], []
        for uniform_N in sampling.uniform_N.unbind():
            attention.begin(positions_N)
            hidden_NE = runner.forward(tokens_N[None], positions_N[None], attention)
            next_N = positions_N + 1
            new_N, log_probs_N = sample(runner.logits(hidden_NE), replace(sampling, uniform_N=uniform_N))
            drawn.append(torch.where(active_N, new_N, -1))
            log_probs.append(log_probs_N)
            active_N = active_N & (next_N < lasts_N) & (new_N[:, None] != stops_NS).all(1)
            num_active = int(active_N.sum())
            if num_active == 0 or (len(rows) - num_active) * IDLE_SHARE >= len(rows):
                break
            if num_active < len(rows):
                new_N, next_N = torch.where(active_N, new_N, tokens_N), torch.where(active_N, next_N, positions_N)
            tokens_N, positions_N = new_N, next_N
        if num_active:
            attention.write_back()
        return DrawnOnHost(torch.stack(drawn), torch.stack(log_probs))


def sampling_of(rows: Rows[Sequence], num_steps: int) -> SamplingBatch:
    """With random numbers (steps, N) for all steps: what makes them costs the same for one."""
    positions = torch.tensor([len(s.tokens) for s in rows]) + torch.arange(num_steps)[:, None]
    params, seeds = [s.request.sampling for s in rows], [s.request.seed for s in rows]
    return SamplingBatch.build(params, seeds, positions, positions.device)


def stops_of(rows: Rows[Sequence]) -> Tensor:
    """(N, S) stop tokens of each row, filled up with -1."""
    width = max(len(s.stop_ids) for s in rows)
    return torch.tensor([[*s.stop_ids, *[-1] * (width - len(s.stop_ids))] for s in rows])
