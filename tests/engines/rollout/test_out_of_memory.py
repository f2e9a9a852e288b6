"""Out of memory in generation: fewer sequences at once, and the same tokens."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams, create_rollout_engine
from lockstep.engines.rollout.embedded import paged_attention
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.paged_attention import PagedAttention
from lockstep.observability.glossary import explain
from tests.engines.rollout.rollout_cases import (
    EOS,
    PAD,
    VOCAB,
    assert_same,
    embedded,
    mixed_requests,
    rollout_config,
    tiny_model,
)

pytestmark = pytest.mark.first
CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    return embedded(model).generate(mixed_requests())


def refuse(engine: EmbeddedEngine, method: str, too_large: Callable[..., bool]) -> None:
    """The runner's method computes, and then raises if its arguments are too large."""
    runner = engine.runner
    compute = getattr(runner, method)

    def refusing(*args: Any, **more: Any) -> Any:
        result = compute(*args, **more)
        if too_large(*args):
            raise RuntimeError(CPU_ERROR)
        return result

    setattr(runner, method, refusing)


def most_tokens(limit: int) -> Callable[..., bool]:
    """Of a prefill step."""
    return lambda tokens, positions, context: isinstance(context, PagedAttention) and tokens.numel() > limit


def most_rows(limit: int) -> Callable[..., bool]:
    """Of a decode step."""
    return lambda tokens, positions, context: not isinstance(context, PagedAttention) and tokens.numel() > limit


def assert_consistent(engine: EmbeddedEngine) -> None:
    scheduler = engine.scheduler
    assert not scheduler.has_unfinished and scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert not scheduler._shared and not scheduler._leaders and not +scheduler._num_waiting


@pytest.mark.parametrize(
    ("method", "too_large", "name", "limits", "changes"),
    [
        ("forward", most_rows(3), "max_num_seqs", (2, 3), {"num_blocks": 24}),
        ("forward", most_rows(1), "max_num_seqs", (1,), {"enable_prefix_caching": False}),
        ("forward", most_tokens(30), "max_num_batched_tokens", range(16, 31), {}),
        ("forward", most_tokens(30), "max_num_batched_tokens", range(16, 31), {"num_blocks": 24}),
        ("logits", lambda hidden: len(hidden) > 2, "max_num_seqs", (1, 2), {}),
    ],
)
def test_fewer_run_at_once_with_the_same_tokens(
    model: Any,
    expected: list[Completion],
    caplog: pytest.LogCaptureFixture,
    method: str,
    too_large: Callable[..., bool],
    name: str,
    limits: Sequence[int],
    changes: dict[str, Any],
) -> None:
    engine = embedded(model, **changes)
    refuse(engine, method, too_large)
    completions = engine.generate(mixed_requests())
    assert_same(completions, expected)
    assert_consistent(engine)
    metrics = engine.lowered_limits()
    reported = metrics[f"perf/rollout_limit/{name}"]
    assert reported in limits and all(explain(key) for key in metrics)
    assert f"set actor_rollout_ref.rollout.{name}={int(reported)} " in caplog.text
    num_messages = len(caplog.records)
    assert_same(engine.generate(mixed_requests()), expected)  # the limit stays: no further message
    assert len(caplog.records) == num_messages and engine.lowered_limits() == metrics


def check_failed_forward_keeps_no_cache(model: Any) -> None:
    """A layer fails in the middle of a prefill, for lack of memory and otherwise; after `sleep` nothing holds the cache."""
    engine, requests = embedded(model), mixed_requests()
    expected = engine.generate(requests)
    assert engine.runner is not None
    for message in (CPU_ERROR, "mat1 and mat2 shapes cannot be multiplied"):
        errors = [RuntimeError(message)]

        def fail(*args: Any, errors: list[RuntimeError] = errors) -> None:
            if errors:
                raise errors.pop().with_traceback(None)

        hook = model.get_decoder().layers[-1].register_forward_pre_hook(fail)
        try:
            if message is CPU_ERROR:
                assert_same(engine.generate(requests), expected)
            else:
                with pytest.raises(RuntimeError, match="shapes"):
                    engine.generate(requests)
        finally:
            hook.remove()
        assert not errors
        cache = weakref.ref(engine.runner.cache)
        engine.sleep()
        gc.collect()
        assert cache() is None
        assert_same(engine.generate(requests), expected)


