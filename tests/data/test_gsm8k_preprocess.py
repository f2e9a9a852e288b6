"""examples/data_preprocess/gsm8k.py: published lines to rows that the dataset reads."""

import json
import subprocess
import sys
from pathlib import Path

from lockstep.config.data import DataConfig
from lockstep.data.rl_dataset import RLHFDataset
from tests.tiny import tiny_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples/data_preprocess/gsm8k.py"


def convert(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--input", str(source), "--output", str(output), "--split", "test"]
    return subprocess.run(command, capture_output=True, text=True)


def test_converted_rows_are_read_back(tmp_path: Path) -> None:
    examples = [
        {"question": "One and one?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        {"question": "A thousand twice?", "answer": "It is 2,000.\n#### 2,000"},
    ]
    source, output = tmp_path / "test.jsonl", tmp_path / "made" / "test.parquet"
    source.write_text("".join(json.dumps(example) + "\n" for example in examples))
    assert convert(source, output).returncode == 0
    dataset = RLHFDataset(str(output), tiny_tokenizer(), DataConfig())
    assert len(dataset) == 2
    row = dataset[1]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2000"}
    assert row["data_source"] == "openai/gsm8k" and row["ability"] == "math" and row["index"] == 1
    assert row["extra_info"] == {"split": "test", "index": 1} | examples[1]
    (message,) = row["raw_prompt"]
    assert message["content"].startswith("A thousand twice? ") and '"####"' in message["content"]


def test_an_answer_without_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"question": "?", "answer": "two"}) + "\n")
    result = convert(tmp_path / "bad.jsonl", tmp_path / "bad.parquet")
    assert result.returncode != 0 and "example 0: the answer has no '#### <number>'" in result.stderr
