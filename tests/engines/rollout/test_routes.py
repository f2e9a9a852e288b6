"""The experts that the embedded engine records are those of a plain forward over the whole sequence."""

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.models.model_check import transformers_forward
from lockstep.models.router_replay import Routing
from lockstep.protocol.generation import first_routes
from tests.engines.rollout.rollout_cases import DEVICES, device_or_skip, embedded, mixed_requests, tiny_model
from tests.engines.train.ranks import Ranks

KINDS = ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mixtral", "gpt_oss"))]


@torch.no_grad()
def reference_routes(model: Any, requests: list[GenerationRequest], completions: list[Completion]) -> list[np.ndarray]:
    """By transformers' own forward, one sequence at a time, without the token that was sampled last."""
    found = []
    routing = Routing(model, "test")
    for request, completion in zip(requests, completions):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids][:-1]], device=model.device)
        routing.begin()
        with transformers_forward(model):
            model(input_ids=ids, use_cache=False)
        found.append(routing.end().routes().cpu().numpy())
    return found


def check(model: Any, requests: list[GenerationRequest], completions: list[Completion]) -> None:
    for got, expected in zip(completions, reference_routes(model, requests, completions)):
        assert got.routes is not None
        assert got.routes.dtype == np.int8
        np.testing.assert_array_equal(np.sort(got.routes, 2), np.sort(expected, 2))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without shared prompts": {"enable_prefix_caching": False},
    "chunked prefill": {"max_num_batched_tokens": 7},
    "few sequences at once": {"max_num_seqs": 2},
    "preemption": {"num_blocks": 18},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_experts_are_those_of_transformers(kind: str, case: str, device: str) -> None:
    model = tiny_model(kind, device_or_skip(device)).eval()
    engine = embedded(model, enable_rollout_routing_replay=True, **CASES[case])
    requests = mixed_requests()
    completions = engine.generate(requests)
    assert (case == "preemption") == any(c.num_preempted for c in completions)
    check(model, requests, completions)


@pytest.mark.gpu
def test_experts_are_recorded_inside_of_cuda_graphs() -> None:
    model = tiny_model("qwen3_moe", device_or_skip("cuda")).eval()
    engine = embedded(model, enable_rollout_routing_replay=True)
    for _ in range(2):
        requests = mixed_requests()
        check(model, requests, engine.generate(requests))
        engine.sleep()  # the cache moves, the graphs stay
    decoder: Any = engine.step_loop._decoder  # type: ignore[union-attr]
    assert decoder.graphs.use_graphs and decoder.graphs._graphs


def generate_on_ranks(kind: str, size: int) -> list[Completion]:
    engine = embedded(tiny_model(kind), enable_rollout_routing_replay=True, tensor_model_parallel_size=size)
    return engine.generate(mixed_requests())


@pytest.mark.slow
def test_ranks_that_share_a_model_record_the_same_experts() -> None:
    ranks = Ranks()
    expected = generate_on_ranks("qwen3_moe", 1)
    for completions in ranks.run(2, generate_on_ranks, "qwen3_moe", 2):
        for got, want in zip(completions, expected):
            assert got.token_ids == want.token_ids
            np.testing.assert_array_equal(np.sort(got.routes, 2), np.sort(want.routes, 2))  # type: ignore[arg-type]
    ranks.close()


def test_recording_changes_no_token() -> None:
    model = tiny_model("qwen3_moe")
    with_routes = embedded(model, enable_rollout_routing_replay=True).generate(mixed_requests())
    without = embedded(model).generate(mixed_requests())
    assert [c.token_ids for c in with_routes] == [c.token_ids for c in without]
    assert [c.log_probs for c in with_routes] == [c.log_probs for c in without]
    assert all(c.routes is None for c in without)


def test_a_stopped_row_that_decodes_on_keeps_its_experts() -> None:
    """Rows of a window end at different steps, by a stop token or by their length."""
    model = tiny_model("qwen3_moe").eval()
    requests = [GenerationRequest([5 + i, 9], SamplingParams(max_tokens=2 + 3 * i), seed=i) for i in range(12)]
    completions = embedded(model, enable_rollout_routing_replay=True).generate(requests)
    assert len({len(c.token_ids) for c in completions}) > 4
    check(model, requests, completions)


def test_an_aborted_request_and_its_rest_have_the_experts_of_the_whole() -> None:
    model = tiny_model("qwen3_moe").eval()
    engine = embedded(model, enable_rollout_routing_replay=True)
    request = GenerationRequest([7, 11, 13], SamplingParams(max_tokens=40, ignore_eos=True), seed=3)
    with engine.serving():
        engine.add(0, request)
        engine.step()
        engine.step()
        (first,) = engine.abort([0]).values()
    assert 0 < len(first.token_ids) < 40
    whole = first.then(engine.generate([request.after(first.token_ids)])[0])
    assert len(whole.token_ids) == 40
    check(model, [request], [whole])


def test_a_request_that_was_never_started_has_no_experts() -> None:
    engine = embedded(tiny_model("qwen3_moe"), enable_rollout_routing_replay=True)
    with engine.serving():
        engine.add(0, GenerationRequest([7], SamplingParams(max_tokens=4)))
        (completion,) = engine.abort([0]).values()
    assert completion.routes is None or len(completion.routes) == 0


def test_first_routes_keeps_what_was_computed_first() -> None:
    earlier, later = np.zeros((2, 1, 1)), np.ones((5, 1, 1))
    merged = first_routes(earlier, later)
    assert merged is not None
    assert merged.ravel().tolist() == [0, 0, 1, 1, 1]
    assert first_routes(None, later) is later
    assert first_routes(earlier, None) is earlier
    shorter = first_routes(later, earlier)
    assert shorter is not None
    assert shorter.shape == later.shape


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_rollout_routing_replay: Qwen2ForCausalLM has no experts"):
        embedded(tiny_model("qwen2"), enable_rollout_routing_replay=True)
