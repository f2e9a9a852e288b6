"""The embedded engine on models with states: equal to transformers for every schedule, and no state of another sequence is seen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from lockstep.engines.rollout import Completion
from lockstep.engines.rollout.embedded import prefill
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.paged_attention import PagedCache
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.engines.rollout.embedded.state_slots import (
    DecodeStates,
    PrefillStates,
    RowGroup,
    StateShape,
    StateSlots,
    bytes_per_slot,
)
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.split_weights import check_sizes
from lockstep.models.state_rows import RowBounds, RowStates, StateName
from tests.engines.rollout.rollout_cases import (
    assert_same,
    check_samples_of_one_prompt,
    device_or_skip,
    embedded,
    mixed_requests,
    naive_log_probs,
    transformers_greedy,
)
from tests.engines.rollout.test_out_of_memory import (
    assert_consistent,
    check_failed_forward_keeps_no_cache,
    most_rows,
    most_tokens,
    refuse,
)
from tests.models import architectures

pytestmark = pytest.mark.first
CPU = torch.device("cpu")


def hybrid(model_type: str) -> Any:
    model = architectures.tiny_model(model_type)
    model.set_attn_implementation(ATTENTION_NAME)
    install_decoder_layers(model)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid("qwen3_next")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    """Completions of `mixed_requests` when each request runs alone."""
    engine = embedded(model, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate([request])[0] for request in mixed_requests()]


def assert_all_free(engine: EmbeddedEngine) -> None:
    assert_consistent(engine)
    assert engine.blocks.num_free_slots == engine.blocks.num_slots > 0


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_next",  # Gated DeltaNet
        pytest.param("bamba", marks=pytest.mark.slow),  # Mamba 2
        pytest.param("lfm2", marks=pytest.mark.slow),  # short convolutions
        "falcon_h1",  # attention and a state in one layer
        pytest.param("nemotron_h", marks=pytest.mark.slow),  # layers with neither
        pytest.param("mamba2", marks=pytest.mark.slow),  # no attention
        pytest.param("mamba", marks=pytest.mark.slow),  # and its layers get no keyword arguments
        pytest.param("jamba", marks=pytest.mark.slow),  # Mamba 1: no chunks from a state on
    ],
)
def test_decoding_equals_transformers(model_type: str) -> None:
    model = hybrid(model_type)
    requests = mixed_requests(temperature=0.0)
    engine = embedded(model)
    completions = engine.generate(requests)
    for request, completion in zip(requests, completions):
        got, teacher_forced = torch.tensor(completion.log_probs), naive_log_probs(model, request, completion)
        torch.testing.assert_close(got, teacher_forced, atol=1e-4, rtol=0)
    assert [c.token_ids for c in completions[:4]] == [transformers_greedy(model, r) for r in requests[:4]]
    assert_same(embedded(model, max_num_batched_tokens=9, num_blocks=20).generate(requests), completions)
    assert_all_free(engine)
    assert engine.scheduler.chunked == (model_type not in ("jamba", "mamba"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {},
                {"max_num_batched_tokens": 1, "max_num_seqs": 4},
                {"max_num_batched_tokens": 7, "enable_chunked_prefill": False},
                {"enable_prefix_caching": False},
            )
        ),
    ],
)
def test_the_schedule_does_not_change_the_result(
    model: Any, expected: list[Completion], changes: dict[str, Any]
) -> None:
    engine = embedded(model, **changes)
    assert_same(engine.generate(mixed_requests()), expected)
    assert_all_free(engine)


def test_samples_of_one_prompt_equal_separate_requests(model: Any) -> None:
    check_samples_of_one_prompt(
        model, 3 * 23
    )  # later samples compute the prompt again, once for all that start together


def spoil_freed_slots(engine: EmbeddedEngine) -> None:
    """A slot that is freed holds NaN."""
    release = engine.scheduler.on_release

    def spoil(sequence: Sequence) -> None:
        release(sequence)
        assert engine.runner is not None and engine.runner.cache is not None and engine.runner.cache.states is not None
        for layer in engine.runner.cache.states.tensors.values():
            for tensor in layer.values():
                tensor[sequence.state_slot] = float("nan")

    engine.scheduler.on_release = spoil


@pytest.mark.parametrize("share", [True, False])
def test_a_preempted_sequence_starts_from_an_empty_state(model: Any, expected: list[Completion], share: bool) -> None:
    engine = embedded(model, num_blocks=20, enable_prefix_caching=share)
    spoil_freed_slots(engine)
    completions = engine.generate(mixed_requests())
    assert sum(c.num_preempted for c in completions) > 0
    assert_same(completions, expected)
    assert_all_free(engine)


def test_a_stale_state_would_be_seen(model: Any, expected: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a prompt begins with what its slot holds."""
    engine = embedded(model, num_blocks=20)
    engine.generate(mixed_requests()[:1])  # passes the model check
    row_groups = prefill._row_groups
    stale = lambda *args: [dataclasses.replace(group, is_fresh=False) for group in row_groups(*args)]  # noqa: E731
    monkeypatch.setattr(prefill, "_row_groups", stale)
    completions = engine.generate(mixed_requests())
    assert [c.token_ids for c in completions] != [e.token_ids for e in expected]


