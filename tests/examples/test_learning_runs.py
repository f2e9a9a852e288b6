"""docs/learning_runs.md: its commands run in order on tiny data, and its scripts do what the page says."""

import importlib.util
import json
import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from lockstep.agents.tool_parser import HermesToolParser
from lockstep.agents.tools.calculator import calculate
from tests.programs import run_shell
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.first

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
    "calculator_problems.py": "--held-out 2",
    "sft_smollm2_calculator.sh": "data.train_batch_size=2 data.max_length=1500 trainer.device=cpu",
    "grpo_smollm2_calculator.sh": TRAINING,
}
"""Program -> arguments that make it small."""
CORE = {
    "easy": "val-core/openai/gsm8k/acc/mean@1",
    "gsm8k": "val-core/openai/gsm8k/reward/mean@1",
    "calculator": "val-core/word_problems/reward/mean@1",
}
"""Run -> its validation metric."""
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


def svamp(name: str) -> dict[str, Any]:
    body = f"{name} had 12 pens and 9 pins. {name} lost 4 pens"
    return {"Body": body, "Question": "How many pens are left?", "Equation": "( 12.0 - 4.0 )", "Answer": 8.0}


def asdiv(name: str) -> dict[str, Any]:
    body = f"{name} has 15 planks and gets 10 planks twice."
    return {"body": body, "question": "How many planks?", "formula": "15+10+10=35", "answer": "35 (planks)"}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    save_tiny_model(tmp_path / "models/SmolLM2-135M-Instruct", max_position_embeddings=2048)
    (tmp_path / "raw/easy").mkdir(parents=True)
    (tmp_path / "raw/gsm8k").mkdir()
    (tmp_path / "raw/math").mkdir()
    rows = [easy_row(f"{name} has 2 and 3. How many?", "5") for name in ("Ann", "Bob", "Cy", "Di", "Ed", "Flo")]
    pd.DataFrame(rows[:3]).to_parquet(tmp_path / "raw/easy/a.parquet")
    pd.DataFrame(rows[3:]).to_parquet(tmp_path / "raw/easy/b.parquet")
    for split in ("train", "test"):
        example = {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
        (tmp_path / f"raw/gsm8k/{split}.jsonl").write_text(4 * (json.dumps(example) + "\n"))
    (tmp_path / "raw/math/svamp.jsonl").write_text("".join(json.dumps(svamp(name)) + "\n" for name in ("Ann", "Bob")))
    (tmp_path / "raw/math/asdiv.jsonl").write_text("".join(json.dumps(asdiv(name)) + "\n" for name in ("Cy", "Di")))
    return {name.upper(): str(tmp_path / name) for name in ("raw", "models", "data", "run")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), list(zip(CORE, BLOCKS, strict=True)), ids=CORE)
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
    assert [step["step"] for step in steps if CORE[name] in step] == [0, 2]
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


def test_formulas_become_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = module("examples/data_preprocess/calculator_problems.py", monkeypatch)
    row = problems.problem_of(asdiv("Cy"))
    assert row["prompt"][0]["content"] == "Cy has 15 planks and gets 10 planks twice. How many planks?"
    assert row["reward_model"]["ground_truth"] == "35"
    steps = problems.steps_of("15+10+10")
    assert problems.plain_solution(steps) == [{"role": "assistant", "content": "15 + 10 = 25\n25 + 10 = 35\n#### 35"}]
    solution = problems.calculator_solution(steps)
    assert [message["role"] for message in solution] == ["assistant", "tool", "assistant", "tool", "assistant"]
    calls = [HermesToolParser(None).parse(message["content"])[1] for message in solution[:4:2]]
    assert [calculate(json.loads(call.arguments)["expression"]) for (call,) in calls] == ["25", "35"]
    assert [message["content"] for message in solution[1::2]] == ["25", "35"] and solution[-1]["content"] == "#### 35"


@pytest.mark.parametrize("formula", ["7/2", "3-5", "4-4", "x+1", "26/4=6 r2", "GCD(14,7)", "2^3", "'a'*3", "5"])
def test_other_formulas_are_skipped(formula: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = module("examples/data_preprocess/calculator_problems.py", monkeypatch)
    assert problems.steps_of(formula) is None


def test_larger_numbers_have_one_digit_more_and_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = module("examples/data_preprocess/calculator_problems.py", monkeypatch)
    for seed in range(20):
        larger = problems.with_larger_numbers(problems.problem_of(svamp("Ann")), random.Random(seed))
        question = larger["extra_info"]["question"]
        pens, pins, lost = map(int, re.findall(r"\d+", question))
        assert question == f"Ann had {pens} pens and {pins} pins. Ann lost {lost} pens, How many pens are left?"
        assert 10 <= lost < pins < 100 <= pens < 1000
        assert larger["data_source"] == "word_problems_large"
        assert larger["reward_model"]["ground_truth"] == str(pens - lost)
    fraction = problems.problem_of(svamp("Ann") | {"Body": "Ann had 12 pens, lost 4 and broke 1/2 of a pin"})
    assert problems.with_larger_numbers(fraction, random.Random(0)) is None
