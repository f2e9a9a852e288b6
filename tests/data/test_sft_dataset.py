"""SFT rows: the loss covers exactly the assistant's tokens, whatever the template does."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.data import SFTDataConfig
from lockstep.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+1"},
    {"role": "assistant", "content": "3"},
]
# Renders reasoning only in the last turn, puts tool results into one user turn, and shows tools and thinking.
THINKING_TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t['name'] }}{% endfor %}]{% endif %}"
    "{% if enable_thinking is defined %}({{ enable_thinking }}){% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('/')[-1] }}{% endif %};"
    "{% elif m['role'] == 'tool' %}{% if messages[loop.index0 - 1]['role'] != 'tool' %}T:{% endif %}{{ m['content'] }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %};{% endif %}"
    "{% else %}U:{{ m['content'] }};{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset_of(
    folder: Path, row: dict[str, Any], config: Any = None, tokenizer: Any = TOKENIZER
) -> MultiTurnSFTDataset:
    config = SFTDataConfig(pad_mode="no_padding") if config is None else config
    return MultiTurnSFTDataset(write(folder / "rows.jsonl", [row]), tokenizer, config)


def marked(sample: dict[str, Any], tokenizer: Any = TOKENIZER) -> str:
    """The text with the loss tokens in braces."""
    text, inside = "", False
    for token, counts in zip(sample["input_ids"].tolist(), sample["loss_mask"].tolist()):
        text += ("{" if counts and not inside else "}" if inside and not counts else "") + tokenizer.decode([token])
        inside = bool(counts)
    return text + ("}" if inside else "")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_loss_covers_every_assistant_turn(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, [{"messages": TALK}, {"messages": TALK[1:3]}])
    dataset = MultiTurnSFTDataset(file, TOKENIZER, SFTDataConfig(pad_mode="no_padding"))
    assert len(dataset) == 2
    assert marked(dataset[0]) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n{2<|im_end|>\n}"
        "<|im_start|>user\n+1<|im_end|>\n<|im_start|>assistant\n{3<|im_end|>\n}"
    )
    whole = TOKENIZER.apply_chat_template(TALK, tokenize=False)
    assert dataset[0]["input_ids"].tolist() == TOKENIZER(whole)["input_ids"]
    assert dataset[0]["position_ids"].tolist() == list(range(len(dataset[0]["input_ids"])))
    assert set(dataset[0]) == {"input_ids", "position_ids", "loss_mask"}


def test_padding_is_on_the_right_and_masked(tmp_path: Path) -> None:
    sample = dataset_of(tmp_path, {"messages": TALK}, SFTDataConfig(max_length=200))[0]
    length = int(sample["attention_mask"].sum())
    assert all(value.shape == (200,) for value in sample.values())
    assert sample["input_ids"][length:].eq(TOKENIZER.pad_token_id).all()
    assert not sample["position_ids"][length:].any() and not sample["loss_mask"][length:].any()
    assert sample["attention_mask"][:length].all()


def test_truncated_sequences_keep_their_positions(tmp_path: Path) -> None:
    whole = dataset_of(tmp_path, {"messages": TALK})[0]
    kept = {"left": slice(-20, None), "right": slice(None, 20)}
    for truncation, part in kept.items():
        config = {"max_length": 20, "truncation": truncation}
        sample = dataset_of(tmp_path, {"messages": TALK}, config)[0]
        for name in ("input_ids", "position_ids", "loss_mask"):
            assert sample[name].tolist() == whole[name][part].tolist()


def thinking_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


def test_tools_thinking_and_tool_results_reach_the_template(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer()
    messages = [
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "x"},
    ]
    row = {"messages": messages, "tools": json.dumps([{"name": "f"}]), "enable_thinking": False}
    assert marked(dataset_of(tmp_path, row, tokenizer=tokenizer)[0], tokenizer) == "[f](False)U:q;T:ab;A:{x;}"
    row = {"messages": messages, "tools": [{"name": "f", "description": None}]}
    assert marked(dataset_of(tmp_path, row, tokenizer=tokenizer)[0], tokenizer) == "[f]U:q;T:ab;A:{x;}"


def test_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer()
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "why/x"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "how/y"},
    ]
    with pytest.raises(ValueError, match=r"row 0: .*differently if more messages follow.*data\.ignore_input_ids_mis"):
        dataset_of(tmp_path, {"messages": talk}, tokenizer=tokenizer)
    config = SFTDataConfig(pad_mode="no_padding", ignore_input_ids_mismatch=True)
    sample = dataset_of(tmp_path, {"messages": talk}, config, tokenizer)[0]
    assert marked(sample, tokenizer) == "U:q;A:{why/x;}U:r;A:{how/y;}"


def test_default_system_message_appears_once(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] != 'system' %}S;{% endif %}" + THINKING_TEMPLATE
    talk = [{"role": role, "content": f"{i}/{i}"} for i, role in enumerate(["user", "assistant"] * 2)]
    config = SFTDataConfig(pad_mode="no_padding", ignore_input_ids_mismatch=True)
    assert marked(dataset_of(tmp_path, {"messages": talk}, config, tokenizer)[0], tokenizer) == (
        "S;U:0/0;A:{1/1;}U:2/2;A:{3/3;}"
    )


def test_pairs(tmp_path: Path) -> None:
    rows = [{"extra": {"question": "1+1", "answer": "2"}}]
    config = {
        "prompt_key": "extra",
        "prompt_dict_keys": ["question"],
        "response_key": "extra",
        "response_dict_keys": ["answer"],
        "pad_mode": "no_padding",
    }
    dataset = SFTDataset(write(tmp_path / "rows.parquet", rows), TOKENIZER, config)
    assert marked(dataset[0]) == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n{2<|im_end|>}"
    flat = SFTDataset(write(tmp_path / "flat.jsonl", [{"prompt": "a", "response": "b"}]), TOKENIZER, SFTDataConfig())
    assert int(flat[0]["loss_mask"].sum()) == 2
    with pytest.raises(ValueError, match=r"row 0 has no 'extra\.reply'; set data\.response_key .*columns: extra"):
        SFTDataset(str(tmp_path / "rows.parquet"), TOKENIZER, config | {"response_dict_keys": ["reply"]})
    with pytest.raises(ValueError, match=r"'extra' must be text, not dict; set data\.prompt_dict_keys"):
        SFTDataset(str(tmp_path / "rows.parquet"), TOKENIZER, config | {"prompt_dict_keys": None})


@pytest.mark.parametrize(("path", "text"), [(["content"], None), (["0", "content"], "a"), (["1", "content"], "b")])
def test_pairs_in_lists(tmp_path: Path, path: list[str], text: str | None) -> None:
    one, two = ([{"role": "user", "content": content} for content in contents] for contents in ("a", "ab"))
    config = {"prompt_dict_keys": path, "pad_mode": "no_padding"}
    rows = write(tmp_path / "rows.parquet", [{"prompt": two, "response": "r"}])
    if text is None:  # which of the two?
        with pytest.raises(ValueError, match=r"row 0 has no 'prompt\.content'; set data\.prompt_key"):
            SFTDataset(rows, TOKENIZER, config)
        rows, text = write(tmp_path / "one.parquet", [{"prompt": one, "response": "r"}]), "a"
    assert marked(SFTDataset(rows, TOKENIZER, config)[0]).startswith(f"<|im_start|>user\n{text}<|im_end|>")


def test_multiturn_settings_are_used(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, {"talk": TALK}, {"multiturn": {"enable": True, "messages_key": "talk"}})
    assert dataset.config.messages_key == "talk" and len(dataset) == 1


def test_seeded_draw_of_some_rows(tmp_path: Path) -> None:
    rows = [{"messages": [*TALK[:2], {"role": "assistant", "content": str(i)}]} for i in range(9)]
    file = write(tmp_path / "rows.jsonl", rows)
    config = SFTDataConfig(shuffle=True, seed=4)
    drawn = [row.number for row in MultiTurnSFTDataset(file, TOKENIZER, config, max_samples=4).rows]
    again = [row.number for row in MultiTurnSFTDataset(file, TOKENIZER, config, max_samples=4).rows]
    assert drawn == again != [0, 1, 2, 3] and len(set(drawn)) == 4
    first = MultiTurnSFTDataset(file, TOKENIZER, SFTDataConfig(shuffle=True), max_samples=4)
    assert [row.number for row in first.rows] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"talk": TALK}, r"rows\.jsonl, row 0 has no 'messages'; set data\.messages_key .*columns: talk"),
        ({"messages": "hello"}, r"row 0: 'messages' must be a list of messages"),
        ({"messages": TALK[:2]}, r"row 0: 'messages' has no assistant message"),
    ],
)
def test_bad_rows_are_rejected(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset_of(tmp_path, row)


def test_bad_lengths_and_tokenizers_are_rejected(tmp_path: Path) -> None:
    row = {"messages": TALK}
    with pytest.raises(
        ValueError, match=r"row 0: the sequence has \d+ tokens, but at most 20 are allowed by data\.max_len"
    ):
        dataset_of(tmp_path, row, SFTDataConfig(max_length=20))
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        dataset_of(tmp_path, row, tokenizer=bare)
    unpadded = tiny_tokenizer()
    unpadded.pad_token = None
    with pytest.raises(ValueError, match=r"data\.pad_mode=right, but the tokenizer has no pad token"):
        dataset_of(tmp_path, row, SFTDataConfig(), unpadded)
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"row 0: the chat template rejects these messages \(no system role\)"):
        dataset_of(tmp_path, row, tokenizer=strict)
    with pytest.raises(ValueError, match="pad_mode"):
        dataset_of(tmp_path, row, {"pad_mode": "middle"})