def test_aborted_requests_go_on_and_the_cache_may_be_dropped(model: Any, expected: list[Completion]) -> None:
    engine, requests = embedded(model, max_num_seqs=4), mixed_requests()
    spoil_freed_slots(engine)
    completions: dict[int, Completion] = {}
    with engine.serving():
        for number, request in enumerate(requests):
            engine.add(number, request)
        for _ in range(2):
            completions |= engine.step()
        parts = engine.abort(engine.unfinished()[::2])
        for number, part in parts.items():
            engine.add(number, requests[number].after(part.token_ids))
        while engine.unfinished():
            completions |= {n: parts[n].then(c) if n in parts else c for n, c in engine.step().items()}
        assert_all_free(engine)
    assert_same([completions[i] for i in range(len(requests))], expected)
    engine.sleep()
    assert engine.runner is not None and engine.runner.cache is None and engine.blocks.num_slots == 0
    assert_same(engine.generate(requests), expected)


def test_changed_weights_are_used() -> None:
    model, requests = hybrid("qwen3_next"), mixed_requests(temperature=0.0)[:3]
    engine = embedded(model)
    before = engine.generate(requests)
    name = next(
        name for name, _ in model.named_parameters() if "linear_attn" in name and name.endswith("out_proj.weight")
    )
    engine.update_weights(iter([(name, -model.state_dict()[name])]))
    after = engine.generate(requests)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert [c.token_ids for c in after] == [transformers_greedy(model, r) for r in requests]


@pytest.mark.parametrize(
    ("method", "too_large", "changes"),
    [
        ("forward", most_rows(3), {"num_blocks": 24}),
        ("forward", most_tokens(30), {}),
        ("logits", lambda hidden: len(hidden) > 2, {}),
    ],
)
def test_out_of_memory_does_not_change_the_result(
    model: Any, expected: list[Completion], method: str, too_large: Any, changes: dict[str, Any]
) -> None:
    engine = embedded(model, **changes)
    refuse(engine, method, too_large)
    spoil_freed_slots(engine)
    assert_same(engine.generate(mixed_requests()), expected)
    assert engine.lowered_limits()
    assert_all_free(engine)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_h1"])
def test_a_failed_forward_keeps_no_cache(model_type: str) -> None:
    check_failed_forward_keeps_no_cache(hybrid(model_type))


