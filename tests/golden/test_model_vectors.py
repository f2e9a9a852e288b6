"""A real model through the actor's worker: log-probs, entropies, greedy tokens, SFT loss and one PPO update.

The numbers are the public system's, in float32 with eager attention and padded rows. Runs where SMOLLM2_DIR is set.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import to_dataclass
from lockstep.protocol import DataProto, object_array
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker

sys.path.insert(0, str(Path(__file__).parent))

from smollm2 import FOLDER, needs_smollm2

pytestmark = needs_smollm2
ROWS = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask")
VECTORS = dict(np.load(Path(__file__).parent / "golden_public" / "model_vectors.npz"))
MASK = VECTORS["response_mask"].astype(bool)
# float32 logits of up to 43 over 49,152 words: the stored entropies are off the exact ones by up to 2.3e-3
ENTROPY_ERROR = 3e-3


def worker(actor: dict[str, Any] | None = None, **rollout: Any) -> ActorRolloutRefWorker:
    optim = {"lr": 1e-5, "weight_decay": 0.01, "betas": [0.9, 0.999]}
    tree = {
        "data": {"max_prompt_length": 160, "max_response_length": 64},
        "actor_rollout_ref": {
            "model": {"path": str(FOLDER), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1, "optim": optim, **(actor or {})},
            "rollout": rollout,
        },
    }
    built = ActorRolloutRefWorker(to_dataclass(PPOConfig, tree).actor_rollout_ref, role="actor_rollout", device="cpu")
    built.init_model()
    return built


@pytest.fixture(scope="module")
def plain() -> Iterator[ActorRolloutRefWorker]:
    yield worker()


def rows(*more: str) -> DataProto:
    tensors = {key: torch.from_numpy(VECTORS[key]) for key in (*ROWS, *more)}
    return DataProto.from_dict(tensors=tensors, meta_info={"global_steps": 1})


def test_log_probs_and_entropies(plain: ActorRolloutRefWorker) -> None:
    out = plain.compute_log_prob(rows()).tensors
    np.testing.assert_allclose(out["old_log_probs"].numpy()[MASK], VECTORS["log_probs_T1.0"][MASK], atol=1e-3)
    np.testing.assert_allclose(out["entropys"].numpy()[MASK], VECTORS["entropy_T1.0"][MASK], atol=ENTROPY_ERROR)
    assert -out["old_log_probs"].numpy()[MASK].mean() == pytest.approx(float(VECTORS["sft_loss"]), abs=1e-3)


def test_log_probs_at_another_temperature() -> None:
    out = worker(temperature=0.7).compute_log_prob(rows()).tensors
    np.testing.assert_allclose(out["old_log_probs"].numpy()[MASK], VECTORS["log_probs_T0.7"][MASK], atol=1e-3)
    np.testing.assert_allclose(out["entropys"].numpy()[MASK], VECTORS["entropy_T0.7"][MASK], atol=ENTROPY_ERROR)


def test_greedy_tokens(plain: ActorRolloutRefWorker) -> None:
    attended = VECTORS["attention_mask"][:, :160].astype(bool)
    prompts = [ids[mask].tolist() for ids, mask in zip(VECTORS["prompts"], attended)]
    batch = DataProto.from_dict(
        tensors={"sampling_seed": torch.zeros(2, dtype=torch.int64)},
        non_tensors={"raw_prompt_ids": object_array(prompts)},
        meta_info={"validate": False, "greedy": True},
    )
    responses = plain.generate_sequences(batch).tensors["responses"]
    assert responses[:, :32].tolist() == VECTORS["greedy_ids"].tolist()


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("pg", {}),
        ("pg_kl_ent", {"use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coeff": 0.01}),
    ],
)
def test_one_ppo_update(name: str, terms: dict[str, Any]) -> None:
    actor = worker(actor=terms)
    out = actor.update_actor(rows("old_log_probs", "ref_log_prob", "advantages")).meta_info["metrics"]
    assert out["actor/pg_loss"] == pytest.approx(float(VECTORS[f"{name}.pg_loss"]), abs=1e-4)
    assert out["actor/grad_norm"] == pytest.approx(float(VECTORS[f"{name}.grad_norm"]), rel=1e-3)
    for metric in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        assert out[metric] == pytest.approx(float(VECTORS[f"{name}.{metric}"]), abs=1e-3)
    after = actor.compute_log_prob(rows()).tensors["old_log_probs"].numpy()
    np.testing.assert_allclose(after[MASK], VECTORS[f"{name}.log_probs_after"][MASK], atol=1e-3)
