"""The real 135M model: log-probs, entropies, greedy answers and one update against recorded numbers.

SMOLLM2_DIR names the folder of SmolLM2-135M-Instruct; without it these tests are skipped.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.compose import load_config
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.rollout.rollout_engine import GenerationRequest, SamplingParams, create_rollout_engine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.loading import load_causal_lm
from lockstep.models.token_models import PolicyModel
from lockstep.workers.losses import actor_loss_fn

FOLDER = os.environ.get("SMOLLM2_DIR", "")
CPU = torch.device("cpu")
TOKENS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
pytestmark = pytest.mark.skipif(not FOLDER, reason="SMOLLM2_DIR is not set")


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    return dict(np.load(Path(__file__).parent / "golden_public" / "model_vectors.npz"))


def engine() -> FsdpEngine:
    model = PolicyModel(load_causal_lm(HFModelConfig(path=FOLDER), "m", torch.float32, CPU))
    optim = FSDPOptimizerConfig(lr=1e-5, total_training_steps=1)
    config = FSDPEngineConfig()
    return FsdpEngine(model, config, optim, device=CPU, compute_dtype=torch.float32, packed=True, clip_grad=1.0)


def rows_of(vectors: dict[str, Any], *more: str) -> TensorDict:
    tensors = {name: torch.from_numpy(vectors[name]) for name in (*TOKENS, *more)}
    return TensorDict(tensors, batch_size=[2])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy(vectors: dict[str, Any], temperature: float) -> None:
    out = engine().forward(rows_of(vectors), MicroBatching(), temperature=temperature, with_entropy=True)
    mask = vectors["response_mask"].astype(bool)
    # the recorded entropies were summed in float32 without a shift: against float64 they are off by up to 2.3e-3
    for name, tolerance in (("log_probs", 1e-3), ("entropy", 3e-3)):
        expected = vectors[f"{name}_T{temperature}"]
        np.testing.assert_allclose(out[name].numpy()[mask], expected[mask], atol=tolerance)


def test_entropy_has_the_digits_of_float32(vectors: dict[str, Any]) -> None:
    rows = rows_of(vectors)
    model = load_causal_lm(HFModelConfig(path=FOLDER), "m", torch.float32, CPU).eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs).logits[:, 159:-1].double()
    exact = torch.distributions.Categorical(logits=logits).entropy()
    out = engine().forward(rows, MicroBatching(), with_entropy=True)["entropy"]
    mask = rows["response_mask"].bool()
    torch.testing.assert_close(out[mask].double(), exact[mask], atol=1e-4, rtol=1e-4)


def test_greedy_answers(vectors: dict[str, Any]) -> None:
    rollout = create_rollout_engine(RolloutConfig(prompt_length=160, response_length=32, seed=0), [], 0)
    rollout.bind(load_causal_lm(HFModelConfig(path=FOLDER), "m", torch.float32, CPU))
    rows = rows_of(vectors)
    prompts = [p[m.bool()].tolist() for p, m in zip(rows["prompts"], rows["attention_mask"][:, :160])]
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    completions = rollout.generate([GenerationRequest(prompt_ids=p, sampling=sampling, seed=0) for p in prompts])
    assert [c.token_ids for c in completions] == vectors["greedy_ids"].tolist()


@pytest.mark.parametrize(
    ("case", "settings"), [("pg", {}), ("pg_kl_ent", {"entropy_coeff": 0.01, "use_kl_loss": True})]
)
@pytest.mark.parametrize("micro", [MicroBatching(), MicroBatching(num_rows=1)])
def test_one_update(vectors: dict[str, Any], case: str, settings: dict[str, Any], micro: MicroBatching) -> None:
    config = dataclasses.replace(load_config(run_checks=False).actor_rollout_ref.actor, kl_loss_coef=0.05, **settings)
    trainer, rows = engine(), rows_of(vectors, "old_log_probs", "advantages", "ref_log_prob")
    mask = rows["response_mask"]
    info = {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(-1).sum())}
    loss_fn = actor_loss_fn(config, info)
    metrics = trainer.forward_backward(rows, loss_fn, micro, with_entropy=bool(settings))
    assert metrics["actor/pg_loss"] == pytest.approx(float(vectors[f"{case}.pg_loss"]), rel=1e-3)
    for name in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        assert metrics[name] == pytest.approx(float(vectors[f"{case}.{name}"]), abs=1e-4)
    assert trainer.optimizer_step() == pytest.approx(float(vectors[f"{case}.grad_norm"]), rel=1e-3)
    mask = vectors["response_mask"].astype(bool)
    after = trainer.forward(rows, MicroBatching())["log_probs"].numpy()
    np.testing.assert_allclose(after[mask], vectors[f"{case}.log_probs_after"][mask], atol=1e-3)


def test_supervised_loss(vectors: dict[str, Any]) -> None:
    rows = rows_of(vectors)
    log_probs = engine().forward(rows, MicroBatching())["log_probs"]
    mask = rows["response_mask"].bool()
    assert float(-log_probs[mask].mean()) == pytest.approx(float(vectors["sft_loss"]), abs=1e-3)
