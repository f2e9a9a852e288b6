"""The embedded engine equals transformers and a naive forward, for every schedule."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTJConfig, RwkvConfig

from lockstep.engines.rollout import (
    Completion,
    GenerationRequest,
    SamplingParams,
    create_rollout_engine,
    rollout_engine,
)
from lockstep.engines.rollout.embedded.cpu.decode_attention import CpuDecodeAttention
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.paged_attention import PagedAttention
from lockstep.models.attention import PackedAttention
from tests.engines.rollout.rollout_cases import (
    CONFIGS,
    DEVICES,
    EOS,
    VOCAB,
    assert_same,
    check_samples_of_one_prompt,
    device_or_skip,
    embedded,
    mixed_requests,
    naive_log_probs,
    rollout_config,
    tiny_model,
    transformers_greedy,
)

pytestmark = pytest.mark.first


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_or_skip(request.param)


@pytest.fixture(scope="module")
def model(device: torch.device) -> Any:
    return tiny_model(device=device)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    """Completions of `mixed_requests` when each request runs alone."""
    engine = embedded(model, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate([request])[0] for request in mixed_requests()]


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_greedy_equals_transformers(kind: str, ignore_eos: bool, device: torch.device) -> None:
    model = tiny_model(kind, device)
    requests = mixed_requests(temperature=0.0, ignore_eos=ignore_eos)
    completions = embedded(model).generate(requests)
    assert [c.token_ids for c in completions] == [transformers_greedy(model, r) for r in requests]
    assert len({t for c in completions for t in c.token_ids}) > 5  # not one repeated token


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}, {"temperature": 0.0}]
)
def test_log_probs_equal_a_full_forward(kind: str, sampling: dict[str, Any], device: torch.device) -> None:
    model = tiny_model(kind, device)
    requests = mixed_requests(**sampling)
    for request, completion in zip(requests, embedded(model).generate(requests)):
        got = torch.tensor(completion.log_probs)
        torch.testing.assert_close(got, naive_log_probs(model, request, completion), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"kv_block_size": 1},
        {"kv_block_size": 16},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1, "max_num_seqs": 4},
        {"max_num_batched_tokens": 7, "enable_chunked_prefill": False},
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 5, "kv_block_size": 3},
    ],
)
def test_the_schedule_does_not_change_the_result(
    model: Any, expected: list[Completion], changes: dict[str, Any]
) -> None:
    assert_same(embedded(model, **changes).generate(mixed_requests()), expected)


@pytest.mark.parametrize("share", [True, False])
def test_preemption_does_not_change_the_result(model: Any, expected: list[Completion], share: bool) -> None:
    engine = embedded(model, num_blocks=20, enable_prefix_caching=share)
    completions = engine.generate(mixed_requests())
    assert sum(c.num_preempted for c in completions) > 0
    assert_same(completions, expected)
    assert engine.blocks.num_free == 20


def test_the_order_of_requests_does_not_change_the_result(model: Any, expected: list[Completion]) -> None:
    order = list(range(len(expected)))
    random.Random(4).shuffle(order)
    requests = mixed_requests()
    shuffled = embedded(model, max_num_seqs=4).generate([requests[i] for i in order])
    assert_same(shuffled, [expected[i] for i in order])


def test_calls_are_independent(model: Any, expected: list[Completion]) -> None:
    engine = embedded(model)
    for _ in range(2):
        assert_same(engine.generate(mixed_requests()), expected)
    engine.sleep()
    engine.wake()
    assert_same(engine.generate(mixed_requests()), expected)


def test_a_shared_prompt_is_computed_once(model: Any) -> None:
    check_samples_of_one_prompt(model, 23 + 5)  # later samples compute the last prompt token again


def test_stop_tokens_end_a_response_and_are_part_of_it(model: Any) -> None:
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    request = GenerationRequest([5, 6, 7], free, seed=3)
    engine = embedded(model)
    [tokens] = [c.token_ids for c in engine.generate([request])]
    assert len(tokens) == 30
    end = tokens.index(tokens[9]) + 1
    stopping = SamplingParams(max_tokens=30, stop_token_ids=(tokens[9],))
    [stopped] = engine.generate([GenerationRequest([5, 6, 7], stopping, seed=3)])
    if EOS not in tokens[:end]:
        assert stopped.token_ids == tokens[:end] and stopped.stop_reason == "stop"
        assert len(stopped.log_probs) == end
    with_eos = EmbeddedEngine(rollout_config(), [tokens[4]], 0)
    with_eos.bind(model)
    [at_eos] = with_eos.generate([GenerationRequest([5, 6, 7], SamplingParams(max_tokens=30), seed=3)])
    assert at_eos.token_ids == tokens[: tokens.index(tokens[4]) + 1] and at_eos.stop_reason == "stop"
    [ignored] = with_eos.generate([request])
    assert ignored.token_ids == tokens and ignored.stop_reason == "length"


def test_one_token(model: Any) -> None:
    [completion] = embedded(model).generate([GenerationRequest([7], SamplingParams(max_tokens=1, ignore_eos=True))])
    assert len(completion.token_ids) == len(completion.log_probs) == 1 and completion.stop_reason == "length"


def test_no_requests(model: Any) -> None:
    assert embedded(model).generate([]) == []


def test_too_long_and_empty_requests_are_refused(model: Any) -> None:
    engine = embedded(model, max_model_len=20)
    good = GenerationRequest([1] * 15, SamplingParams(max_tokens=5))
    reason = r"15 prompt tokens \+ max_tokens 6 = 21 exceed max_model_len=20"
    with pytest.raises(ValueError, match=f"{reason}; raise actor_rollout_ref.rollout.max_model_len"):
        engine.generate([good, GenerationRequest([1] * 15, SamplingParams(max_tokens=6))])
    with pytest.raises(ValueError, match="prompt has no tokens"):
        engine.generate([GenerationRequest([], SamplingParams())])
    assert len(engine.generate([good])) == 1


def test_a_sequence_larger_than_the_cache_is_refused(model: Any) -> None:
    engine = embedded(model, num_blocks=3)
    with pytest.raises(ValueError, match="needs 5 blocks of 4 tokens, but the KV cache has 3"):
        engine.generate([GenerationRequest([1] * 10, SamplingParams(max_tokens=10))])
    assert len(engine.generate([GenerationRequest([1] * 5, SamplingParams(max_tokens=3))])) == 1


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 6}, {"enable_prefix_caching": False}])
def test_sliding_window(changes: dict[str, Any], device: torch.device) -> None:
    model = tiny_model("mistral", device, sliding_window=6)
    requests = mixed_requests(temperature=0.0)
    completions = embedded(model, **changes).generate(requests)
    assert [c.token_ids for c in completions] == [transformers_greedy(model, r) for r in requests]


def test_training_continues_after_generating(device: torch.device) -> None:
    model = tiny_model(device=device, attention_dropout=0.3)
    model.train()
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()  # keeps its mode
    requests = mixed_requests(temperature=0.0)
    engine = embedded(model)
    before = engine.generate(requests)
    assert model.training and model.model.layers[1].training and not model.model.layers[0].training
    assert_same(engine.generate(requests), before)  # no dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([requests[3].prompt_ids], device=device)
    context = PackedAttention([ids.shape[1]], ids.device)
    for _ in range(2):
        position_ids = torch.arange(ids.shape[1], device=device)[None]
        logits = model(ids, position_ids=position_ids, use_cache=False, lockstep_context=context).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
    optimizer.step()
    after = engine.generate(requests)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert [c.token_ids for c in after] == [transformers_greedy(model.eval(), r) for r in requests]


def test_changed_and_moved_weights_are_used(device: torch.device) -> None:
    model = tiny_model(device=device)
    requests = mixed_requests()
    engine = embedded(model)
    before = engine.generate(requests)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert_same(engine.generate(requests), before)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)  # in place
    after = engine.generate(requests)
    assert_same(after, embedded(model).generate(requests))
    assert [c.token_ids for c in after] != [c.token_ids for c in before]


def test_requests_that_come_later_join(model: Any, expected: list[Completion]) -> None:
    engine, requests = embedded(model), mixed_requests()
    completions: dict[int, Completion] = {}
    steps = 0
    with engine.serving():
        while len(completions) < len(requests):
            if steps < len(requests):
                engine.add(steps, requests[steps])
            completions |= engine.step()
            steps += 1
    assert_same([completions[i] for i in range(len(requests))], expected)
    assert steps < sum(len(c.token_ids) for c in expected)
    assert_same(engine.generate(requests), expected)


@pytest.mark.parametrize("max_num_seqs", [2, 64])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborted_requests_go_on_with_their_tokens(
    model: Any, expected: list[Completion], num_steps: int, max_num_seqs: int
) -> None:
    engine, requests = embedded(model, max_num_seqs=max_num_seqs), mixed_requests()
    completions: dict[int, Completion] = {}
    with engine.serving():
        for number, request in enumerate(requests):
            engine.add(number, request)
        for _ in range(num_steps):
            completions |= engine.step()
        half = engine.unfinished()[::2]
        parts = engine.abort([*half, 99])
        assert sorted(parts) == half and not engine.abort(half)
        completions |= {number: part for number, part in parts.items() if part.stop_reason != "abort"}
        for number in half:
            if number not in completions:
                engine.add(number, requests[number].after(parts[number].token_ids))
        while engine.unfinished():
            completions |= {n: parts[n].then(c) if n in parts else c for n, c in engine.step().items()}
    assert "abort" in {parts[number].stop_reason for number in half}
    assert_same([completions[i] for i in range(len(requests))], expected)


def test_serving_drops_what_is_unfinished(model: Any) -> None:
    engine = embedded(model)
    with engine.serving():
        engine.add(0, mixed_requests()[0])
        engine.step()
        with pytest.raises(RuntimeError, match="already generating"):
            engine.generate(mixed_requests())
    assert engine.unfinished() == []
    engine.sleep()


def test_failed_batch_leaves_the_engine_usable(model: Any) -> None:
    engine = embedded(model, num_blocks=2)
    with pytest.raises(ValueError, match="but the KV cache has 2"):
        engine.generate([GenerationRequest([1] * 12, SamplingParams(max_tokens=4))])
    assert len(engine.generate([GenerationRequest([1] * 3, SamplingParams(max_tokens=2))])[0].token_ids) <= 2


def test_completions_carry_the_policy_version(model: Any) -> None:
    engine = embedded(model)
    engine.policy_version = 7
    assert {c.policy_version for c in engine.generate(mixed_requests())} == {7}


def test_update_weights_copies_by_name() -> None:
    source, target = tiny_model(), tiny_model()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(1.1)
    requests = mixed_requests(temperature=0.0)
    engine = embedded(target)
    engine.update_weights(iter(source.state_dict().items()))
    assert_same(engine.generate(requests), embedded(source).generate(requests))
    with pytest.raises(ValueError, match="no parameter 'nothing'"):
        engine.update_weights(iter([("nothing", torch.zeros(1))]))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        engine.update_weights(iter([("model.norm.weight", torch.zeros(3))]))


def test_weights_cannot_be_updated_while_requests_run(model: Any) -> None:
    engine = embedded(model)
    with engine.serving(), pytest.raises(RuntimeError, match="while requests are running"):
        engine.update_weights(iter([]))
    engine.update_weights(iter([]))


def test_generating_without_a_model_is_refused() -> None:
    engine = create_rollout_engine(rollout_config(name="embedded"), [EOS], 0)
    with pytest.raises(RuntimeError, match="call bind"):
        engine.generate([GenerationRequest([1], SamplingParams())])


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rollout.name=trtllm: no such rollout engine.*embedded, hf, server, sglang, tgi, vllm"
    ):
        create_rollout_engine(rollout_config(name="trtllm"), [EOS], 0)


@pytest.mark.parametrize(
    ("make_config", "reason"),
    [
        (lambda: RwkvConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2), "it has a recurrent state"),
        (lambda: GPTJConfig(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, rotary_dim=4), "AttentionInterface"),
    ],
)
def test_unsupported_architectures_are_refused(make_config: Any, reason: str) -> None:
    model = AutoModelForCausalLM.from_config(make_config())
    with pytest.raises(ValueError, match=f"{reason}.*use actor_rollout_ref.rollout.name=hf"):
        embedded(model).generate([GenerationRequest([3, 4], SamplingParams(max_tokens=2))])


def test_a_sliding_window_that_no_layer_reports_is_refused() -> None:
    model = tiny_model("llama")
    model.config.sliding_window = 8
    with pytest.raises(ValueError, match="no layer passes sliding_window=8 of its config to the attention function"):
        embedded(model).generate(mixed_requests())
    model.config.use_sliding_window = False
    assert len(embedded(model).generate(mixed_requests())) == 10


def test_other_modules_are_refused() -> None:
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sdpa' instead of 'lockstep'"):
        embedded(model)
    with pytest.raises(ValueError, match="cannot serve Linear: it is not a transformers causal LM"):
        embedded(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("context", [PagedAttention, CpuDecodeAttention])
def test_a_model_that_differs_from_transformers_is_refused(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefill or in decode alone: another scaling of the attention logits."""
    attend, engine = context.attend, embedded(tiny_model())

    def scaled(self: Any, layer: Any, query: Any, *inputs: Any) -> Any:
        return attend(self, layer, query * 1.5, *inputs)

    monkeypatch.setattr(context, "attend", scaled)
    for _ in range(2):  # a failed check is repeated
        with pytest.raises(ValueError, match=r"the embedded rollout.*Use actor_rollout_ref.rollout.name=hf"):
            engine.generate(mixed_requests())
    monkeypatch.setattr(context, "attend", attend)
    assert len(engine.generate(mixed_requests())) == 10


def test_the_model_is_checked_once_per_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny_model(), []
    original = rollout_engine.reference_log_probs
    monkeypatch.setattr(rollout_engine, "reference_log_probs", lambda *args: calls.append(1) or original(*args))
    engine, state = embedded(model), torch.get_rng_state()
    for _ in range(2):
        engine.generate(mixed_requests())
        engine.update_weights(iter([]))
        engine.sleep()
    assert len(calls) == 1 and torch.equal(torch.get_rng_state(), state)
    engine.bind(model)
    engine.generate(mixed_requests()[:1])
    assert len(calls) == 2


@pytest.mark.parametrize("max_model_len", [2, 3, 9])
def test_the_check_fits_short_sequences(max_model_len: int) -> None:
    engine = embedded(tiny_model(), max_model_len=max_model_len)
    assert len(engine.generate([GenerationRequest([5], SamplingParams(max_tokens=1))])) == 1
