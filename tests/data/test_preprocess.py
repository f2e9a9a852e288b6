"""examples/data_preprocess: published files to dataset rows.

The scripts run on small generated files, and on the published files if LOCKSTEP_DATA is set.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lockstep.config.data import DataConfig
from lockstep.data.rl_dataset import RLHFDataset
from tests.tiny import tiny_tokenizer

SCRIPTS = Path(__file__).parents[2] / "examples/data_preprocess"
PUBLISHED = os.environ.get("LOCKSTEP_DATA")


def run_script(script: str, source: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), "--input", str(source), "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True)


def convert(script: str, examples: list[dict[str, Any]], folder: Path, *options: str) -> tuple[list[Any], str]:
    """The rows as the dataset returns them, and the script's output."""
    source, output = folder / "published.jsonl", folder / "made" / "rows.parquet"
    source.write_text("".join(json.dumps(example) + "\n" for example in examples))
    result = run_script(script, source, output, *options)
    assert result.returncode == 0, result.stderr
    dataset = RLHFDataset(str(output), tiny_tokenizer(), DataConfig(max_prompt_length=2000))
    return [dataset[i] for i in range(len(dataset))], result.stderr


def refusal(script: str, example: dict[str, Any], folder: Path) -> str:
    (folder / "bad.jsonl").write_text(json.dumps(example) + "\n")
    result = run_script(script, folder / "bad.jsonl", folder / "bad.parquet")
    assert result.returncode != 0 and not (folder / "bad.parquet").exists()
    return result.stderr


