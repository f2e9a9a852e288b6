"""The embedded rollout engine: decodes with the trainer's own parameters, in the trainer's process.

requests ─► sequences ─► [ schedule ─► run ─► append tokens ]* ─► completions

New requests join at the next step.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.engines.rollout.embedded import sequence as sequences
from lockstep.engines.rollout.embedded.answer_lengths import AnswerLengths
from lockstep.engines.rollout.embedded.block_manager import BlockManager
from lockstep.engines.rollout.embedded.drafter import Drafter
from lockstep.engines.rollout.embedded.history import EndedAnswers
from lockstep.engines.rollout.embedded.memory_limits import MemoryLimits
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.scheduler import Scheduler
from lockstep.engines.rollout.embedded.step_loop import StepLoop
from lockstep.engines.rollout.rollout_engine import (
    ModuleEngine,
    check_against_transformers,
    longest_sequence,
    stop_tokens,
)
from lockstep.models.exact_models import check_exact
from lockstep.models.split_weights import split_model, split_of
from lockstep.models.tensor_group import tensor_group
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.utils.progress import phase

logger = logging.getLogger(__name__)
_DRAFTS_KEY = "actor_rollout_ref.rollout.history_drafts.enable"


class EmbeddedEngine(ModuleEngine):
    """Continuous batching over a paged KV cache and state slots, with the parameters of the model given to `bind`.

    With `tensor_model_parallel_size` > 1 that many ranks hold the model and its cache together (`models/split_weights.py`). They
    get the same requests and take the same steps; all methods are collective then.

    num_blocks: size of the KV cache; None sizes it within `gpu_memory_utilization` (CPU: for the requests at hand; CUDA: for
                `max_num_seqs` sequences of the maximum length).
    """

    info = ROLLOUT_ENGINES.built_in["embedded"]

    def __init__(
        self, config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int, num_blocks: int | None = None
    ) -> None:
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = longest_sequence(config)
        self.num_blocks = num_blocks
        self.runner: ModelRunner | None = None
        self.step_loop: StepLoop | None = None
        self.scheduler = Scheduler(
            BlockManager(0, config.kv_block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            chunked=config.enable_chunked_prefill,
            share_prompts=config.enable_prefix_caching,
        )
        self.answer_lengths = AnswerLengths()
        self.scheduler.expected_length = lambda sequence: self.answer_lengths.expected(sequence.prompt_key)
        self.limits = MemoryLimits(self.scheduler)
        self.drafter = Drafter(config.history_drafts, config.max_num_seqs) if config.history_drafts.enable else None
        self._marked: tuple[dict[str, Any], EndedAnswers | None] | None = None
        self._model_is_checked = False
        self._logged_limits: set[str] = set()
        self._num_added = 0
        self._busy = False
        self._sequences: dict[int, sequences.Sequence] = {}  # unfinished, by request id
        self._arrived: list[sequences.Sequence] = []  # not yet known to the scheduler

    def bind(self, model: nn.Module) -> None:
        self.sleep()
        group = tensor_group(self.config.tensor_model_parallel_size)
        if group is not None and split_of(model) is None:
            split_model(cast(PreTrainedModel, model), group)
        use_graphs = not self.config.enforce_eager and (group is None or group.fits_cuda_graphs)
        self.runner = ModelRunner(
            model,
            self.config.kv_block_size,
            group,
            records_routes=self.config.enable_rollout_routing_replay,
            quantization=self.config.quantization,
            exact=self.config.exact,
        )
        if self.drafter is not None and self.runner.device.type == "cuda":
            self.drafter.use_cuda()
        self.step_loop = StepLoop(
            self.runner, self.scheduler, self.limits, self.max_model_len, use_graphs, self.drafter
        )
        self._model_is_checked = False

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._busy:
            raise RuntimeError("weights cannot be updated while requests are running")
        super().update_weights(weights)

    def sleep(self) -> None:
        assert not self.scheduler.has_unfinished, "sleep while requests are running"
        if self.runner is not None:
            self.limits.drop_cache(self.runner)
            # CUDA graphs hold addresses: capturing them again costs more than the memory
            has_graphs = self.runner.device.type == "cuda" and not self.config.enforce_eager
            if self.runner.fp8 is not None and not has_graphs:
                self.runner.fp8.free()

    def lowered_limits(self) -> dict[str, float]:
        return self.limits.metrics()

    def draft_metrics(self) -> dict[str, float]:
        return {} if self.drafter is None else self.drafter.take_metrics()

    def mark_state(self) -> None:
        self._marked = self._state()

    def saved_state(self, *, marked: bool = False) -> dict[str, Any]:
        lengths, answers = self._marked if marked and self._marked is not None else self._state()
        if self.drafter is None or answers is None:
            return {"answer_lengths": lengths}
        return {"answer_lengths": lengths, "answers": self.drafter.history.state_dict(answers)}

    def _state(self) -> tuple[dict[str, Any], EndedAnswers | None]:
        return self.answer_lengths.state_dict(), None if self.drafter is None else self.drafter.history.ended()

    def load_states(self, own: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]]) -> None:
        self._marked = None
        if self.drafter is not None:
            self.drafter.history.clear()
        of_others, of_own = self._load_answers(others), self._load_answers(own)
        self.answer_lengths.load_states(of_own or of_others)

    def _load_answers(self, states: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add their answers to the history, one state after another; returns their lengths."""
        lengths = []
        for state in states:
            lengths.append(state["answer_lengths"])
            if self.drafter is not None and "answers" in state:
                self.drafter.history.add_state(state["answers"])
        return lengths

    @contextmanager
    def serving(self) -> Iterator[None]:
        if self._busy:
            raise RuntimeError("the rollout engine is already generating")
        runner, step_loop = self._bound
        self._busy = True
        try:
            with runner.serving():
                self._check_model()
                if self.drafter is not None:
                    self.drafter.begin_serving()
                with runner.quantized():
                    yield
        finally:
            if self.drafter is not None:
                self.drafter.end_serving()
            self._busy = False
            self._sequences.clear()
            self._arrived.clear()
            self.scheduler.abort()
            step_loop.reset()
            runner.images.forget()

    def add(self, request_id: int, request: GenerationRequest) -> None:
        self._num_added += 1
        stop_ids = stop_tokens(request.sampling, self.eos_token_ids)
        sequence = sequences.Sequence(self._num_added, request_id, request, stop_ids, self.policy_version)
        sequence.images = self._bound[0].images.find(request)
        self._sequences[request_id] = sequence
        self._arrived.append(sequence)
        if self.drafter is not None and self._model_is_checked:
            self.drafter.follow(sequence)

    def step(self) -> dict[int, Completion]:
        if self._arrived:
            self._schedule(self._arrived)
            self._arrived = []
        finished = self._bound[1].step()
        for sequence in finished:
            del self._sequences[sequence.request_id]
            if self._model_is_checked and not sequence.request.sampling.ignore_eos:
                self.answer_lengths.add(sequence.prompt_key, sequence.num_generated)
        return {sequence.request_id: sequence.completion() for sequence in finished}

    def unfinished(self) -> list[int]:
        return list(self._sequences)

    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        chosen = [self._sequences.pop(request_id) for request_id in request_ids if request_id in self._sequences]
        if chosen:
            self._bound[1].drain()
            for sequence in chosen:
                self._drop(sequence)
        return {sequence.request_id: sequence.completion() for sequence in chosen}

    def _drop(self, sequence: sequences.Sequence) -> None:
        if sequence in self._arrived:
            self._arrived.remove(sequence)
        elif sequence.stop_reason is None:
            self.scheduler.drop(sequence)
        else:
            self._bound[1].finished.remove(sequence)
        sequence.stop_reason = sequence.stop_reason or "abort"
        if self.drafter is not None:
            self.drafter.end(sequence)

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    @property
    def module(self) -> nn.Module:
        return self._bound[0].model

    @property
    def _bound(self) -> tuple[ModelRunner, StepLoop]:
        if self.runner is None or self.step_loop is None:
            raise RuntimeError("the rollout engine has no model yet: call bind(model) first")
        return self.runner, self.step_loop

    def _check_model(self) -> None:
        """Compare with transformers once per `bind`; at the first request, when the weights are there."""
        if self._model_is_checked:
            return
        runner = self._bound[0]
        model = runner.model
        if self.drafter is not None and runner.layer_states():
            raise ValueError(
                f"{_DRAFTS_KEY}=true: {type(model).__name__} has recurrent states, which rejected drafts would change; set false"
            )
        if self.config.kv_cache_dtype is not None:
            runner.check_fp8_cache()
        self.limits.has_whole_prompts = runner.has_whole_prompts
        if not self.limits.has_lowered_tokens:
            self.scheduler.chunked = self.config.enable_chunked_prefill and not runner.has_whole_prompts
        block_size = self.config.kv_block_size
        max_length = self.max_model_len
        if self.num_blocks is not None:
            max_length = min(max_length, self.num_blocks * block_size)
        if self.config.exact:
            check_exact(model)
        path = "the embedded rollout"
        advice = "Use actor_rollout_ref.rollout.name=hf for this model."
        with phase("check the model"):
            check_against_transformers(self._run, model, max_length, block_size, path=path, advice=advice)
        if self.config.kv_cache_dtype is not None:  # the check was in the model's precision, and so is its cache
            self.limits.drop_cache(runner)
            self._logged_limits.clear()
            runner.quantize_cache()
        self._model_is_checked = True

    def _schedule(self, batch: Sequence[sequences.Sequence]) -> None:
        for sequence in batch:
            self.scheduler.add(sequence)
        self._grow_cache()
        num_stop_ids = max(len(sequence.stop_ids) for sequence in batch)
        self._bound[1].prepare(max(num_stop_ids, len(self.eos_token_ids)))

    def _grow_cache(self) -> None:
        """Make room for the unfinished sequences, within the memory limit."""
        needed = [self.blocks.blocks_for(s.max_cached) for s in self.scheduler.unfinished()]
        num_slots = self._target_num_slots(len(needed))
        num_blocks = self._target_num_blocks(needed, num_slots)
        if self.limits.num_blocks is not None:
            num_blocks = max(min(num_blocks, self.limits.num_blocks), *needed)
        self.limits.grow_cache(self._bound[0], num_blocks, num_slots)
        if max(needed) > self.blocks.num_blocks:
            raise ValueError(
                f"a sequence needs {max(needed)} blocks of {self.config.kv_block_size} tokens, but the KV cache has "
                f"{self.blocks.num_blocks}; raise actor_rollout_ref.rollout.gpu_memory_utilization or lower "
                "actor_rollout_ref.rollout.response_length"
            )

    def _target_num_slots(self, num_unfinished: int) -> int:
        """State slots; 0 if no layer has a state."""
        runner = self._bound[0]
        if not runner.layer_states():
            return 0
        current = self.blocks.num_slots
        wanted = most = self.scheduler.max_num_seqs
        if runner.device.type == "cuda":
            if current:
                return current  # allocated once, at full size
        else:
            wanted = min(most, num_unfinished)
            if wanted <= current:
                return current
            wanted = min(most, max(wanted, 2 * current))
        longest = self.blocks.blocks_for(self.max_model_len) + 1
        limit = max(1, current, runner.max_num_slots(self.config.gpu_memory_utilization, longest))
        if limit < wanted:
            fewer = f"{limit} sequences decode at once, not max_num_seqs={most}"
            self._log_limit("states", f"{fewer}: more states do not fit next to the KV cache")
        return min(wanted, limit)

    def _target_num_blocks(self, needed: list[int], num_slots: int) -> int:
        """needed: most blocks of each unfinished sequence. num_slots: state slots to leave room for."""
        if self.num_blocks is not None:
            return self.num_blocks
        runner = self._bound[0]
        current = self.blocks.num_blocks
        max_num_seqs = min(self.scheduler.max_num_seqs, num_slots) if num_slots else self.scheduler.max_num_seqs
        if runner.device.type == "cuda":
            if current:
                return current  # allocated once, at full size
            target = max_num_seqs * (self.blocks.blocks_for(self.max_model_len) + 1)
        else:
            # one more block per sequence for copies of shared blocks
            target = sum(nlargest(max_num_seqs, needed)) + min(max_num_seqs, len(needed))
            if target <= current:
                return current
            target = max(target, 2 * current)  # single requests must not grow it each time
        limit = runner.max_num_blocks(self.config.gpu_memory_utilization, num_slots)
        if limit < target:
            has = f"the KV cache has {limit} blocks of {self.config.kv_block_size} tokens"
            would_fit = f"{target} would fit {max_num_seqs} sequences: fewer may decode at once"
            self._log_limit("blocks", f"{has}, {would_fit}")
        return min(target, limit)

    def _log_limit(self, kind: str, message: str) -> None:
        """Once per kind."""
        if kind not in self._logged_limits:
            self._logged_limits.add(kind)
            cause = "gpu_memory_utilization and by the memory that the trainer leaves free"
            logger.info("%s (limited by actor_rollout_ref.rollout.%s)", message, cause)
