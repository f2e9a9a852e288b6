"""Preference pairs: every form of a row gives the same two sequences; a bad row is an error that names its key."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.preference import PreferenceDataConfig, RMDataConfig
from lockstep.data.preference_dataset import PreferenceDataset, create_preference_dataset
from lockstep.data.rows import parse_dialogue
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ASKED = [{"role": "user", "content": "2+2?"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("4", "five"))


def dataset_of(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> PreferenceDataset:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = create_preference_dataset([str(file)], TOKENIZER, RMDataConfig(**settings))
    assert isinstance(dataset, PreferenceDataset)
    return dataset


def texts(dataset: PreferenceDataset, item: int = 0) -> list[tuple[str, str]]:
    """(prompt, answer) of both sides."""
    found = []
    for side in ("chosen", "rejected"):
        sample = dataset[item][side]
        ids, mask = sample["input_ids"], sample["loss_mask"].bool()
        found.append((TOKENIZER.decode(ids[~mask]), TOKENIZER.decode(ids[mask])))
    return found


PROMPT = TOKENIZER.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
DIALOGUE = "\n\nHuman: 2+2?\n\nAssistant:"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "five"},
        {"prompt": ASKED, "chosen": "4", "rejected": "five"},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"prompt": "2+2?", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"prompt": DIALOGUE, "response": " 4", "chosen": " 4", "rejected": " five"},
        {"chosen": f"{DIALOGUE} 4", "rejected": f"{DIALOGUE} five"},
    ],
    ids=["text", "messages", "answers", "conversations", "ultrafeedback", "full_hh_rlhf", "hh_rlhf"],
)
def test_forms_of_a_row(tmp_path: Path, row: dict[str, Any]) -> None:
    dataset = dataset_of(tmp_path, [row])
    assert len(dataset) == 1
    assert texts(dataset) == [(PROMPT, "4<|im_end|>"), (PROMPT, "five<|im_end|>")]


def test_dialogues() -> None:
    text = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: 2+2?\n\nAssistant:"
    assert parse_dialogue(text) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        *ASKED,
        {"role": "assistant", "content": ""},
    ]
    for other in ("", "2+2?", "Human: Hi", "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: No", "\n\nAssistant: Hi"):
        assert parse_dialogue(other) is None, other


def test_margins_and_other_columns(tmp_path: Path) -> None:
    rows = [{"q": "2+2?", "good": "4", "bad": "5", "gap": gap} for gap in (1, 0.5)]
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}
    assert [sample["margin"].item() for sample in dataset_of(tmp_path, rows, margin_key="gap", **keys)] == [1.0, 0.5]
    assert "margin" not in dataset_of(tmp_path, rows, **keys)[0]
    with pytest.raises(ValueError, match=r"row 0: the margin 'good' must be a number, not '4'; set data.margin_key"):
        dataset_of(tmp_path, rows, margin_key="good", **keys)


PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "five"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": None}, "row 0 has no 'chosen'; set data.chosen_key to the column"),
        ({"rejected": None}, "row 0 has no 'rejected'; set data.rejected_key to the column"),
        ({"prompt": None}, "row 0 has no 'prompt'; set data.prompt_key to the column"),
        ({"chosen": 4}, "'chosen' must be text or a list of messages"),
        ({"prompt": [{"text": "hi"}]}, "'prompt' must be text or a list of messages"),
        ({"chosen": []}, "'chosen' must be text or a list of messages"),
        ({"chosen": ASKED, "rejected": ASKED}, "'chosen' must end with an assistant message that has text"),
        ({"chosen": [*ASKED, *GOOD]}, None),
        ({"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *ASKED, *BAD]}, "must be the same up to their last message"),
        (
            {"rejected": " "},
            "the rejected answer (data.rejected_key) is empty; correct it, or set data.drop_invalid_pairs",
        ),
        ({"rejected": "4"}, "the two answers (data.chosen_key, data.rejected_key) are equal; correct it, or set"),
        ({"prompt": "2" * 60}, "tokens, but at most 50 are allowed by data.max_length"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    if message is None:
        dataset_of(tmp_path, [PAIR | change], max_length=50)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        dataset_of(tmp_path, [PAIR | change], max_length=50)


def test_truncation_must_leave_an_answer(tmp_path: Path) -> None:
    rows = [PAIR | {"prompt": "2" * 60}]
    with pytest.raises(
        ValueError, match=r"the prompt has .* tokens, so data.truncation=right to data.max_length=50 leaves"
    ):
        dataset_of(tmp_path, rows, max_length=50, truncation="right")
    (_, good), (_, bad) = texts(dataset_of(tmp_path, rows, max_length=50, truncation="left"))
    assert (good, bad) == ("4<|im_end|>", "five<|im_end|>")


def test_invalid_pairs_are_left_out_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [PAIR | {"margin": 1}, PAIR | {"chosen": ""}, PAIR | {"chosen": "five"}, PAIR | {"chosen": "6", "margin": 2}]
    with caplog.at_level(logging.WARNING):
        dataset = dataset_of(tmp_path, rows, drop_invalid_pairs=True, margin_key="margin")
    assert [texts(dataset, i)[0][1] for i in range(len(dataset))] == ["4<|im_end|>", "6<|im_end|>"]
    assert dataset.margins == [1.0, 2.0]
    assert "2 of 4 pairs are left out; the first: " in caplog.text and "row 1: the chosen answer" in caplog.text
    with pytest.raises(ValueError, match="no pair is left"):
        dataset_of(tmp_path, rows[1:3], drop_invalid_pairs=True)


def test_tokenizer_without_eos(tmp_path: Path) -> None:
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        PreferenceDataset(str(tmp_path / "x.jsonl"), endless, PreferenceDataConfig())
