"""The console tracker on a terminal and in a pipe."""

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.observability.console import ConsoleTracker, LogHandler
from lockstep.observability.step_line import format_number, format_seconds, one_line, sparkline, step_parts
from lockstep.observability.step_times import StepTimes
from lockstep.observability.tracker import RunInfo
from lockstep.utils.progress import count, phase

STEP = {
    "critic/score/mean": 0.41,
    "critic/rewards/mean": 0.39,
    "response_length/mean": 345.6,
    "actor/pg_loss": -0.0123,
    "actor/ppo_kl": 0.002,
    "actor/entropy": 1.2345,
    "actor/grad_norm": float("nan"),
    "critic/vf_loss": 0.5,
    "perf/throughput": 12345.6,
    "timing_s/step": 1.3,
    "timing_s/gen": 0.9,
}
STEP_TEXT = (
    "reward 0.41 | length 346 | loss -0.0123 | ppo kl 0.002 | entropy 1.23 | grad nan | value loss 0.5 "
    "| 12,346 tok/s | 1.3 s"
)


def tracker_into(
    stream: Any, total_steps: int | None = None, start_step: int | None = None, terminal: bool = False
) -> ConsoleTracker:
    console = Console(file=stream, force_terminal=terminal, width=60, legacy_windows=False, _environ={"TERM": "xterm"})
    return ConsoleTracker(RunInfo("p", "e", Path("."), total_steps=total_steps, start_step=start_step), console)


def test_pipe_gets_one_plain_line_per_step() -> None:
    stream = io.StringIO()
    tracker = tracker_into(stream, total_steps=12)
    tracker.log(STEP, step=11)
    tracker.log(STEP | {"timing_s/step": 1.4}, step=12)
    tracker.finish()
    first, second = stream.getvalue().splitlines()
    assert first == f"step 11/12 | {STEP_TEXT} | 1 s left"
    assert second == f"step 12/12 | {STEP_TEXT.replace('1.3 s', '1.4 s')}"


def test_validation_has_its_own_line() -> None:
    stream = io.StringIO()
    tracker = tracker_into(stream)
    validation = {"val-core/openai/gsm8k/acc/mean@8": 0.5, "val-aux/openai/gsm8k/reward/std@8": 0.1}
    tracker.log(validation, step=0)
    tracker.log({"critic/score/mean": 0.1, **validation}, step=1)
    tracker.log({"val/loss": 2.5}, step=2)
    tracker.log({"val-aux/x": 2.5}, step=3)
    assert stream.getvalue().splitlines() == [
        "validation at step 0 | openai/gsm8k/acc/mean@8 0.5",
        "step 1 | reward 0.1",
        "validation at step 1 | openai/gsm8k/acc/mean@8 0.5",
        "validation at step 2 | loss 2.5",
    ]


def test_first_few_unknown_metrics_are_shown() -> None:
    assert step_parts({f"my/{i}": i for i in range(9)} | {"text": "no"}) == [f"my/{i} {i}" for i in range(6)]
    assert step_parts({"train/loss": 1.5, "other": 2}) == ["loss 1.5"]


def test_model_output_is_sanitised_for_the_terminal() -> None:
    for terminal in (False, True):
        stream = io.StringIO()
        tracker = tracker_into(stream, terminal=terminal)
        tracker.log_table(
            "val/generations", ["input", "output"], [["[bold]q[/nope]", "a\n\x1b]0;title\x07b"]] * 9, step=4
        )
        tracker.finish()
        text = stream.getvalue()
        assert "\x1b]0" not in text and "\x07" not in text
        assert (
            "[bold]q[/nope]" in text
            and "val/generations at step 4, 9 rows" in text
            and text.count("[bold]q[/nope]") == 9
        )
        assert ("\x1b" in text) == terminal


def test_data_source_names_are_sanitised_for_the_terminal() -> None:
    stream = io.StringIO()
    tracker_into(stream).log({"val-core/a\rb\x07c/acc/mean@1": 1.0}, step=1)
    assert stream.getvalue() == "validation at step 1 | a\ufffdb\ufffdc/acc/mean@1 1\n"


def test_unencodable_characters_do_not_stop_the_run() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    tracker_into(stream).log({"val-core/数学/acc/mean@1": 1.0}, step=1)
    stream.flush()
    assert raw.getvalue() == b"validation at step 1 | ??/acc/mean@1 1\n"


def test_terminal_gets_the_lines_and_a_live_display() -> None:
    stream = io.StringIO()
    tracker = tracker_into(stream, total_steps=100, start_step=10, terminal=True)
    assert "10/100" in stream.getvalue() and "preparing the first step" in stream.getvalue()
    for step in (11, 12):
        tracker.log(STEP | {"critic/score/mean": step / 100, "val-core/gsm8k/acc/mean@1": 0.25}, step=step)
    tracker.finish()
    tracker.finish()
    output = stream.getvalue()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in output.replace("\r", "\n").splitlines()]
    assert sum(line.startswith("step 11/100 | reward 0.11") for line in lines) == 1
    assert sum(line.startswith("step 12/100 | reward 0.12") for line in lines) == 1
    assert lines.count("validation at step 12/100 | gsm8k/acc/mean@1 0.25") == 1
    last_display = [line for line in lines if line][-3:]
    assert re.fullmatch(r"training .* 12/100 0:00:\d\d .* left", last_display[0])
    assert last_display[1].startswith("reward 0.12 ▁█ | length 346") and last_display[1].endswith("…")
    assert last_display[2] == "validation at step 12 | gsm8k/acc/mean@1 0.25"
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is restored


def test_time_left_averages_the_time_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0, 116.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    step_times = StepTimes()
    assert step_times.seconds_left({"timing_s/step": 2.0}, 1, 10) == pytest.approx(9 * 2.0)
    assert step_times.seconds_left({}, 2, 10) == pytest.approx(8 * (2.0 + 4.0) / 2)
    assert step_times.seconds_left({}, 4, 10) == pytest.approx(6 * (2.0 + 4.0 + 6.0) / 3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (0.41, "0.41"), (0.123456, "0.123"), (345.6, "346"), (999.7, "1,000"), (12345.6, "12,346"),
        (2.13e-5, "2.1e-05"), (-3e9, "-3.0e+09"), (float("inf"), "inf"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


def test_format_seconds_and_text() -> None:
    assert [format_seconds(s) for s in (4.4, 185, 7800, 273600)] == ["4 s", "3 min 05 s", "2 h 10 min", "3 d 4 h"]
    assert one_line("a\n\tb" + "c" * 10, 6) == "a bcc…"
    assert sparkline([0.0, 0.5, 1.0, float("nan")]) == "▁▅█" and sparkline([2.0]) == "▁" and sparkline([]) == ""


def test_the_live_display_shows_the_phase() -> None:
    stream = io.StringIO()
    tracker = tracker_into(stream, total_steps=100, terminal=True)
    with phase("generate"):
        count(312, 1024, "sequences")
        tracker.log(STEP, step=1)
    tracker.finish()
    assert "generate 312/1024 sequences, 0 s" in stream.getvalue()
    assert stream.getvalue().rsplit("training", 1)[1].count("generate") == 0


def test_log_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, log = LogHandler(), logging.getLogger("test_log_lines")
    log.addHandler(handler)
    try:
        for text in ("first", "second"):
            monkeypatch.setattr("sys.stderr", io.StringIO())
            log.warning(text)
            assert sys.stderr.getvalue() == f"{text}\n"
    finally:
        log.removeHandler(handler)
