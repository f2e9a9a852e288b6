"""The embedded rollout engine: decodes with the trainer's own parameters, in the trainer's process.

generate:     requests ─► sequences ─► [ turn: schedule ─► run ─► append tokens ]* ─► completions
generate_one: the same loop in a thread, for as long as there are requests; what comes meanwhile joins at the next turn
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest

from torch import Tensor, nn

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.engines.rollout.base import (
    ROLLOUT_ENGINES,
    Completion,
    GenerationRequest,
    RolloutEngine,
    check_requests,
    copy_weights,
    longest_sequence,
    stop_tokens,
)
from lockstep.engines.rollout.embedded import sequence as sequences
from lockstep.engines.rollout.embedded.blocks import BlockManager
from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import Scheduler
from lockstep.engines.rollout.embedded.turns import Turns


@ROLLOUT_ENGINES.register("embedded")
class EmbeddedEngine(RolloutEngine):
    """Continuous batching over a paged KV cache, with the parameters of the model that `bind` names.

    num_blocks: size of the KV cache; None sizes it by need (CPU: the requests at hand; CUDA: `max_num_seqs` sequences of the
                greatest length) within `gpu_memory_utilization`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        num_blocks: int | None = None,
    ) -> None:
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = longest_sequence(config)
        self.num_blocks = num_blocks
        self.runner: ModelRunner | None = None
        self.turns: Turns | None = None
        self.blocks = BlockManager(0, config.kv_block_size)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            chunked=config.enable_chunked_prefill,
            share_prompts=config.enable_prefix_caching,
        )
        self._num_added = 0
        self._busy = False
        self._incoming: list[tuple[sequences.Sequence, asyncio.Future[Completion]]] = []
        self._loop_task: asyncio.Task[None] | None = None

    def bind(self, model: nn.Module) -> None:
        self.sleep()
        self.runner = ModelRunner(model, self.config.kv_block_size)
        self.turns = Turns(self.runner, self.scheduler, self.max_model_len, graphs=not self.config.enforce_eager)

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._busy:
            raise RuntimeError("weights cannot be updated while requests are running")
        copy_weights(self._bound.model, weights)

    def sleep(self) -> None:
        assert not self.scheduler.has_unfinished, "sleep while requests are running"
        if self.runner is not None:
            self.runner.free()
        self.blocks = self.scheduler.blocks = BlockManager(0, self.config.kv_block_size)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        check_requests(requests, self.max_model_len)
        if not requests:
            return []
        with self._serving():
            batch = [self._sequence(request) for request in requests]
            self._add(batch)
            while self.scheduler.has_unfinished:
                self._step()
        return [sequence.completion() for sequence in batch]

    async def generate_one(self, request: GenerationRequest) -> Completion:
        check_requests([request], self.max_model_len)
        future = asyncio.get_running_loop().create_future()
        self._incoming.append((self._sequence(request), future))
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._serve())
        return await future

    @property
    def _bound(self) -> ModelRunner:
        if self.runner is None:
            raise RuntimeError("the rollout engine has no model yet: call bind(model) first")
        return self.runner

    def _sequence(self, request: GenerationRequest) -> sequences.Sequence:
        self._num_added += 1
        stop_ids = stop_tokens(request.sampling, self.eos_token_ids)
        return sequences.Sequence(self._num_added, request, stop_ids, self.policy_version)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """One loop at a time; whatever stops it, nothing stays scheduled."""
        if self._busy:
            raise RuntimeError(
                "the rollout engine is generating already; use generate_one for requests that run side by side"
            )
        runner, self._busy = self._bound, True
        try:
            assert self.turns is not None
            self.turns.make_room(len(self.eos_token_ids))  # its kernels are compiled while the model is looked at
            with runner.serving():
                yield
        finally:
            self._busy = False
            if self.scheduler.has_unfinished:
                self.scheduler.abort()
            if self.turns is not None:
                self.turns.reset()

    def _add(self, batch: Sequence[sequences.Sequence]) -> None:
        for sequence in batch:
            self.scheduler.add(sequence)
        self._fit_cache()
        assert self.turns is not None
        self.turns.make_room(max(len(sequence.stop_ids) for sequence in batch))

    def _fit_cache(self) -> None:
        """Make the cache large enough for the unfinished sequences, as far as memory goes."""
        runner = self._bound
        lengths = [self.blocks.num_for(s.longest) for s in self.scheduler.unfinished()]
        wanted = self._num_blocks_wanted(lengths)
        if wanted > self.blocks.num_blocks:
            runner.allocate(wanted)
            self.blocks.grow(wanted)
        if max(lengths) > self.blocks.num_blocks:
            raise ValueError(
                f"a sequence needs {max(lengths)} blocks of {self.config.kv_block_size} tokens, the KV cache has "
                f"{self.blocks.num_blocks}; raise actor_rollout_ref.rollout.gpu_memory_utilization or shorten them"
            )

    def _num_blocks_wanted(self, lengths: list[int]) -> int:
        """lengths: blocks that each unfinished sequence may come to need."""
        present, seats = self.blocks.num_blocks, self.config.max_num_seqs
        if self.num_blocks is not None:
            return self.num_blocks
        if self._bound.device.type == "cuda":
            if present:
                return present  # of one size from the start, so that it never moves
            wanted = seats * (self.blocks.num_for(self.max_model_len) + 1)
        else:
            wanted = sum(nlargest(seats, lengths)) + min(seats, len(lengths))  # one more each: copies of shared blocks
            if wanted <= present:
                return present
            wanted = max(wanted, 2 * present)  # requests that come one by one must not move it each time
        return min(wanted, self._bound.max_num_blocks(self.config.gpu_memory_utilization))

    def _step(self) -> list[sequences.Sequence]:
        """One turn; gives the sequences that are found finished."""
        assert self.turns is not None
        return self.turns.turn()

    async def _serve(self) -> None:
        """Step while there are requests; each caller's future gets its completion or the error that ended the loop."""
        futures: dict[int, asyncio.Future[Completion]] = {}
        try:
            with self._serving():
                while self._incoming or self.scheduler.has_unfinished:
                    arrived, self._incoming = self._incoming, []
                    futures.update((sequence.index, future) for sequence, future in arrived)
                    if arrived:
                        self._add([sequence for sequence, _ in arrived])
                    for sequence in await asyncio.to_thread(self._step):
                        future = futures.pop(sequence.index)
                        if not future.cancelled():
                            future.set_result(sequence.completion())
        except Exception as error:  # noqa: BLE001 - handed to the callers
            arrived, self._incoming = self._incoming, []
            for future in [*futures.values(), *(future for _, future in arrived)]:
                if not future.done():
                    future.set_exception(error)