def test_states_that_do_not_fit_lower_the_sequences_at_once(
    model: Any, expected: list[Completion], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = embedded(model)
    grow = StateSlots.__init__

    def limited(self: StateSlots, layers: Any, num_slots: int, device: Any) -> None:
        if num_slots > 3:
            raise MemoryError
        grow(self, layers, num_slots, device)

    monkeypatch.setattr(StateSlots, "__init__", limited)
    engine._model_is_checked = True  # so that all slots are asked for at once
    assert_same(engine.generate(mixed_requests()), expected)
    assert engine.blocks.num_slots == engine.scheduler.max_num_seqs == 2
    assert engine.lowered_limits()["perf/rollout_limit/max_num_seqs"] == 2
    assert "out of memory for the states of 10 sequences" in caplog.text
    assert "perf/rollout_limit/kv_blocks" not in engine.lowered_limits()


def test_blocks_that_do_not_fit_leave_the_states(
    model: Any, expected: list[Completion], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = embedded(model)
    create = PagedCache.__init__

    def limited(self: PagedCache, layers: Any, num_blocks: int, *args: Any) -> None:
        if num_blocks > 40:
            raise MemoryError
        create(self, layers, num_blocks, *args)

    monkeypatch.setattr(PagedCache, "__init__", limited)
    engine._model_is_checked = True  # so that all blocks are asked for at once
    assert_same(engine.generate(mixed_requests()), expected)
    assert engine.lowered_limits().keys() == {"perf/rollout_limit/kv_blocks"}
    assert engine.blocks.num_slots == 10 and "out of memory for a KV cache of" in caplog.text


@pytest.mark.parametrize(
    ("longest", "num_slots", "num_blocks"),
    [
        (1, 25, 28),  # of 26 sequences all fit
        (30, 19, 40),  # half for the states
        (60, 9, 60),  # one sequence must fit
    ],
)
def test_memory_is_shared_by_states_and_blocks(
    model: Any, monkeypatch: pytest.MonkeyPatch, longest: int, num_slots: int, num_blocks: int
) -> None:
    runner = embedded(model).runner
    assert runner is not None
    state = bytes_per_slot(runner.layer_states())
    assert state == 2 * 4 * sum(shape.bytes_per_token for shape in runner.layers().values())
    monkeypatch.setattr(type(runner), "_cache_bytes", lambda self, utilization: 40 * state)
    assert runner.max_num_slots(0.5, longest) == num_slots
    assert runner.max_num_blocks(0.5, num_slots) == num_blocks


def test_recorded_experts_take_memory_of_blocks(model: Any) -> None:
    without, recording = embedded(model).runner, embedded(model, enable_rollout_routing_replay=True).runner
    assert without is not None and recording is not None and recording._route_shape is not None
    assert recording._bytes_per_block == without._bytes_per_block + 4 * recording._route_shape.bytes_per_token


def test_states_and_blocks_that_are_fewer_are_logged_once_each(
    model: Any, expected: list[Completion], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = embedded(model)
    assert engine.runner is not None
    state = bytes_per_slot(engine.runner.layer_states())
    monkeypatch.setattr(type(engine.runner), "_cache_bytes", lambda self, utilization: 30 * state)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert_same(engine.generate(mixed_requests()), expected)
    assert (engine.blocks.num_slots, engine.blocks.num_blocks) == (8, 42)
    messages = [record.getMessage() for record in caplog.records if "gpu_memory_utilization" in record.getMessage()]
    assert len(messages) == 2 and "8 sequences decode at once" in messages[0] and "has 42 blocks" in messages[1]


def test_chunks_that_memory_forces_stay_when_the_model_is_checked_again(caplog: pytest.LogCaptureFixture) -> None:
    model = hybrid("mamba")
    engine, requests = embedded(model), mixed_requests()[:1]
    engine.generate(requests)
    assert not engine.scheduler.chunked
    engine.limits.lower_tokens(100, "no memory")
    assert "token by token" in caplog.text and "enable_chunked_prefill" not in caplog.text
    engine.bind(model)
    engine.generate(requests)
    assert engine.scheduler.chunked


def test_cuda_graphs_are_captured_again_if_the_scratch_slot_differs(model: Any) -> None:
    """Also where the states are at the same addresses."""
    engine = embedded(model)
    engine.generate(mixed_requests()[:1])
    runner = engine.runner
    assert runner is not None and runner.cache is not None and runner.cache.states is not None
    for num_slots, num_moves in ((4, 1), (4, 1), (3, 2)):
        runner.cache.states.num_slots = num_slots
        runner._note_state_moves(runner.cache)
        assert runner.num_moves == num_moves


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba"])
def test_several_ranks_cannot_hold_a_state(model_type: str) -> None:
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2: .*cannot split; set 1"):
        check_sizes(hybrid(model_type), 2)


def test_a_layer_that_keeps_its_state_to_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"RecurrentBlock keeps its state to itself; .*rollout.name=hf"):
        embedded(hybrid("recurrent_gemma")).generate(mixed_requests())


def test_a_row_that_has_stopped_changes_no_slot() -> None:
    """On CUDA its sequence may have freed the slot, and another one taken it."""
    store = StateSlots({0: {("recurrent", 0): StateShape((1,), torch.float32)}}, 3, CPU)
    is_active = torch.tensor([True, False, True, False])
    rows = DecodeStates(store, torch.tensor([2, 1, 0, 0]), is_active)  # the last row pads the batch
    assert rows.slots.tolist() == [2, store.scratch, 0, store.scratch]
    for _ in range(2):
        out = rows.mix(0, add_up, torch.tensor([1.0, 10.0, 100.0, 1000.0])[None, :, None])
    assert out.shape == (1, 4, 1) and out[0, 0] == 2 and out[0, 2] == 200
    assert store.tensors[0]["recurrent", 0][:3].flatten().tolist() == [200, 0, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "mamba2", "lfm2"])
def test_decoding_equals_transformers_on_cuda(model_type: str, eager: bool) -> None:
    device = device_or_skip("cuda")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(architectures.tiny_config(model_type))]
    if not kind.__module__.startswith("transformers."):
        pytest.skip("flash-linear-attention has registered its own class for the type")
    reference = hybrid(model_type)
    requests = mixed_requests(temperature=0.0)
    engine = embedded(hybrid(model_type).to(device), enforce_eager=eager, max_num_seqs=6)
    for _ in range(2):
        for request, completion in zip(requests, engine.generate(requests)):
            got = torch.tensor(completion.log_probs)
            with architectures.torch_forms(reference):
                expected = naive_log_probs(reference, request, completion)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert_all_free(engine)
        engine.sleep()  # and the states move


