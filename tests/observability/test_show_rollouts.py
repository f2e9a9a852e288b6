"""`lockstep rollouts`: finding the dumps of a run, and how groups are shown."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import cli


def row(uid: str, score: float, length: int, output: str = "so 4", **more: Any) -> dict[str, Any]:
    details = {"uid": uid, "index": 7, "length": length, "advantage": score - 0.5, "finish_reason": "stop"}
    return {"input": f"question {uid}", "output": output, "gts": "4", "score": score, "step": 3, **details, **more}


ROWS = [row("a", 0.0, 5), row("a", 1.0, 9, finish_reason="length"), row("b", 0.5, 2), row("b", 0.5, 3, pred="x\ny")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with dumps of steps 1 and 3, started in `tmp_path` with relative folders."""
    folder = tmp_path / "checkpoints/run"
    folder.mkdir(parents=True)
    trainer = {"default_local_dir": "checkpoints/run", "rollout_data_dir": "dumps", "validation_data_dir": None}
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    (tmp_path / "dumps").mkdir()
    for step in (1, 3):
        (tmp_path / f"dumps/{step}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ROWS))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["rollouts", *arguments]) == 0
    return capsys.readouterr().out


def test_groups_with_their_responses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, str(run), "--step", "3").splitlines()
    assert lines[0].startswith(
        "step 3: 2 prompts, 4 responses, score 0.5 (0 to 1), 1 groups with equal scores, 1 responses cut at the maximum "
        "length | "
    )
    assert "group 1 of 2 | row 7 of the data | score 0.5" in lines and "  question a" in lines
    assert "  [2] score 1 | advantage +0.5 | 9 tokens | cut at the maximum length" in lines
    assert "  [2] score 0.5 | advantage +0 | 3 tokens | stopped | pred x y" in lines


def test_images_of_the_prompt_are_named_once_per_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a", 1.0, 3, images=["images/1.png", "images/2.png"])] * 2
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    lines = shown(capsys, str(tmp_path)).splitlines()
    assert [line for line in lines if "image:" in line] == [f"  image: {tmp_path}/images/{n}.png" for n in (1, 2)]


def test_the_data_source_is_told_once_per_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a", 1.0, 3, data_source="openai/gsm8k")] * 2
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    text = shown(capsys, str(tmp_path))
    assert "group 1 of 1 | row 7 of the data | openai/gsm8k | score 1" in text and text.count("gsm8k") == 1


def test_sorting_and_choosing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(run), "--group", "1", "--sort", "reward")
    assert text.index("score 1 |") < text.index("score 0 |") and "question b" not in text
    assert "question b" in shown(capsys, str(run), "--group", "b")
    by_length = shown(capsys, str(run), "--sort", "length", "--reverse")
    assert by_length.index("question b") < by_length.index("question a")
    assert "1 of 2 groups; --show 0" in shown(capsys, str(run), "--show", "1")


def test_long_texts_are_cut_in_the_middle_and_escapes_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "9.jsonl"
    dump.write_text(json.dumps(row("a", 1.0, 5, output="\x1b[2J\u2028" + "y" * 1000 + "END")) + "\n")
    text = shown(capsys, str(dump))
    assert "\x1b" not in text and "characters ...]" in text and "END" in text and len(text) < 1500
    assert "y" * 1000 in shown(capsys, str(dump), "--group", "1")


def test_dumps_without_the_newer_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = [{"input": "q", "output": "a", "gts": None, "score": None, "step": 1, "non_finite": {"score": "nan"}}] * 2
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in old))
    assert "1 prompts, 2 responses, score nan" in shown(capsys, str(tmp_path), "--sort", "reward")


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    for name, text in (("moved", (run / "config.yaml").read_text().replace("dumps", "gone")), ("odd", "[1]\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "validated").mkdir()
    validated = {"default_local_dir": "validated", "validation_data_dir": str(tmp_path / "dumps")}
    (tmp_path / "validated" / "config.yaml").write_text(yaml.safe_dump({"trainer": validated}))
    for arguments, message in (
        (
            [str(tmp_path / "validated")],
            "has no dumps of training; --validation shows its validations; set trainer.roll",
        ),
        ([str(run), "--validation"], "set trainer.validation_data_dir=FOLDER"),
        ([str(run), "--step", "2"], "has no such step; it has 2, from 1 to 3"),
        ([str(run), "--group", "9"], "the step has groups 1 to 2"),
        ([str(tmp_path / "bad.jsonl")], "line 1: not a row of a dump"),
        ([str(tmp_path / "moved")], "trainer.rollout_data_dir=gone, which does not exist here"),
        ([str(tmp_path / "odd")], "config.yaml is not the config of a run"),
        ([str(tmp_path / "nowhere")], "neither a run's folder"),
    ):
        assert cli.main(["rollouts", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err


def test_each_step_is_found_in_the_folder_of_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run wrote no dumps at first, then to `a`, and was resumed with `b`, named by an environment variable."""
    monkeypatch.setenv("DUMPS", str(tmp_path))
    run = tmp_path / "run"
    (run / "configs").mkdir(parents=True)
    starts = {"001_step_0": None, "002_step_1": f"{tmp_path}/a", "003_step_3": "${oc.env:DUMPS}/b"}
    for name, folder in starts.items():
        text = yaml.safe_dump({"trainer": {"default_local_dir": str(run), "rollout_data_dir": folder}})
        (run / "configs" / f"{name}.yaml").write_text(text)
        (run / "config.yaml").write_text(text)
    for folder, steps in (("a", (2, 3, 4)), ("b", (4, 5))):
        (tmp_path / folder).mkdir()
        for step in steps:
            rows = [row("x", 1.0, 3, output=f"{folder}{step}")]
            (tmp_path / folder / f"{step}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    for step, output in ((2, "a2"), (3, "a3"), (4, "b4"), (5, "b5")):
        assert f"      {output}\n" in shown(capsys, str(run), "--step", str(step))
    assert "b5" in shown(capsys, str(run))
    monkeypatch.delenv("DUMPS")
    assert "a4" in shown(capsys, str(run)), "the last one that can be found"


CONVERSATION: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "I compute.\x1b[2J",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
        ],
    },
    {"role": "tool", "name": "calculator", "tool_call_id": "1", "content": "42"},
    {"role": "assistant", "content": "The answer\nis 42"},
]


def test_conversations_have_roles_calls_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"num_turns": 4, "tool_call_counts": 1, "tool_error_counts": 0, "trajectory_breaks": 0}
    rows = [
        row("a", 1.0, 9, output="raw tokens", messages=CONVERSATION, acc=0.33333334, **counts),
        row("a", 0.0, 2, output="just text", messages=CONVERSATION[2:], acc=0.0, **counts | {"tool_call_counts": 0}),
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    text = shown(capsys, str(tmp_path))
    assert "stopped | acc 0.333 | num_turns 4 | tool_call_counts 1\n" in text
    assert "stopped | acc 0 | num_turns 4 | tool_call_counts 0\n      just text" in text
    assert text[text.index("      [assistant]") : text.index("  [2]")].splitlines() == [
        "      [assistant]",
        "        I compute.\ufffd[2J",
        '        -> calculator({"expression": "6*7"})',
        "      [tool calculator]",
        "        42",
        "      [assistant]",
        "        The answer",
        "        is 42",
    ]
    assert "raw tokens" not in text and "error_counts" not in text and "breaks" not in text
