"""docs/learning_runs.md: its commands run in order on tiny data, and its scripts do what the page says."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from tests.programs import run_shell
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRAINING = (
    "data.max_prompt_length=1500 data.max_response_length=4 data.train_batch_size=2 data.val_max_samples=2 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.n=2 trainer.total_training_steps=2 "
    "trainer.save_freq=0 trainer.device=cpu"
)
TINY = {
    "word_problems.py": "--held-out 2",
    "sft_smollm2_gsm8k.sh": "data.train_batch_size=2 trainer.total_epochs=1 data.max_length=1500 trainer.device=cpu",
    "grpo_smollm2_easy.sh": TRAINING,
    "grpo_smollm2_gsm8k.sh": TRAINING,
}
"""Program -> arguments that make it small."""
BLOCKS = re.findall(r"```\n(.*?)```", (ROOT / "docs/learning_runs.md").read_text(), flags=re.S)


def module(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script as a module; scripts import their neighbours."""
    file = ROOT / path
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def easy_row(question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"question": question, "answer": answer},
    }


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    save_tiny_model(tmp_path / "models/SmolLM2-135M-Instruct", max_position_embeddings=2048)
    (tmp_path / "raw/easy").mkdir(parents=True)
    (tmp_path / "raw/gsm8k").mkdir()
    rows = [easy_row(f"{name} has 2 and 3. How many?", "5") for name in ("Ann", "Bob", "Cy", "Di", "Ed", "Flo")]
    pd.DataFrame(rows[:3]).to_parquet(tmp_path / "raw/easy/a.parquet")
    pd.DataFrame(rows[3:]).to_parquet(tmp_path / "raw/easy/b.parquet")
    for split in ("train", "test"):
        example = {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
        (tmp_path / f"raw/gsm8k/{split}.jsonl").write_text(4 * (json.dumps(example) + "\n"))
    return {name.upper(): str(tmp_path / name) for name in ("raw", "models", "data", "run")}


@pytest.mark.parametrize(("name", "block"), list(zip(("easy", "gsm8k"), BLOCKS, strict=True)), ids=("easy", "gsm8k"))
def test_documented_commands_run(
    name: str, block: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = block.replace("global_step_348", "global_step_2")  # 4 pairs, 2 per step
    small = "\n".join(
        f"{line} {next((arguments for program, arguments in TINY.items() if program in line), '')}"
        for line in block.splitlines()
    )
    monkeypatch.chdir(ROOT)
    script = f'python() {{ "$PYTHON" "$@"; }}\nlockstep() {{ "$PYTHON" -m lockstep.cli "$@"; }}\n{small}'
    assert run_shell(["bash", "-euc", script], tmp_path, places) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / name / "metrics.jsonl").read_text().splitlines()]
    core = "val-core/openai/gsm8k/" + ("acc/mean@1" if name == "easy" else "reward/mean@1")
    assert [step["step"] for step in steps if core in step] == [0, 2]
    assert (tmp_path / "run" / name / "validation/2.jsonl").is_file()
    assert (tmp_path / f"run/{name}.svg").is_file()


def test_variants_of_a_question_stay_in_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = module("examples/data_preprocess/word_problems.py", monkeypatch)
    rows = [easy_row(f"{who} had {n} pens . How many ?", str(n)) for who in "abcdefgh" for n in (1, 22)]
    again = [easy_row("A had 1 pens. How many?", "1")]
    train, test = problems.split([*rows, *again], 4, seed=0)
    assert len(train) == 12 and len(test) == 4
    forms = [{problems.form_of(row["extra_info"]["question"]) for row in side} for side in (train, test)]
    assert not forms[0] & forms[1]
    assert problems.split(rows, 4, seed=0)[1] != problems.split(rows, 4, seed=1)[1]
    asked = problems.row_of(rows[0])
    assert asked["prompt"][-1] == {"role": "user", "content": "a had 1 pens . How many ?"}
    assert [m["role"] for m in asked["prompt"][:2]] == ["user", "assistant"] and len(asked["prompt"]) == 9


def test_pairs_have_no_calculator_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = module("examples/data_preprocess/gsm8k_pairs.py", monkeypatch)
    pair = pairs.pair_of({"question": "Half of 48?", "answer": "48/2 = <<48/2=24>>24, $<<3*8=24>>24.\n#### 24"})
    assert pair["response"] == "48/2 = 24, $24.\n#### 24"
    assert pair["prompt"].startswith("Half of 48? ") and '"####"' in pair["prompt"]


@pytest.mark.parametrize(
    ("answer", "truth", "acc", "form"),
    [
        ("So 4 + 5 = 9.\n#### 9", "9", 1, 1),
        ("The answer is 9.", "9", 1, 0),
        ("It is 1,200 in all.", "1200", 1, 0),
        ("#### 3.5", "3.5", 1, 1),
        ("9 - 4 = 5\n#### -5", "5", 0, 1),
        ("#### 9\n#### 9", "9", 1, 0),
        ("#### 9 apples", "9", 1, 0),
        ("nine", "9", 0, 0),
    ],
)
def test_reward(answer: str, truth: str, acc: int, form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    result = module("examples/reward_smollm2.py", monkeypatch).compute_score("", answer, truth)
    assert result == {"score": pytest.approx(acc + 0.1 * form), "acc": acc, "form": form}
