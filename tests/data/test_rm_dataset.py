"""RMDataset: both answers of a pair after the same prompt, chosen first."""

import json
from pathlib import Path

import pytest

from lockstep.data.rm_dataset import RMDataset
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def write(folder: Path, **row: object) -> str:
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    return str(folder / "pairs.jsonl")


def test_pair(tmp_path: Path) -> None:
    dataset = RMDataset(write(tmp_path, prompt="ab", chosen="cde", rejected="f"), TOKENIZER, max_length=5)
    sample = dataset[0]
    eos = TOKENIZER.eos_token_id
    assert len(dataset) == 1
    assert sample["input_ids"].tolist() == [TOKENIZER("abcde")["input_ids"], [*TOKENIZER("abf")["input_ids"], eos, 0]]
    assert sample["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    without_eos = RMDataset(str(tmp_path / "pairs.jsonl"), TOKENIZER, max_length=5, add_eos=False)[0]
    assert without_eos["attention_mask"].sum(1).tolist() == [5, 3]


def test_bad_pairs_are_rejected(tmp_path: Path) -> None:
    file = write(tmp_path, prompt="a", chosen="b", rejected=3)
    with pytest.raises(ValueError, match=r"row 0: 'rejected' must be text, not int"):
        RMDataset(file, TOKENIZER)
    with pytest.raises(ValueError, match=r"row 0 has no 'good'; set chosen_key .*columns: prompt, chosen, rejected"):
        RMDataset(file, TOKENIZER, chosen_key="good")
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos token"):
        RMDataset(file, endless)