def test_a_failed_forward_keeps_no_cache(model: Any) -> None:
    check_failed_forward_keeps_no_cache(model)


def test_a_group_that_shares_a_prompt(model: Any) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [GenerationRequest(list(range(3, 26)), params, seed=i) for i in range(24)]
    expected = embedded(model).generate(requests)
    for method, too_large in (("forward", most_rows(5)), ("logits", lambda hidden: len(hidden) > 5)):
        engine = embedded(model)
        refuse(engine, method, too_large)
        assert_same(engine.generate(requests), expected)
        assert_consistent(engine)
        assert engine.scheduler.max_num_seqs <= 5


def test_half_of_what_runs_is_left_if_a_few_new_prompts_cannot_be_sampled(model: Any) -> None:
    engine = embedded(model, max_num_seqs=64)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    refusals: list[bool] = []
    refuse(engine, "logits", lambda hidden: len(hidden) == 2 and bool(refusals) and refusals.pop())
    num_finished = 0
    with engine.serving():
        for number in range(10):
            if number == 8:
                engine.step()
                refusals.append(True)
            engine.add(number, GenerationRequest([5, 6, number + 7], params, seed=number))
        while engine.unfinished():
            num_finished += len(engine.step())
    assert num_finished == 10 and engine.scheduler.max_num_seqs == 5


def test_limits_are_never_raised(model: Any) -> None:
    engine = embedded(model, enable_chunked_prefill=False)
    limits = engine.limits
    limits.scheduler.max_num_tokens = 4096
    assert limits.lower_tokens(20_000, "no memory") and limits.scheduler.max_num_tokens == 4096
    assert limits.lower_tokens(4096, "no memory") and limits.scheduler.max_num_tokens == 2048


def test_prompts_get_chunks_if_one_alone_is_too_long(model: Any, expected: list[Completion]) -> None:
    engine = embedded(model, enable_chunked_prefill=False)
    refuse(engine, "forward", most_tokens(17))
    assert_same(engine.generate(mixed_requests()), expected)
    assert engine.scheduler.chunked and engine.scheduler.max_num_tokens == 16


@pytest.mark.parametrize("seed", range(4))
def test_refusals_at_any_time(model: Any, expected: list[Completion], seed: int) -> None:
    """While serving: requests come later, some are aborted and go on, and memory is refused at random."""
    rng = random.Random(seed)
    engine, requests = embedded(model, num_blocks=rng.choice([20, 40, 80])), mixed_requests()
    refuse(engine, "forward", lambda *step: most_tokens(16)(*step) and rng.random() < 0.3)
    refuse(engine, "forward", lambda *step: most_rows(1)(*step) and rng.random() < 0.05)
    refuse(engine, "logits", lambda hidden: len(hidden) > rng.choice([2, 4, 99]))
    completions: dict[int, Completion] = {}
    parts: dict[int, Completion] = {}
    with engine.serving():
        num_added = 0
        while num_added < len(requests) or engine.unfinished():
            if num_added < len(requests):
                engine.add(num_added, requests[num_added])
                num_added += 1
            if not parts and num_added == len(requests):
                parts = engine.abort(engine.unfinished()[::2])
                for number, part in parts.items():
                    if part.stop_reason == "abort":
                        engine.add(number, requests[number].after(part.token_ids))
                    else:
                        completions[number] = part
            if engine.unfinished():
                completions |= {n: parts[n].then(c) if n in parts else c for n, c in engine.step().items()}
        assert_consistent(engine)
    assert_same([completions[i] for i in range(len(requests))], expected)


