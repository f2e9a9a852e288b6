"""`lockstep plot`: what it reads, which metrics it chooses, and what it draws."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep import cli
from lockstep.observability.chart import ticks
from lockstep.observability.curves import axis_number, moving_mean, read_runs, select_metrics

CORE = "val-core/openai/gsm8k/acc/mean@1"


def write_run(folder: Path, rewards: list[float], first: int = 1, **more: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as file:
        for step, reward in enumerate(rewards, start=first):
            row = {"step": step, "time": 1.0 * step, "critic/score/mean": reward, "timing_s/step": 2.0, **more}
            file.write(json.dumps(row) + "\n")
    return folder


def test_resumed_running_and_non_finite_lines(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.1, 0.2, 0.3])
    write_run(run, [0.25, 0.35], first=2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, CORE: 0.5, "critic/score/mean": None}) + "\n" + '{"step": 4, "critic/sc')
    (loaded,) = read_runs([run])
    assert loaded.points("critic/score/mean") == [(1, 0.1), (2, 0.25), (3, 0.35)]
    assert loaded.points(CORE) == [(3, 0.5)] and "time" not in loaded.metrics
    assert read_runs([run / "metrics.jsonl"]) == [loaded]


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("x/a", "y/a"):
        write_run(tmp_path / name, [0.0])
    assert [run.name for run in read_runs([tmp_path / "x/a", tmp_path / "y/a"])] == ["x/a", "y/a"]


def test_metrics_by_default_by_short_name_and_by_pattern(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", [0.0], **{CORE: 1.0, "timing_s/gen": 1.0, "actor/kl_loss": 0.1})])
    assert select_metrics(runs, []) == ["critic/score/mean", CORE, "actor/kl_loss", "timing_s/step"]
    assert select_metrics(runs, ["time", "timing_s/*"]) == ["timing_s/step", "timing_s/gen"]


def test_moving_mean_and_numbers_of_axes() -> None:
    assert moving_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert ticks([0.05, 0.19]) == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert ticks([1, 6], whole=True) == [1, 2, 3, 4, 5, 6] and ticks([3, 3], whole=True)[0] == 3
    assert ticks([0.0]) == pytest.approx([0.0, 0.2])
    assert axis_number(5.4571, 0.002) == "5.4571" and axis_number(0.5, 1.0) == "0.5"


def test_svg_has_a_curve_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / "<a>", [0.0, 0.5, 1.0])), str(write_run(tmp_path / "b", [1.0, 1.0]))]
    command = ["plot", *runs, "--metric", "reward", "--title", "x & y"]
    assert cli.main([*command, "--out", f"{tmp_path}/out/p.svg"]) == 0
    picture = ElementTree.parse(tmp_path / "out/p.svg").getroot()
    lines = [element for element in picture.iter() if element.tag.endswith("polyline")]
    curves = [line.get("points", "").split() for line in lines if line.get("stroke-width") == "1.6"]
    assert [len(points) for points in curves] == [3, 2]
    heights = [float(point.split(",")[1]) for point in curves[0]]
    assert heights[0] > heights[1] > heights[2] == float(curves[1][0].split(",")[1])  # both end at 1.0
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert {"x & y", "<a>", "b", "critic/score/mean"} <= set(texts)
    assert cli.main([*command, "--out", f"{tmp_path}/p.html"]) == 0
    assert "<svg" in (tmp_path / "p.html").read_text()
    assert cli.main([*command, "--out", f"{tmp_path}/p.png"]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


def test_terminal_draws_every_run_and_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rising = write_run(tmp_path / "rising", [step / 10 for step in range(11)], **{"actor/entropy": 1.0})
    falling = write_run(tmp_path / "falling", [1 - step / 10 for step in range(11)])
    assert cli.main(["plot", str(rising), str(falling), "--metric", "reward", "entropy"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:2] == ["* rising", "+ falling"] and "falling has no actor/entropy" in err
    panel = lines[lines.index("critic/score/mean  last: * 1, + 0") + 1 :]
    top, bottom = panel[0], panel[9]
    assert top.split()[0] == "1" and top.rstrip().endswith("*") and top.split("|")[1][0] == "+"
    assert bottom.split()[0] == "0" and bottom.rstrip().endswith("+") and bottom.split("|")[1][0] == "*"
    assert "\x1b" not in out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "runs/a", [0.5]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").write_text("")
    for arguments, message in (
        ([run, "--metric", "scor"], "did you mean critic/score/mean?"),
        ([run, "--metric", "zzz"], "short names are reward,"),
        ([str(tmp_path / "nothing")], "RUN is a run's folder or its metrics.jsonl"),
        ([str(tmp_path / "runs")], f"runs in {tmp_path}/runs: a"),
        ([str(tmp_path / "empty")], "has no complete step yet"),
        ([run, "--out", "p.pdf"], "must end in .svg, .html, .png"),
        ([run, "--smooth", "0"], "must be 1 or more"),
    ):
        assert cli.main(["plot", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert cli.main(["plot", run, "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["critic/score/mean", "timing_s/step"]


def test_a_closed_pipe_is_no_error_and_torch_is_not_imported(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1] * 50)
    script = (
        "import os, sys\nfrom lockstep import cli\nreader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\n"
        f"code = cli.main(['plot', {str(tmp_path / 'a')!r}])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