def test_slots_grow_and_are_copied() -> None:
    store = StateSlots({3: {("conv", 0): StateShape((2,), torch.float32)}}, 2, CPU)
    store.write(3, torch.tensor([1, 0]), RowStates({("conv", 0): torch.tensor([[1.0, 2.0], [3.0, 4.0]])}))
    store.grow(4)
    store.copy([(1, 3), (0, 1)])
    rows = store.read(3, torch.arange(store.scratch + 1)).tensors["conv", 0]
    assert rows.tolist() == [[3, 4], [3, 4], [0, 0], [1, 2], [0, 0]]
    with pytest.raises(AssertionError, match="layer 3"):
        store.write(3, torch.tensor([0]), RowStates())


def add_up(rows: torch.Tensor, states: RowStates) -> torch.Tensor:
    """A core that adds up its tokens, from a state or from nothing."""
    total = rows.cumsum(1) + states.tensors.get(("recurrent", 0), torch.zeros(1, 1))[:, None]
    states.tensors["recurrent", 0] = total[:, -1]
    return total


class AddUpPacked:
    """The same on rows one after another."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, rows: torch.Tensor, states: RowStates) -> torch.Tensor:
        raise AssertionError("rows of equal length are not needed")

    def packed(self, x: torch.Tensor, bounds: RowBounds, states: RowStates) -> torch.Tensor:
        lengths = bounds.tensor.diff().tolist()
        self.calls.append(lengths)
        parts = [RowStates({name: t[i : i + 1] for name, t in states.tensors.items()}) for i in range(len(lengths))]
        out = [add_up(row, part) for row, part in zip(x.split(lengths, 1), parts)]
        states.tensors.update(RowStates.cat(parts).tensors)
        return torch.cat(out, 1)


class AddUpInPlace:
    """The same for one token per row, on the slots themselves."""

    def __call__(self, rows: torch.Tensor, states: RowStates) -> torch.Tensor:
        raise AssertionError("the states need not be copied")

    def step_in_place(
        self, rows: torch.Tensor, tensors: Mapping[StateName, torch.Tensor], slots: torch.Tensor
    ) -> torch.Tensor:
        tensors["recurrent", 0][slots] += rows[:, 0]
        return tensors["recurrent", 0][slots][:, None]


def test_decode_leaves_the_states_where_they_are_if_the_core_can() -> None:
    store = StateSlots({0: {("recurrent", 0): StateShape((1,), torch.float32)}}, 3, CPU)
    rows = DecodeStates(store, torch.tensor([2, 1, 0]), torch.tensor([True, False, True]))
    for expected in ([1, 100], [2, 200]):
        out = rows.mix(0, AddUpInPlace(), torch.tensor([1.0, 10.0, 100.0])[None, :, None])
        assert out.shape == (1, 3, 1) and out[0, [0, 2], 0].tolist() == expected
    assert store.tensors[0]["recurrent", 0][:3].flatten().tolist() == [200, 0, 2]


def test_prefill_rows_of_any_length_are_computed_together_if_the_core_can() -> None:
    store = StateSlots({0: {("recurrent", 0): StateShape((1,), torch.float32)}}, 4, CPU)
    tokens = torch.tensor([1.0, 10.0, 20.0, 100.0, 200.0, 1000.0])[None, :, None]
    for number, expected in enumerate([[1, 10, 30, 100, 300, 1000], [2, 40, 60, 400, 600, 1000]]):
        groups = [
            RowGroup(0, 1, torch.tensor([1]), number == 0),
            RowGroup(1, 2, torch.tensor([2, 0]), number == 0),
            RowGroup(5, 1, torch.tensor([3]), True),
        ]
        core = AddUpPacked()
        assert PrefillStates(store, groups).mix(0, core, tokens).flatten().tolist() == expected
        assert core.calls == ([[1, 2, 2, 1]] if number == 0 else [[1, 2, 2], [1]])


def test_prefill_rows_of_each_length_are_computed_together() -> None:
    store = StateSlots({0: {("recurrent", 0): StateShape((1,), torch.float32)}}, 3, CPU)

    def groups(is_fresh: bool) -> list[RowGroup]:
        return [RowGroup(0, 1, torch.tensor([1]), is_fresh), RowGroup(1, 2, torch.tensor([2, 0]), is_fresh)]

    tokens = torch.tensor([1.0, 10.0, 20.0, 100.0, 200.0])[None, :, None]
    for is_fresh, expected in (
        (True, [1.0, 10.0, 30.0, 100.0, 300.0]),
        (False, [2.0, 40.0, 60.0, 400.0, 600.0]),
        (True, [1.0, 10.0, 30.0, 100.0, 300.0]),
    ):
        out = PrefillStates(store, groups(is_fresh)).mix(0, add_up, tokens)
        assert out.flatten().tolist() == expected
