"""Drafts from history change no token, for every schedule."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig
from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.cpu.decoder import CpuDecoder
from lockstep.engines.rollout.embedded.draft_controller import (
    USELESS_TOKENS,
    Acceptance,
    DraftController,
    graph_sizes,
)
from lockstep.engines.rollout.embedded.draft_step import num_agreeing
from lockstep.engines.rollout.embedded.drafter import DraftCounts, DraftTotals
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.paged_attention import PagedAttention
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.experts import EXPERTS_NAME
from lockstep.models.known_models import install_decoder_layers
from tests.engines.rollout.exact_machine import skip_unless_exact
from tests.engines.rollout.rollout_cases import (
    DEVICES,
    VOCAB,
    assert_same,
    device_or_skip,
    embedded,
    mixed_requests,
    tiny_model,
)
from tests.models import architectures


class EagerController(DraftController):
    """Drafts whatever there is, up to a length that changes from row to row."""

    def is_open(self, num_rows: int) -> bool:
        return True

    def may_pay(self, rows: Sequence[Acceptance], num_rows: int) -> bool:
        return True

    def lengths(self, rows: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        return [min(length, 1 + 5 * place % 9) for place, length in enumerate(available)]

    def size_for(self, num_rows: int, num_steps: int) -> int:
        """On CUDA: every third window without drafts, the others with one of two sizes."""
        larger = [size for size in self.sizes if size > num_rows]
        self.num_asked += 1
        return larger[self.num_asked % 2] if self.num_asked % 3 else 0

    num_asked = 0

    def saved_seconds(self, num_rows: int, num_sampled: int, seconds: float) -> float:
        return 0.0


def drafting(model: Any, num_blocks: int | None = None, **changes: Any) -> EmbeddedEngine:
    config = HistoryDraftsConfig(enable=True, max_draft_tokens=8)
    engine = embedded(model, num_blocks=num_blocks, history_drafts=config, **changes)
    assert engine.drafter is not None
    engine.drafter.controller = EagerController(8, graph_sizes(1000))
    return engine


def totals(engine: EmbeddedEngine) -> DraftTotals:
    assert engine.drafter is not None
    return engine.drafter.totals


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(device=device_or_skip(request.param))


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Groups of one prompt; equal seeds give equal answers, other ones begin like each other at most."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 9, 21)]
    lengths = (30, 7, 22, 30, 13)
    return [
        GenerationRequest(prompt, SamplingParams(max_tokens=length), seed=place % 3)
        for prompt in prompts
        for place, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(model: Any, requests: list[GenerationRequest]) -> list[Completion]:
    return embedded(model).generate(requests)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 2},
        {"kv_block_size": 1, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 7, "kv_block_size": 16},
        {"num_blocks": 26},
    ],
)
def test_drafts_change_no_token(
    model: Any, requests: list[GenerationRequest], expected: list[Completion], changes: dict[str, Any]
) -> None:
    engine = drafting(model, **changes)
    first = engine.generate(requests[::2])
    assert_same(first, expected[::2])
    epoch = engine.generate(requests)
    assert_same(epoch, expected)
    counts = totals(engine)
    assert 0.2 * counts.num_drafted < counts.num_accepted < counts.num_drafted
    assert counts.num_generated == sum(len(c.token_ids) for c in first + epoch)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    if "num_blocks" in changes:
        assert sum(c.num_preempted for c in epoch) > 0


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}])
def test_other_layers_and_sampling_parameters(kind: str, sampling: dict[str, Any]) -> None:
    """Sliding windows, soft caps, sinks, experts; greedy and filtered sampling."""
    model = tiny_model(kind)
    requests = mixed_requests(**sampling)
    engine = drafting(model)
    expected = embedded(model).generate(requests)
    for _ in range(2):
        assert_same(engine.generate(requests), expected)
    assert totals(engine).num_accepted > 0


def test_stop_tokens_and_limits_inside_a_draft(model: Any) -> None:
    prompt = [5, 6, 7]
    free = GenerationRequest(prompt, SamplingParams(max_tokens=40, ignore_eos=True), seed=3)
    engine = drafting(model)
    [whole] = engine.generate([free])
    for end in range(1, 12):
        stopping = SamplingParams(max_tokens=40, ignore_eos=False, stop_token_ids=(whole.token_ids[end],))
        cut = SamplingParams(max_tokens=end, ignore_eos=True)
        requests = [replace(free, sampling=stopping), replace(free, sampling=cut)]
        assert_same(engine.generate(requests), embedded(model).generate(requests))


def test_aborted_requests_and_continued_prompts(model: Any, requests: list[GenerationRequest]) -> None:
    plain = embedded(model).generate(requests)
    engine = drafting(model)
    engine.generate(requests)
    parts: dict[int, Completion] = {}
    with engine.serving():
        for place, request in enumerate(requests):
            engine.add(place, request)
        for _ in range(3):
            parts |= engine.step()
        parts |= engine.abort(engine.unfinished())
        aborted = [place for place, part in parts.items() if part.stop_reason == "abort"]
        assert aborted
        for place in aborted:
            engine.add(place, requests[place].after(parts[place].token_ids))
        while engine.unfinished():
            for place, rest in engine.step().items():
                parts[place] = parts[place].then(rest)
    assert_same([parts[place] for place in range(len(requests))], plain)
    # a tool's result follows the answer
    turns = [
        GenerationRequest(r.prompt_ids + c.token_ids + [8, 9, 11], r.sampling, r.seed) for r, c in zip(requests, plain)
    ]
    expected = embedded(model).generate(turns)
    for _ in range(2):
        assert_same(engine.generate(turns), expected)


def test_the_tokens_that_belong_to_the_sequence() -> None:
    none: frozenset[int] = frozenset()
    assert num_agreeing([4, 5, 6], [4, 5], none) == 3
    assert num_agreeing([4, 9, 6], [4, 5], none) == 2
    assert num_agreeing([9, 5, 6], [4, 5], none) == 1
    assert num_agreeing([4, 5, 6], [4, 5], frozenset([4])) == 1
    assert num_agreeing([4], [], none) == 1


def test_exact_mode_is_equal_to_the_bit(requests: list[GenerationRequest]) -> None:
    skip_unless_exact()
    model = tiny_model()
    expected = embedded(model, exact=True).generate(requests)
    engine = drafting(model, exact=True)
    for _ in range(2):
        got = engine.generate(requests)
        assert [(c.token_ids, c.log_probs) for c in got] == [(c.token_ids, c.log_probs) for c in expected]
    assert totals(engine).num_accepted > 0


def test_recorded_experts_are_those_of_plain_steps() -> None:
    model = tiny_model("qwen3_moe").eval()
    requests = mixed_requests()
    expected = embedded(model, enable_rollout_routing_replay=True).generate(requests)
    engine = drafting(model, enable_rollout_routing_replay=True)
    for _ in range(2):
        got = engine.generate(requests)
        for g, e in zip(got, expected):
            assert g.routes is not None and e.routes is not None
            np.testing.assert_array_equal(np.sort(g.routes, 2), np.sort(e.routes, 2))
    assert totals(engine).num_accepted > 0


@pytest.mark.gpu
def test_drafts_see_the_latents_of_their_step(requests: list[GenerationRequest]) -> None:
    model: Any = architectures.tiny_model("deepseek_v3")
    model.set_attn_implementation(ATTENTION_NAME)
    model.set_experts_implementation(EXPERTS_NAME)
    install_decoder_layers(model)
    model.to(device_or_skip("cuda"))
    engine = drafting(model)
    expected = embedded(model).generate(requests)
    for _ in range(2):
        assert_same(engine.generate(requests), expected)
    assert totals(engine).num_accepted > 0


def test_models_with_states_are_refused() -> None:
    config = HistoryDraftsConfig(enable=True)
    model = architectures.tiny_model("mamba2")
    model.set_attn_implementation(ATTENTION_NAME)
    install_decoder_layers(model)
    engine = embedded(model, history_drafts=config)
    with pytest.raises(
        ValueError, match=r"history_drafts.enable=true: Mamba2ForCausalLM has recurrent states.*set false"
    ):
        engine.generate([GenerationRequest([5, 6, 7], SamplingParams(max_tokens=3))])


def test_the_history_of_other_engines_is_used(model: Any, requests: list[GenerationRequest]) -> None:
    """As after a checkpoint of several ranks."""
    parts = [requests[:7], requests[7:]]
    states = []
    for part in parts:
        engine = drafting(model)
        engine.generate(part)
        states.append(engine.saved_state())
    fresh, loaded = drafting(model), drafting(model)
    loaded.load_states(states[:1], states[1:])
    assert_same(loaded.generate(requests), fresh.generate(requests))
    assert totals(loaded).num_accepted > 2 * totals(fresh).num_accepted
    metrics = loaded.draft_metrics()
    assert 0 < metrics["perf/drafts/acceptance"] <= 1 < metrics["perf/drafts/tokens_per_step"]
    assert loaded.draft_metrics() == {}  # nothing since
    assert "answers" not in embedded(model).saved_state() and embedded(model).draft_metrics() == {}


def test_useless_history_is_dropped(model: Any) -> None:
    engine = drafting(model)
    assert engine.drafter is not None
    request = GenerationRequest([5, 6, 7], SamplingParams(max_tokens=4))
    engine.generate([request])
    assert len(engine.drafter.history) == 1
    for _ in range(USELESS_TOKENS):
        engine.drafter.controller.note_accepted(1, num_accepted=0, num_failed=1)
    engine.generate([request])
    assert len(engine.drafter.history) == 0


class HopefulController(DraftController):
    """Drafts as much as it may."""

    def is_open(self, num_rows: int) -> bool:
        return num_rows < self.max_tokens

    def may_pay(self, rows: Sequence[Acceptance], num_rows: int) -> bool:
        return True

    def _speedup(self, num_rows: int, gains_S: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
        return 2 + gains_S


def test_drafts_that_run_out_of_memory_become_fewer_and_as_many_sequences_run(
    requests: list[GenerationRequest], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    expected = embedded(model).generate(requests)
    engine = drafting(model)
    assert engine.drafter is not None and engine.runner is not None
    engine.drafter.controller = HopefulController(8, range(1, 1001))
    engine.generate(requests[::2])
    compute = engine.runner.forward

    def refusing(tokens: Tensor, positions: Tensor, context: Any, **more: Any) -> Tensor:
        if isinstance(context, PagedAttention) and context.fresh is None and tokens.numel() > 20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return compute(tokens, positions, context, **more)

    engine.runner.forward = refusing  # type: ignore[method-assign]
    for _ in range(2):
        assert_same(engine.generate(requests), expected)
    assert engine.lowered_limits() == {} and engine.scheduler.max_num_seqs == embedded(model).scheduler.max_num_seqs
    assert 10 <= engine.drafter.controller.max_tokens <= 20
    assert totals(engine).num_accepted > 0
    assert "tokens with drafts (DefaultCPUAllocator: can't allocate memory): such steps have at most" in caplog.text
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_steps_that_capture_a_graph_are_not_measured(
    requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their time says nothing about the next steps of their size."""
    engine = drafting(tiny_model())
    assert engine.drafter is not None
    controller = engine.drafter.controller
    monkeypatch.setattr(CpuDecoder, "prepare", lambda self, window: True)
    for _ in range(2):
        engine.generate(requests)
    assert totals(engine).num_accepted > 0 and totals(engine).num_steps > 0
    assert controller.plain.num_measured == controller.drafted.num_measured == 0
    monkeypatch.undo()
    engine.generate(requests)
    assert controller.plain.num_measured > 0 and controller.drafted.num_measured > 0


