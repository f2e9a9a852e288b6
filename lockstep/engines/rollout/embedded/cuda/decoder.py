"""First tokens and decode windows on a CUDA device, launched ahead of the host.

    decode slots ─► steps as CUDA graphs ─► outputs copied to the host after each launch, read once the copy has arrived

The device stops a sequence at a stop token or at `max_tokens` and samples nothing more for it until the host frees its slot.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots
from lockstep.engines.rollout.embedded.cuda.draft_graphs import DraftGraphs
from lockstep.engines.rollout.embedded.cuda.graphs import DecodeGraphs, padded_batch_size
from lockstep.engines.rollout.embedded.draft_step import KeptTokens, draft_rows, kept_tokens
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.sampler import SampledTokens
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow, Scheduler
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.utils.device import to_device


class CudaDecoder:
    """max_stop_ids: most stop tokens of a sequence. draft_sizes: tokens of steps with drafts; none for no such steps."""

    max_in_flight = 2
    num_steps = 8

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        use_graphs: bool,
        max_stop_ids: int,
        draft_sizes: Rows[int] = (),
    ) -> None:
        num_slots = scheduler.max_num_seqs
        width = scheduler.blocks.blocks_for(max_model_len)
        self.slots = DecodeSlots(
            num_slots,
            padded_batch_size(num_slots),
            width,
            max_stop_ids,
            self.num_steps,
            runner.device,
            takes_images=runner.images.takes_images,
        )
        self.graphs = DecodeGraphs(runner, self.slots, max_model_len, use_graphs)
        self.draft_graphs: DraftGraphs | None = None
        if draft_sizes:
            self.draft_graphs = DraftGraphs(runner, self.slots, max_model_len, use_graphs, draft_sizes)

    def reset(self) -> None:
        self.slots.clear()

    def free_memory(self) -> None:
        self.slots.clear()
        for graphs in self._all_graphs():
            graphs.clear()

    def disable_graphs(self) -> bool:
        had_graphs = any(graphs.use_graphs for graphs in self._all_graphs())
        for graphs in self._all_graphs():
            graphs.use_graphs = False
        return had_graphs

    def _all_graphs(self) -> list[DecodeGraphs]:
        return [self.graphs] if self.draft_graphs is None else [self.graphs, self.draft_graphs]

    def sample_first(self, sequences: Rows[Sequence], logits_NV: Tensor) -> SampledTokens:
        slots = self.slots.assign(sequences)
        self.slots.set_states(sequences, slots)
        self.slots.step.zero_()
        slot_ids = to_device(torch.tensor(slots, dtype=torch.int32), self.slots.device)
        self.graphs.sample(logits_NV, slot_ids, any(s.is_filtered for s in sequences))
        return self._copy_outputs(slots, num_steps=1)

    def prepare(self, window: DecodeWindow) -> bool:
        filtered = any(s.is_filtered for s, _ in window.rows)
        if not window.drafts:
            return self.graphs.prepare(len(window.rows), filtered)
        assert self.draft_graphs is not None, "drafts were not expected"
        return self.draft_graphs.prepare(sum(count for _, count in window.rows), filtered)

    def run(self, window: DecodeWindow) -> SampledTokens:
        sequences = [sequence for sequence, _ in window.rows]
        filtered = any(s.is_filtered for s in sequences)
        slots = self.slots.assign(sequences)
        self.slots.set_states(sequences, slots)
        self.slots.set_tables(sequences, slots)
        self.slots.set_rows(slots, padded_batch_size(len(sequences)))
        self.graphs.run(len(sequences), filtered, window.num_steps)
        return self._copy_outputs(slots, window.num_steps)

    def run_drafts(self, window: DecodeWindow) -> KeptTokens:
        assert self.draft_graphs is not None, "drafts were not expected"
        sequences = [sequence for sequence, _ in window.rows]
        slots = self.slots.assign(sequences)
        self.slots.set_tables(sequences, slots)
        rows = draft_rows(window)
        kept = kept_tokens(rows, *self.draft_graphs.sample_rows(rows, slots))
        self.slots.outdate(slots)
        return kept

    def _copy_outputs(self, slots: list[int], num_steps: int) -> SampledTokens:
        """Copy the outputs to pinned memory, in stream order after the launched steps."""
        tokens, log_probs = (
            torch.empty((num_steps, *source.shape[1:]), dtype=source.dtype, pin_memory=True)
            for source in (self.slots.sampled, self.slots.log_probs)
        )
        tokens.copy_(self.slots.sampled[:num_steps], non_blocking=True)
        log_probs.copy_(self.slots.log_probs[:num_steps], non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return SampledTokens(tokens, log_probs, slots, ready)
