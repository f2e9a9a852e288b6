"""First tokens and decode windows on a CUDA device, launched ahead of the host.

    decode slots ─► steps as CUDA graphs ─► outputs copied to the host after each launch, read once the copy has arrived

The device stops a sequence at a stop token or at `max_tokens` and samples nothing more for it until the host frees its slot.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots
from lockstep.engines.rollout.embedded.cuda.draft_graphs import DraftGraphs, DraftOutputs
from lockstep.engines.rollout.embedded.cuda.draft_texts import DraftTexts
from lockstep.engines.rollout.embedded.cuda.graphs import DecodeGraphs, padded_batch_size
from lockstep.engines.rollout.embedded.drafter import Drafter
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.sampler import SampledTokens
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow, Scheduler
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.kernels.draft_rows import append
from lockstep.utils.device import HostCopy, to_device


class CudaDecoder:
    """max_stop_ids: most stop tokens of a sequence. drafter: None for no steps with drafts."""

    finds_drafts = True
    max_in_flight = 2
    num_steps = 8

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        use_graphs: bool,
        max_stop_ids: int,
        drafter: Drafter | None = None,
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
        if drafter is not None and drafter.controller.sizes:
            controller = drafter.controller
            texts = DraftTexts(drafter.history, num_slots, max_model_len, runner.device)
            self.draft_graphs = DraftGraphs(
                *(runner, self.slots, texts, max_model_len, use_graphs, controller.sizes, controller.max_draft_tokens)
            )

    def reset(self) -> None:
        self.slots.clear()
        if self.draft_graphs is not None:
            self.draft_graphs.texts.clear()

    def free_memory(self) -> None:
        self.reset()
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
        slots = self._assign(sequences)
        self.slots.step.zero_()
        slot_ids = to_device(torch.tensor(slots, dtype=torch.int32), self.slots.device)
        self.graphs.sample(logits_NV, slot_ids, any(s.is_filtered for s in sequences))
        self._append(slot_ids, num_steps=1)
        return self._copy_outputs(slots, num_steps=1)

    def prepare(self, window: DecodeWindow) -> bool:
        filtered = any(s.is_filtered for s, _ in window.rows)
        if not window.draft_size:
            return self.graphs.prepare(len(window.rows), filtered)
        assert self.draft_graphs is not None, "drafts were not expected"
        return self.draft_graphs.prepare(window.draft_size, filtered)

    def run(self, window: DecodeWindow) -> SampledTokens:
        sequences = [sequence for sequence, _ in window.rows]
        filtered = any(s.is_filtered for s in sequences)
        slots = self._assign(sequences)
        self.slots.set_tables(sequences, slots)
        size = padded_batch_size(len(sequences))
        self.slots.set_rows(slots, size)
        self.graphs.run(len(sequences), filtered, window.num_steps)
        self._append(self.slots.slot_ids[:size], window.num_steps)
        curve = None
        if window.is_surveyed:
            assert self.draft_graphs is not None, "drafts were not expected"
            self.draft_graphs.survey(len(sequences))
            curve = self.draft_graphs.copy_curve()
        return self._copy_outputs(slots, window.num_steps, curve)

    def run_drafts(self, window: DecodeWindow) -> DraftOutputs:
        """Steps of `window.draft_size` tokens, drafts among them."""
        graphs = self.draft_graphs
        assert graphs is not None, "drafts were not expected"
        sequences = [sequence for sequence, _ in window.rows]
        slots = self._assign(sequences)
        self.slots.set_tables(sequences, slots)
        self.slots.set_rows(slots, graphs.num_sequences(window.draft_size))
        graphs.run(window.draft_size, any(s.is_filtered for s in sequences), window.draft_steps)
        return graphs.copy_outputs(slots, window.draft_steps)

    def _assign(self, sequences: Rows[Sequence]) -> list[int]:
        """The slot of each sequence, with its state and its text."""
        slots = self.slots.assign(sequences)
        self.slots.set_states(sequences, slots)
        if self.draft_graphs is not None:
            self.draft_graphs.texts.update(sequences, slots)
        return slots

    def _append(self, slot_ids: Tensor, num_steps: int) -> None:
        """What was sampled, to the texts."""
        if self.draft_graphs is not None:
            texts = self.draft_graphs.texts
            append(slot_ids, self.slots.sampled, num_steps, texts.tokens, texts.lengths, width=texts.width)

    def _copy_outputs(self, slots: list[int], num_steps: int, curve: HostCopy | None = None) -> SampledTokens:
        """Copy the outputs to pinned memory, in stream order after the launched steps."""
        tokens, log_probs = (
            torch.empty((num_steps, *source.shape[1:]), dtype=source.dtype, pin_memory=True)
            for source in (self.slots.sampled, self.slots.log_probs)
        )
        tokens.copy_(self.slots.sampled[:num_steps], non_blocking=True)
        log_probs.copy_(self.slots.log_probs[:num_steps], non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return SampledTokens(tokens, log_probs, slots, ready, curve)
