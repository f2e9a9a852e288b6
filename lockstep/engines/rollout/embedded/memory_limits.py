"""What the embedded engine does at once, and how it does less when memory does not suffice.

    out of memory in          what is lowered, for the rest of the run
    prefill                   tokens per prefill step (a prompt without chunks gets chunks)
    decoding, sampling        sequences that run at once
    both, at the least size   the KV cache
    decoding with drafts      tokens of such a step (`Drafter.lower_tokens`)
    the KV cache              itself, down to the blocks of the longest sequence; then the sequences that have a state

The sequences of the step are undone or preempted first, so that nothing is lost but time: a preempted sequence goes on with its
tokens, and its next token depends only on them, its seed and its position.
"""

import logging

import torch

from lockstep.engines.rollout.embedded.block_manager import BlockManager
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import Scheduler
from lockstep.utils.metrics import MinOverRanks

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
"""Of a prefill step: below it the KV cache is lowered instead."""
_ROLLOUT = "actor_rollout_ref.rollout"


class MemoryLimits:
    """
    scheduler: its `max_num_seqs`, `max_num_tokens` and `chunked` are the limits on sequences and tokens.
    num_blocks: most blocks of the KV cache; None if memory has sufficed.
    has_whole_prompts: whether the model computes the later chunks of a prompt token by token.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_blocks: int | None = None
        self.has_whole_prompts = False
        self._lowered: dict[str, int] = {}

    def metrics(self) -> dict[str, float]:
        """The limits that were lowered."""
        return {f"perf/rollout_limit/{name}": MinOverRanks(limit) for name, limit in self._lowered.items()}

    @property
    def has_lowered_tokens(self) -> bool:
        return "max_num_batched_tokens" in self._lowered

    def lower_seqs(self, num_running: int, reason: str) -> bool:
        """Preempt about half of the sequences; False if there is only one. Nothing may be in flight."""
        if num_running <= 1:
            return False
        limit = min(self.scheduler.max_num_seqs, num_running // 2)
        self.scheduler.max_num_seqs = limit
        self.scheduler.preempt_above(limit)
        self._note("max_num_seqs", limit, f"{num_running} sequences at once", reason)
        return True

    def lower_tokens(self, num_tokens: int, reason: str) -> bool:
        """Halve the tokens of a prefill step that has failed; False if they are few."""
        if num_tokens <= LEAST_TOKENS:
            return False
        if not self.scheduler.chunked:
            self.scheduler.chunked = True
            slow = "which is slow: the model computes all but the first chunk token by token"
            despite = f"despite {_ROLLOUT}.enable_chunked_prefill=false"
            logger.warning(
                "prompts are prefilled in chunks from now on, %s", slow if self.has_whole_prompts else despite
            )
        limit = min(self.scheduler.max_num_tokens, max(LEAST_TOKENS, num_tokens // 2))
        self.scheduler.max_num_tokens = limit
        self._note("max_num_batched_tokens", limit, f"a prefill step of {num_tokens} tokens", reason)
        return True

    def shrink_cache(self, runner: ModelRunner, reason: str) -> None:
        """Replace the KV cache by one of half its blocks; MemoryError if it has only those of the longest sequence."""
        scheduler = self.scheduler
        if not scheduler.has_unfinished:
            return
        current = scheduler.blocks.num_blocks
        least = self._blocks_of_longest()
        if current <= least:
            raise self._too_long(reason)
        scheduler.preempt_above(0)
        num_slots = min(scheduler.max_num_seqs, scheduler.blocks.num_slots)
        self.drop_cache(runner)
        self._note("kv_blocks", max(least, current // 2), f"a step with a KV cache of {current} blocks", reason)
        self.grow_cache(runner, max(least, current // 2), num_slots)

    def drop_cache(self, runner: ModelRunner) -> None:
        runner.cache = None
        self.scheduler.blocks = BlockManager(0, self.scheduler.blocks.block_size)

    def grow_cache(self, runner: ModelRunner, num_blocks: int, num_slots: int) -> None:
        """Grow the KV cache to this many blocks and state slots, or as far as memory allows; MemoryError if the longest sequence
        does not fit then. There are fewer slots only if they do not fit with the fewest blocks."""
        blocks = self.scheduler.blocks
        least_blocks = max(blocks.num_blocks, self._blocks_of_longest())
        least_slots = max(blocks.num_slots, min(1, num_slots))
        all_blocks, all_slots = num_blocks, num_slots
        shortage = ""
        while num_blocks > blocks.num_blocks or num_slots > blocks.num_slots:
            if not (reason := runner.allocate(num_blocks, num_slots)):
                blocks.grow(num_blocks, num_slots)
                break
            shortage = reason
            if runner.device.type == "cuda":
                torch.cuda.empty_cache()
            if num_blocks > least_blocks:
                num_blocks = max(least_blocks, num_blocks // 2)
            elif num_slots > least_slots:
                num_blocks, num_slots = all_blocks, max(least_slots, num_slots // 2)
            else:
                raise self._too_long(reason)
        if num_blocks < all_blocks:
            self._note("kv_blocks", num_blocks, f"a KV cache of {all_blocks} blocks", shortage)
        if num_slots < all_slots:
            self.scheduler.max_num_seqs = num_slots
            self._note("max_num_seqs", num_slots, f"the states of {all_slots} sequences", shortage)

    def _blocks_of_longest(self) -> int:
        blocks = self.scheduler.blocks
        return max(blocks.blocks_for(s.max_cached) for s in self.scheduler.unfinished())

    def _too_long(self, reason: str) -> MemoryError:
        longest = max(self.scheduler.unfinished(), key=lambda s: s.max_cached)
        return MemoryError(
            f"a single sequence of {longest.num_prompt} prompt tokens and up to {longest.request.sampling.max_tokens} new ones "
            f"does not fit: {reason}; lower data.max_response_length or data.max_prompt_length, or give the rollout more memory "
            f"(actor_rollout_ref.actor.fsdp_config.optimizer_offload=true, {_ROLLOUT}.tensor_model_parallel_size)"
        )

    def _note(self, name: str, limit: int, tried: str, reason: str) -> None:
        self._lowered[name] = limit
        if name == "kv_blocks":
            self.num_blocks = limit
            now = f"it has {limit} blocks from now on; lower {_ROLLOUT}.gpu_memory_utilization"
        else:
            now = f"the limit is {limit} from now on; set {_ROLLOUT}.{name}={limit} or lower {_ROLLOUT}.gpu_memory_utilization"
        logger.warning("out of memory for %s (%s): %s", tried, reason, now)
