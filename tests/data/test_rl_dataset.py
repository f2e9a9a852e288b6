"""RLHFDataset: rows to messages and ids, the length filter, and a clear error for every kind of bad row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from lockstep.config.data import CustomClassConfig, DataConfig
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.data.rl_dataset import RLHFDataset, collate_fn
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def make_row(content: str = "1+1=", **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 40},
    }
    return {name: value for name, value in (row | changes).items() if value is not ...}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompt_ids(content: str) -> list[int]:
    text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_row_to_messages_ids_and_objects(tmp_path: Path, name: str) -> None:
    rows = [make_row(), make_row("2+2=", extra_info={"split": "train", "index": 0, "answers": ["4", "four"]})]
    dataset = RLHFDataset(write(tmp_path / name, rows), TOKENIZER, DataConfig())
    assert len(dataset) == 2
    sample = dataset[1]
    assert sample["raw_prompt"] == [{"role": "user", "content": "2+2="}]
    assert sample["raw_prompt_ids"] == prompt_ids("2+2=")
    assert sample["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert sample["data_source"] == "openai/gsm8k" and sample["ability"] == "math"
    assert sample["index"] == 0 and dataset[0]["index"] == 40
    assert type(sample["extra_info"]["answers"]) is list
    assert sample["tools_kwargs"] == {} and sample["interaction_kwargs"] == {}
    assert "prompt" not in sample


def test_json_list_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([make_row("a", extra_info=...)]))
    lines = write(tmp_path / "lines.jsonl", [make_row("b", extra_info=...), make_row("c", extra_info=...)])
    dataset = RLHFDataset([str(tmp_path / "list.json"), lines], TOKENIZER, DataConfig())
    assert [dataset[i]["raw_prompt"][0]["content"] for i in range(3)] == ["a", "b", "c"]
    assert [dataset[i]["index"] for i in range(3)] == [0, 1, 2]  # no extra_info.index: the position
    assert dataset[0]["extra_info"] == {}


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [make_row(str(i)) for i in range(5)])
    dataset = RLHFDataset([file, file], TOKENIZER, DataConfig(), max_samples=7)
    assert [dataset[i]["raw_prompt"][0]["content"] for i in range(len(dataset))] == [*"01234", *"01"]


def test_nulls_added_by_parquet_are_dropped(tmp_path: Path) -> None:
    rows = [
        make_row(
            prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "ann"}],
            extra_info={"tools_kwargs": {"search": {"k": 1}}, "interaction_kwargs": {"name": "judge"}},
        ),
        make_row(extra_info={"tools_kwargs": {"calc": {"k": 2}}}),
    ]
    dataset = RLHFDataset(write(tmp_path / "a.parquet", rows), TOKENIZER, DataConfig())
    assert dataset[0]["raw_prompt"][0] == {"role": "system", "content": "s"}
    assert dataset[0]["tools_kwargs"] == {"search": {"k": 1}}
    assert dataset[1]["tools_kwargs"] == {"calc": {"k": 2}}
    assert dataset[1]["interaction_kwargs"] == {}


def test_prompts_are_rendered_with_the_tools_of_their_rows(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | length if tools else 'no' }} tools, {{ messages[0]['content'] }}"
    rows = [make_row("a", agent_name="tool_agent"), make_row("b")]
    dataset = RLHFDataset(write(tmp_path / "rows.jsonl", rows), tokenizer, DataConfig(max_prompt_length=11))
    assert tokenizer.decode(dataset[0]["raw_prompt_ids"]) == "no tools, a"
    dataset.use_tools(lambda row: [{"type": "function"}] * 2 if row.get("agent_name") else None)
    assert [tokenizer.decode(dataset[i]["raw_prompt_ids"]) for i in (0, 1)] == ["2 tools, a", "no tools, b"]


def test_max_samples_is_a_seeded_draw_when_rows_are_shuffled(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [make_row(str(i)) for i in range(9)])

    def drawn(**changes: Any) -> list[str]:
        dataset = RLHFDataset(file, TOKENIZER, DataConfig(**changes), max_samples=4)
        return [dataset[i]["raw_prompt"][0]["content"] for i in range(len(dataset))]

    expected = np.random.default_rng(7).choice(9, size=4, replace=False)
    assert drawn(shuffle=True, seed=7) == [str(i) for i in expected] == drawn(shuffle=True, seed=7)
    assert drawn(shuffle=False, seed=7) == drawn(shuffle=True, seed=None) == [*"0123"]
    assert len(RLHFDataset(file, TOKENIZER, DataConfig(seed=7), max_samples=20)) == 9


def test_mapping_as_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "a.jsonl", [make_row("x"), make_row("x" * 99)])
    short = OmegaConf.create({"max_prompt_length": 40, "cache_dir": "/tmp/x"})
    assert len(RLHFDataset(file, TOKENIZER, short)) == 1
    assert "DataConfig ignores these settings: cache_dir" in caplog.text
    tokens = len(prompt_ids("x" * 99))
    with pytest.raises(
        ValueError, match=rf"row 1: the prompt has {tokens} tokens, more than data\.max_prompt_length=40"
    ):
        RLHFDataset(file, TOKENIZER, {"max_prompt_length": 40, "filter_overlong_prompts": False})
    cut = {"max_prompt_length": 40, "filter_overlong_prompts": False, "truncation": "left"}
    assert len(RLHFDataset(file, TOKENIZER, cut)[1]["raw_prompt_ids"]) == 40
    with pytest.raises(ValueError, match="truncation"):
        RLHFDataset(file, TOKENIZER, {"truncation": "top"})


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_long_prompts_are_truncated_as_configured(tmp_path: Path, truncation: Any) -> None:
    file = write(tmp_path / "a.jsonl", [make_row("0123456789" * 3)])
    sample = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=21, truncation=truncation))[0]
    whole = prompt_ids("0123456789" * 3)
    expected = {"left": whole[-21:], "right": whole[:21], "middle": whole[:10] + whole[-11:]}
    assert sample["raw_prompt_ids"] == expected[truncation]


def test_filter_drops_long_prompts_and_keeps_positions(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [make_row(c, extra_info=...) for c in ("x", "x" * 99, "yy")])
    config = DataConfig(max_prompt_length=len(prompt_ids("yy")), filter_overlong_prompts=True)
    dataset = RLHFDataset(file, TOKENIZER, config)
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 2]


def test_measured_prompts_are_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = RLHFDataset(write(tmp_path / "a.jsonl", [make_row("x"), make_row("yy")]), TOKENIZER, DataConfig())
    monkeypatch.delattr(RLHFDataset, "_encode")
    assert [dataset[i]["raw_prompt_ids"] for i in range(2)] == [prompt_ids("x"), prompt_ids("yy")]


def test_chat_template_kwargs_reach_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}T{% endif %}"
    config = DataConfig(apply_chat_template_kwargs={"enable_thinking": True})
    sample = RLHFDataset(write(tmp_path / "a.jsonl", [make_row("q")]), tokenizer, config)[0]
    assert tokenizer.decode(sample["raw_prompt_ids"]) == "qT"


def test_collate_keeps_lists_of_equal_length_as_objects() -> None:
    samples = [
        {"ids": [1, 2], "value": torch.tensor([1.0]), "name": "a", "index": 3},
        {"ids": [3, 4], "value": torch.tensor([2.0]), "name": "b", "index": 4, "late": "x"},
    ]
    batch = collate_fn(samples)
    assert isinstance(batch["value"], torch.Tensor) and batch["value"].tolist() == [[1.0], [2.0]]
    for name in ("ids", "name", "index", "late"):
        assert isinstance(batch[name], np.ndarray) and batch[name].dtype == object and batch[name].shape == (2,)
    assert batch["ids"].tolist() == [[1, 2], [3, 4]] and type(batch["ids"][0]) is list
    assert batch["late"].tolist() == [None, "x"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ...}, r"a\.jsonl, row 1 has no 'prompt'; set data\.prompt_key .*columns: data_source, ability"),
        ({"reward_model": "rule"}, r"row 1: 'reward_model' must be an object with `style` and `ground_truth`"),
        ({"reward_model": {"style": "rule"}}, r"row 1: 'reward_model' has style 'rule' but no 'ground_truth'"),
        (
            {"reward_model": {"style": "rule", "ground_truth": 72}},
            r"row 1: reward_model\.ground_truth is 72 \(number\), but '2' \(text\) in .*row 0.* 'openai/gsm8k'; write them",
        ),
        ({"prompt": 11}, r"row 1: 'prompt' must be text or a list of messages .*it is of type int; data\.prompt_key"),
        ({"prompt": []}, "it is empty"),
        ({"prompt": ["hello"]}, "message 0 is of type str"),
        ({"prompt": [{"content": "hello"}]}, "message 0 has no role"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content of message 0 is of type list"),
        ({"images": ["a.png"]}, r"row 1 has 'images', but the model reads no images"),
        ({"videos": ["a.mp4"]}, r"row 1 has 'videos': only text is supported"),
    ],
)
def test_bad_rows_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "a.jsonl", [make_row(images=[]), make_row(**changes)])
    with pytest.raises(ValueError, match=message):
        RLHFDataset(file, TOKENIZER, DataConfig())


def test_ground_truths_of_several_types_for_several_scorers(tmp_path: Path) -> None:
    truths = [("a", "72"), ("b", 72), ("b", 7.5), ("c", {"target": ["x"]}), ("c", ["x"]), ("d", None)]
    rows = [
        make_row(
            data_source=source, reward_model={"style": "model" if truth is None else "rule", "ground_truth": truth}
        )
        for source, truth in truths
    ]
    dataset = RLHFDataset(write(tmp_path / "a.jsonl", rows), TOKENIZER, DataConfig())
    assert [dataset[i]["reward_model"]["ground_truth"] for i in range(6)] == [truth for _, truth in truths]


def test_bad_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text(json.dumps(make_row()) + "\n{\n")
    (tmp_path / "broken.parquet").write_text("not parquet")
    (tmp_path / "list.jsonl").write_text("3\n")
    for file, message in {
        "absent.parquet": r"data\.train_files=.*absent\.parquet: no such file or folder; give",
        "empty.jsonl": r"empty\.jsonl has no rows",
        "broken.jsonl": r"broken\.jsonl, line 2 is not JSON",
        "broken.parquet": r"broken\.parquet is not a readable parquet file",
        "list.jsonl": r"entry 1: a row must be a JSON object, not int",
    }.items():
        with pytest.raises(ValueError, match=message):
            RLHFDataset(str(tmp_path / file), TOKENIZER, DataConfig())
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"is not a \.parquet, \.jsonl or \.json file"):
        RLHFDataset(str(tmp_path / "rows.csv"), TOKENIZER, DataConfig())
    with pytest.raises(ValueError, match=r"set data\.train_files"):
        RLHFDataset([], TOKENIZER, DataConfig())


def test_overlong_prompt_is_rejected_at_the_start(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [make_row("x"), make_row("x" * 50), make_row("x" * 60)])
    tokens = len(prompt_ids("x" * 50))
    with pytest.raises(ValueError, match=rf"row 1: the prompt has {tokens} tokens.*=40 \(2 of 3.*data\.truncation"):
        RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=40))
    with pytest.raises(ValueError, match=r"every prompt is longer than data\.max_prompt_length=3"):
        RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=3, filter_overlong_prompts=True))


def test_chat_template_errors(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [make_row()])
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"set actor_rollout_ref\.model\.custom_chat_template"):
        RLHFDataset(file, bare, DataConfig())
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"a\.jsonl, row 0: the chat template rejects .*roles must alternate"):
        RLHFDataset(file, strict, DataConfig())


def test_custom_class(tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "from lockstep.data.rl_dataset import RLHFDataset\n"
        "class Upper(RLHFDataset):\n"
        "    def __getitem__(self, item):\n"
        "        return super().__getitem__(item) | {'ability': 'MATH', 'key': self.config.get('prompt_key')}\n"
        "def function(): pass\n"
    )
    file = write(tmp_path / "a.jsonl", [make_row()])

    def create(name: str | None, path: Path = module) -> Any:
        return create_rl_dataset(file, TOKENIZER, DataConfig(custom_cls=CustomClassConfig(str(path), name)))

    assert create("Upper")[0]["ability"] == "MATH" and create("Upper")[0]["key"] == "prompt"
    assert type(create_rl_dataset(file, TOKENIZER, DataConfig())) is RLHFDataset
    with pytest.raises(ValueError, match=r"data\.custom_cls\.path=.*name=function: must be a subclass"):
        create("function")
    with pytest.raises(ValueError, match=r"data\.custom_cls\.path=.*no attribute 'Uper'.*Did you mean 'Upper'"):
        create("Uper")
    (tmp_path / "broken.py").write_text("class Upper(:")
    with pytest.raises(ValueError, match=r"data\.custom_cls\.path=.*broken\.py, line 1: SyntaxError"):
        create("Upper", tmp_path / "broken.py")
    with pytest.raises(ValueError, match=r"names no attribute; write it as .*:name"):
        create(None)
    with pytest.raises(ValueError, match=r"data\.custom_cls\.path=.*no file"):
        create("Upper", tmp_path / "absent.py")
