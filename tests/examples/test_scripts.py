"""Every script in examples/ trains, on a tiny model and a few rows."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep.registry import load_object
from tests.programs import run_shell
from tests.tiny import save_tiny_model, write_rows

pytestmark = pytest.mark.first

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(script for script in EXAMPLES.glob("*.sh") if not script.stem.startswith(("sft_", "pipeline")))
"""Those of RL; test_learning_runs.py runs those of SFT."""
SMALL = [
    "data.train_batch_size=4",
    "data.max_prompt_length=40",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
]
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 3\n"
)
EXPECTED = {
    "dapo": ["actor/pg_clipfrac_lower", "val-aux/openai/gsm8k/overlong_reward/mean@2"],
    "grpo": ["actor/pg_loss"],
    "grpo_smollm2_calculator": ["actor/pg_loss", "tool_call_counts/mean"],
    "grpo_smollm2_easy": ["actor/pg_loss"],
    "grpo_smollm2_gsm8k": ["actor/pg_loss"],
    "grpo_smollm2_lora": ["actor/pg_loss", "actor/kl_loss"],
    "ppo_single_gpu": ["critic/vf_loss", "actor/reward_kl_penalty"],
    "reinforce_plus_plus": ["actor/reward_kl_penalty"],
}
"""Script -> metrics that it must log."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("examples")
    save_tiny_model(folder / "model")
    for name in ("train.parquet", "test.parquet"):
        write_rows(folder / name, 8)
    (folder / "reward.py").write_text(REWARD)
    return {"MODEL": str(folder / "model"), "DATA": str(folder)}


def train(script: Path, places: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    reward = [f"custom_reward_function.path={places['DATA']}/reward.py", "~custom_reward_function.reward_kwargs"]
    variables = places | {"RUN": str(folder / "run"), "MAX_RESPONSE_LENGTH": "6"}
    assert run_shell([str(script), *SMALL, *reward], folder, variables) == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_expected_scripts_exist() -> None:
    assert [script.stem for script in SCRIPTS] == sorted(EXPECTED)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_trains(script: Path, places: dict[str, str], tmp_path: Path) -> None:
    (metrics,) = train(script, places, tmp_path)
    assert metrics["actor/grad_norm"] > 0
    assert all(name in metrics for name in EXPECTED[script.stem])
    assert any(name.startswith("val-core/") for name in metrics)
    assert (tmp_path / "run" / "global_step_1" / "manifest.json").is_file()


@pytest.mark.slow
def test_the_pipeline_gives_one_number_at_every_hand_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_shell([str(EXAMPLES / "pipeline.sh"), "out"], tmp_path, {}) == 0
    (numbers,) = [
        line for line in capfd.readouterr().out.splitlines() if line.startswith("val-core/digits/reward/mean@4")
    ]
    trained, evaluated, reloaded = map(float, re.findall(r"(\S+) (?:in|by|after) ", numbers))
    assert 0.5 < trained < 1 and trained == evaluated == reloaded
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_script_error_names_missing_variables(places: dict[str, str]) -> None:
    environment = os.environ | {"MODEL": places["MODEL"], "DATA": ""}
    result = subprocess.run([EXAMPLES / "grpo.sh"], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "DATA: the folder with train.parquet" in result.stderr


def test_missing_model_is_explained(tmp_path: Path) -> None:
    environment = os.environ | {"MODEL": str(tmp_path)}
    result = subprocess.run([EXAMPLES / "grpo_smollm2_lora.sh"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and f"MODEL={tmp_path} has no config.json; set MODEL" in result.stderr


@pytest.mark.parametrize(
    ("answer", "score"),
    [("19", 1.0), (" 19\n", 1.0), ("12 + 7 = 19", 0.5), ("18", 0.1), ("19 - 1 = 18", 0.0), ("", 0.0)],
)
def test_reward_of_sums(answer: str, score: float) -> None:
    compute_score = load_object(f"{EXAMPLES}/sums.py", "compute_score")
    assert compute_score("sums", answer, "19") == {"score": score, "acc": float(score >= 0.5)}