def test_gsm8k(tmp_path: Path) -> None:
    examples = [
        {"question": "One and one?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        {"question": "A thousand twice?", "answer": "It is 2,000.\n#### 2,000"},
    ]
    rows, _ = convert("gsm8k.py", examples, tmp_path, "--split", "test")
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": "2000"}
    assert rows[1]["data_source"] == "openai/gsm8k" and rows[1]["ability"] == "math" and rows[1]["index"] == 1
    assert rows[1]["extra_info"] == {"split": "test", "index": 1} | examples[1]
    (message,) = rows[1]["raw_prompt"]
    assert message["content"].startswith("A thousand twice? ") and '"####"' in message["content"]
    assert "example 0: the answer has no '#### <number>'" in refusal(
        "gsm8k.py", {"question": "?", "answer": "two"}, tmp_path
    )
    assert "example 0 has no 'answer' (fields: question)" in refusal("gsm8k.py", {"question": "?"}, tmp_path)


def test_math_uses_the_answer_or_the_last_box(tmp_path: Path) -> None:
    examples = [
        {"problem": "a", "answer": "\\frac{1}{2}", "level": "Level 1"},
        {"problem": "b", "solution": "First \\boxed{1}, then $\\boxed{\\frac{3}{4}}$.", "level": "Level 2"},
        {"problem": "c", "answer": None, "level": "Level 3"},
        {"problem": "d", "solution": "so $\\boxed 7$ it is", "level": "Level 4"},
    ]
    rows, logged = convert("math_dataset.py", examples, tmp_path)
    truths = {row["index"]: row["reward_model"]["ground_truth"] for row in rows}
    assert truths == {0: "\\frac{1}{2}", 1: "\\frac{3}{4}", 3: "7"}
    assert "skipped 1 examples without an answer: 2" in logged
    assert rows[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert rows[1]["extra_info"]["level"] == "Level 2"
    assert rows[0]["raw_prompt"][0]["content"].endswith("\\boxed{}.")


def test_aime_writes_whole_numbers(tmp_path: Path) -> None:
    examples = [
        {"problem": "a", "answer": "073"},
        {"problem": "b", "answer": "27.0"},
        {"problem": "c", "answer": "2.5"},
    ]
    rows, _ = convert("aime2024.py", examples, tmp_path)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["73", "27", "2.5"]
    assert rows[0]["data_source"] == "aime24" and rows[0]["extra_info"] == {"split": "test", "index": 0}
    assert "the answer 'x' is not a number" in refusal("aime2024.py", {"problem": "a", "answer": "x"}, tmp_path)


def humaneval_example(task: str, *asserts: str) -> dict[str, Any]:
    test = "METADATA = {}\ndef check(candidate):\n" + "".join(f"    {line}\n" for line in asserts)
    return {"task_id": task, "prompt": "def add(a, b):\n", "entry_point": "add", "test": test}


def test_humaneval_checks_become_inputs_and_outputs(tmp_path: Path) -> None:
    examples = [
        humaneval_example(
            "H/0", "assert candidate(1, 'x\\ny') == (1, [2.5])", "assert candidate([], None) is True, 'm'"
        ),
        humaneval_example("H/1", "for i in range(3):", "    assert candidate(i, i) == i"),
        humaneval_example("H/2", "assert abs(candidate(1, 2) - 3) < 1e-6"),
        humaneval_example("H/3", "assert candidate((1, 2), 3) == 1"),  # JSON has no tuples
        humaneval_example("H/4", "assert candidate(1, 2) == 3", "assert True, 'always'"),
    ]
    rows, logged = convert("humaneval.py", examples, tmp_path)
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    assert truths[0] == {"fn_name": "add", "inputs": ['1\n"x\\ny"', "[]\nnull"], "outputs": ["[1, [2.5]]", "true"]}
    assert truths[1] == {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
    assert "skipped 3 tasks whose checks are not plain comparisons: H/1, H/2, H/3" in logged


def test_mbpp_finds_the_function_that_is_tested(tmp_path: Path) -> None:
    example = {"text": "Add.", "code": "def add(a, b):\n    return a + b", "test_list": ["assert add(1, 2) == 3"]}
    other = example | {"test_list": ["assert set(add([1], [2])) == {1, 2}"]}
    rows, logged = convert("mbpp.py", [example, other], tmp_path)
    assert json.loads(rows[0]["reward_model"]["ground_truth"]) == {
        "fn_name": "add",
        "inputs": ["1\n2"],
        "outputs": ["3"],
    }
    assert "assert add(1, 2) == 3" in rows[0]["raw_prompt"][0]["content"] and "skipped 1 tasks" in logged


@pytest.mark.skipif(PUBLISHED is None, reason="needs LOCKSTEP_DATA, a folder with the published files")
@pytest.mark.parametrize(
    ("script", "source", "ready", "options"),
    [
        ("gsm8k.py", "gsm8k/test.jsonl", "gsm8k/test.parquet", ["--split", "test"]),
        ("gsm8k.py", "gsm8k/train.jsonl", "gsm8k/train.parquet", ["--split", "train"]),
        (
            "math_dataset.py",
            "math/math500.jsonl",
            "math/math500.parquet",
            ["--split", "test", "--data-source", "HuggingFaceH4/MATH-500"],
        ),
        ("math_dataset.py", "math/math_train_deepscaler.jsonl", "math/math_train.parquet", []),
        ("aime2024.py", "math/aime24.jsonl", "math/aime24.parquet", []),
        ("aime2024.py", "math/amc23.jsonl", "math/amc23.parquet", ["--data-source", "math_dapo"]),
    ],
)
def test_published_files_give_the_expected_rows(
    tmp_path: Path, script: str, source: str, ready: str, options: list[str]
) -> None:
    folder = Path(str(PUBLISHED))
    assert run_script(script, folder / source, tmp_path / "rows.parquet", *options).returncode == 0
    wanted = {row["extra_info"]["index"]: row for row in pq.read_table(folder / ready).to_pylist()}
    made = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert all(row == wanted.pop(row["extra_info"]["index"]) for row in made)
    # Skipped rows have no answer in the published file either.
    assert all(row["reward_model"]["ground_truth"] in ("", "None") for row in wanted.values())


@pytest.mark.skipif(PUBLISHED is None, reason="needs LOCKSTEP_DATA, a folder with the published files")
@pytest.mark.parametrize(
    ("script", "source", "num_rows"), [("humaneval.py", "humaneval", 142), ("mbpp.py", "mbpp", 825)]
)
def test_reference_solutions_pass_the_generated_tests(tmp_path: Path, script: str, source: str, num_rows: int) -> None:
    published = Path(str(PUBLISHED)) / f"code/{source}.jsonl"
    assert run_script(script, published, tmp_path / "rows.parquet").returncode == 0
    examples = [json.loads(line) for line in published.read_text().splitlines()]
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(rows) == num_rows
    for row in rows:
        example, truth = examples[row["extra_info"]["index"]], json.loads(row["reward_model"]["ground_truth"])
        namespace: dict[str, Any] = {}
        exec(example["prompt"] + example["canonical_solution"] if "prompt" in example else example["code"], namespace)
        for arguments, expected in zip(truth["inputs"], truth["outputs"]):
            result = namespace[truth["fn_name"]](*map(json.loads, arguments.split("\n")))
            assert json.loads(json.dumps(result)) == json.loads(expected)


def test_missing_input_file(tmp_path: Path) -> None:
    done = run_script("gsm8k.py", tmp_path / "none.jsonl", tmp_path / "x.parquet")
    assert done.returncode == 1
    assert "none.jsonl: no such file" in done.stderr and "Traceback" not in done.stderr
