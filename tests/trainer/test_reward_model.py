"""Training with a reward model: with the policy's tokenizer and with its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.model import HFModelConfig
from lockstep.models.export import save_scalar_model
from lockstep.models.loading import load_value_model
from lockstep.protocol import DataProto, object_array
from lockstep.trainer.main_ppo import main
from lockstep.workers.reward_model import RewardModelWorker
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def reward_model(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    cpu = torch.device("cpu")
    body, score = load_value_model(HFModelConfig(path=str(tiny_run_files / "model")), "m", torch.float32, cpu, seed=5)
    weights = [(f"model.{name}", tensor) for name, tensor in body.named_parameters()]
    save_scalar_model(body, [*weights, ("score.weight", 100 * score.weight)], tiny_tokenizer(), folder)
    return folder


def run(overrides: list[str], tmp_path: Path, *extra: str) -> list[dict[str, Any]]:
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3", "trainer.total_training_steps=2"]
    assert main([*overrides, *settings, "reward_model.enable=true", *extra]) == 0
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_model_scores_are_the_reward(overrides: list[str], tmp_path: Path, reward_model: Path) -> None:
    rows = run(
        overrides, tmp_path, f"reward_model.model.path={reward_model}", "reward_model.micro_batch_size_per_gpu=2"
    )
    assert rows[1]["critic/score/max"] > rows[1]["critic/score/min"]
    assert all(r["actor/grad_norm"] > 0 for r in rows[1:])
    assert "val-core/openai/gsm8k/reward/mean@1" in rows[0]


def test_own_tokenizer(overrides: list[str], tmp_path: Path, reward_model: Path, tiny_run_files: Path) -> None:
    """The same tokenizer under another name: the conversation is encoded again, with the template's end of turn."""
    own = f"reward_model.model.input_tokenizer={tiny_run_files}/model"
    rows = run(overrides, tmp_path, f"reward_model.model.path={reward_model}", own)
    assert rows[1]["critic/score/max"] > rows[1]["critic/score/min"]


def test_own_tokenizer_gets_all_turns_of_a_conversation() -> None:
    turns = [
        {"role": role, "content": text} for role, text in (("assistant", "ab"), ("user", "cd"), ("assistant", "e"))
    ]
    worker = object.__new__(RewardModelWorker)
    worker.tokenizer = tokenizer = tiny_tokenizer()
    rows = DataProto.from_dict(
        tensors={"responses": torch.ones(1, 4, dtype=torch.int64), "response_mask": torch.tensor([[1, 0, 0, 1]])},
        non_tensors={
            "raw_prompt": object_array([[{"role": "user", "content": "Q"}]]),
            "messages": object_array([turns]),
            "__num_turns__": object_array([4]),
        },
    )
    text = tokenizer.decode(worker._reencode(rows, tokenizer)["input_ids"][0])
    assert text == tokenizer.apply_chat_template([{"role": "user", "content": "Q"}, *turns], tokenize=False)


def test_folder_without_a_score_head_is_refused(
    overrides: list[str], tiny_run_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"reward_model.model.path={tiny_run_files}/model"
    assert main([*overrides, "reward_model.enable=true", path]) == 2
    assert "no one-label `score` head" in capsys.readouterr().err