class CountingDecoder(CpuDecoder):
    """Finds no drafts itself, but gives fewer tokens than the window has room for, as with drafts that are wrong."""

    finds_drafts = True

    def run_drafts(self, window: DecodeWindow) -> Any:
        counts = dict(window.rows)
        part = DecodeWindow([(sequence, min(count, window.draft_steps)) for sequence, count in window.rows])
        sampled = self.run(part)
        window.rows = [(sequence, counts[sequence]) for sequence, _ in part.rows]
        num_rows = len(window.rows)
        return replace(sampled, counts=DraftCounts(num_rows, num_rows, 0, 0), curve=None)


@pytest.mark.parametrize("changes", [{}, {"max_num_seqs": 2}, {"kv_block_size": 1}, {"num_blocks": 26}])
def test_a_window_may_give_fewer_tokens_than_it_has_room_for(
    requests: list[GenerationRequest], changes: dict[str, Any]
) -> None:
    """Blocks and counts are those of the tokens that it gave."""
    model = tiny_model()
    engine = drafting(model, **changes)
    engine.generate(requests[:1])
    loop = engine.step_loop
    assert loop is not None and engine.drafter is not None
    loop._decoder = CountingDecoder(loop.runner)
    assert_same(engine.generate(requests), embedded(model, **changes).generate(requests))
    assert totals(engine).num_steps > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
