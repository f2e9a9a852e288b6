"""What every rollout engine that runs the trainer's module must do, by its interface alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engines.rollout import ROLLOUT_ENGINES, GenerationRequest, RolloutEngine, SamplingParams
from lockstep.engines.rollout.rollout_engine import create_rollout_engine
from lockstep.utils.fingerprint import fingerprint
from tests.engines.rollout.rollout_cases import (
    EOS,
    PAD,
    assert_same,
    embedded,
    mixed_requests,
    naive_log_probs,
    rollout_config,
    tiny_model,
)

PLUGIN = Path(__file__).parents[3] / "examples" / "plugins" / "rollout_engine.py"
ENGINES = ["embedded", "hf", f"{PLUGIN}:PlainRollout"]

pytestmark = pytest.mark.parametrize("name", ENGINES, ids=["embedded", "hf", "plugin"])


def create(name: str, model: Any) -> RolloutEngine:
    engine = create_rollout_engine(rollout_config(name=name), [EOS], PAD)
    engine.bind(model)
    return engine


def test_the_config_knows_what_the_engine_can_do(name: str) -> None:
    assert ROLLOUT_ENGINES.problem(name) is None
    assert ROLLOUT_ENGINES.info(name) == create(name, tiny_model()).info
    assert ROLLOUT_ENGINES.info(name).shares_weights


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 7, "top_p": 0.9}])
def test_samples_and_log_probs(name: str, sampling: dict[str, Any]) -> None:
    model, requests = tiny_model(), mixed_requests(**sampling)
    completions = create(name, model).generate(requests)
    assert_same(completions, embedded(model).generate(requests))
    for request, completion in zip(requests, completions):
        expected = naive_log_probs(model, request, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_a_sample_does_not_depend_on_the_batch(name: str) -> None:
    engine, requests = create(name, tiny_model()), mixed_requests()
    together = engine.generate(requests)
    assert_same([engine.generate([request])[0] for request in requests], together)


def test_new_weights_are_used_at_once(name: str) -> None:
    model, request = tiny_model(), GenerationRequest([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True), 1)
    engine = create(name, model)
    engine.generate([request])
    with torch.no_grad():
        model.model.norm.weight.mul_(3.0)
    (bound,) = engine.generate([request])
    torch.testing.assert_close(torch.tensor(bound.log_probs), naive_log_probs(model, request, bound), atol=1e-4, rtol=0)
    weights = {key: 2 * value for key, value in model.state_dict().items() if key == "model.norm.weight"}
    engine.begin_update()
    engine.update_weights(iter(weights.items()))
    engine.finish_update(5)
    (updated,) = engine.generate([request])
    assert updated.policy_version == 5 and updated.log_probs != bound.log_probs
    assert engine.fingerprints([*weights, "no.such.weight"]) == {key: fingerprint(w) for key, w in weights.items()}


def test_aborted_requests_end(name: str) -> None:
    engine, requests = create(name, tiny_model()), mixed_requests()
    with engine.serving():
        for place, request in enumerate(requests[:3]):
            engine.add(place, request)
        assert engine.unfinished() == [0, 1, 2]
        partial = engine.abort([1, 7])
        assert list(partial) == [1] and partial[1].stop_reason == "abort" and engine.unfinished() == [0, 2]
        done: dict[int, Any] = {}
        while engine.unfinished():
            done |= engine.step()
    assert_same([done[0], done[2]], embedded(tiny_model()).generate([requests[0], requests[2]]))
