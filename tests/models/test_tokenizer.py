"""Tokenizers have a pad token, and come from wherever a model may be."""

import json
import logging
from pathlib import Path

import pytest

from lockstep.models.tokenizer import eos_token_ids, hf_tokenizer
from tests.hub import use_hub, write_cache
from tests.tiny import tiny_tokenizer


def save_without_pad(folder: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return folder


def test_folder_round_trip(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = hf_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer("2+2")["input_ids"]) == "2+2"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_missing_pad_becomes_eos_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tokenizer = hf_tokenizer(save_without_pad(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert "no pad token" in caplog.text


def test_custom_chat_template(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = hf_tokenizer(tmp_path, custom_chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "files")
    write_cache(tmp_path / "cache", "Qwen/Qwen2-0.5B", tmp_path / "files")
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    assert hf_tokenizer("Qwen/Qwen2-0.5B").pad_token == "<|endoftext|>"
    with pytest.raises(
        ValueError, match=r"^data\.tokenizer=Qwen/other: no such folder, .*run `hf download Qwen/other`"
    ):
        hf_tokenizer("Qwen/other", key="data.tokenizer")
    with pytest.raises(ValueError, match=r"^actor_rollout_ref\.model\.path=: no such folder"):
        hf_tokenizer("")


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer \(looked for tokenizer\.json.*tokenizer_path"):
        hf_tokenizer(tmp_path)


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert eos_token_ids(tokenizer, tmp_path) == [2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert eos_token_ids(tokenizer, tmp_path) == [0, 2, 7]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(tokenizer, tmp_path) == [0, 2]


def test_no_eos_at_all_is_an_error(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="add `eos_token_id` to generation_config"):
        eos_token_ids(tokenizer, tmp_path)