def test_the_kv_cache_gets_the_blocks_that_fit(
    model: Any, expected: list[Completion], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = embedded(model)
    grow = paged_attention._with_rows
    num_grown = 0

    def limited(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The third layer tensor of a growth beyond 40 blocks fails."""
        nonlocal num_grown
        num_grown += 1
        if num_rows > 40 * 2 and num_grown % 4 == 3:
            raise RuntimeError(CPU_ERROR)
        return grow(tensor, num_rows)

    monkeypatch.setattr(paged_attention, "_with_rows", limited)
    assert_same([engine.generate([request])[0] for request in mixed_requests()], expected)  # a small cache, which grows
    assert_same(engine.generate(mixed_requests()), expected)
    assert "lower actor_rollout_ref.rollout.gpu_memory_utilization" in caplog.text
    assert 0 < engine.lowered_limits()["perf/rollout_limit/kv_blocks"] <= 40
    engine.sleep()
    monkeypatch.undo()
    assert_same(engine.generate(mixed_requests()), expected)
    assert engine.blocks.num_blocks <= 40  # for the rest of the run
    assert_consistent(engine)


def test_a_cache_that_leaves_no_memory_for_a_step_is_shrunk(model: Any, expected: list[Completion]) -> None:
    engine = embedded(model, num_blocks=64)
    refuse(engine, "forward", lambda *_: engine.blocks.num_blocks > 32)
    assert_same(engine.generate(mixed_requests()), expected)
    assert engine.blocks.num_blocks == 32
    assert_consistent(engine)


@pytest.mark.parametrize("engine_name", ["embedded", "hf"])
def test_a_single_sequence_that_does_not_fit(model: Any, engine_name: str) -> None:
    engine: Any = create_rollout_engine(rollout_config(name=engine_name), [EOS], PAD)
    engine.bind(model)
    requests = [GenerationRequest([5] * 20, SamplingParams(max_tokens=11, ignore_eos=True), seed=i) for i in range(3)]
    engine.generate(requests)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    hook = model.get_decoder().register_forward_pre_hook(refused)
    try:
        with pytest.raises(
            MemoryError, match=r"20 prompt tokens and up to 11 new .* lower data.max_response_length"
        ) as raised:
            engine.generate(requests)
    finally:
        hook.remove()
    assert "\n" not in str(raised.value)
    assert len(engine.generate(requests)) == 3  # still usable


def test_other_errors_are_raised(model: Any) -> None:
    engine = embedded(model)
    runner: Any = engine.runner

    def broken(*args: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    engine.generate(mixed_requests())
    runner.logits = broken
    with pytest.raises(RuntimeError, match="shapes"):
        engine.generate(mixed_requests())
    assert not engine.lowered_limits()


def test_the_hf_engine_halves_its_batch(
    model: Any, expected: list[Completion], caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = create_rollout_engine(rollout_config(name="hf"), [EOS], PAD)
    engine.bind(model)
    engine.generate(mixed_requests()[:1])

    def refused(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["input_ids"]) > 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
            )

    hook = model.get_decoder().register_forward_pre_hook(refused, with_kwargs=True)
    try:
        completions = engine.generate(mixed_requests())
    finally:
        hook.remove()
    assert_same(completions, expected)
    assert engine.lowered_limits() == {"perf/rollout_limit/max_num_seqs": 2}
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB): the limit is 2 from now on" in caplog.text


@pytest.fixture
def cuda_memory() -> Iterator[Callable[[int], None]]:
    """Limits what torch may reserve to what it has and this number of bytes; the allocator then refuses as on a full device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def limit(num_bytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def num_equal(completions: list[Completion], expected: list[Completion]) -> int:
    return sum(c.token_ids == e.token_ids for c, e in zip(completions, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("megabytes", [200, 150, 100])
def test_a_full_device(
    cuda_memory: Callable[[int], None], eager: bool, megabytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(device="cuda", vocab_size=60_000, hidden_size=128, intermediate_size=4096)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([20, 50, 90]))] for _ in range(64)]
    requests = [GenerationRequest(prompts[i // 8], params, seed=i) for i in range(512)]
    engine = embedded(model, max_num_seqs=512, enforce_eager=eager)
    expected = engine.generate(requests)
    assert not engine.lowered_limits()
    engine.sleep()
    other = embedded(model, max_num_seqs=48, max_num_batched_tokens=256, enforce_eager=eager)
    usual = num_equal(other.generate(requests), expected)  # other batch sizes round differently, which may flip a token
    other.sleep()
    engine = embedded(model, max_num_seqs=512, enforce_eager=eager)
    engine.generate(requests[:1])  # warm: kernels and libraries have their memory
    engine.sleep()
    cuda_memory(megabytes << 20)
    completions = engine.generate(requests)
    assert engine.lowered_limits(), "memory has sufficed: the test needs a lower limit"
    assert_consistent(engine)
    assert num_equal(completions, expected) >= usual - 0.1 * len(requests)
    torch.cuda.set_per_process_memory_fraction(1.0)
    engine.sleep()
    assert len(engine.generate(requests)) == len(requests)
