"""The timeline of a run: its file, the HTML page and the Chrome trace."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.observability.timeline import TimelineFile, chrome_trace, parse_numbers, read_steps, tracks_of
from lockstep.utils import spans
from lockstep.utils.spans import Span, span, spanned, take_spans

BEGIN = 1_735_689_600_000_000


def spans_of_step(step: int) -> list[Span]:
    """One second per step: gen on two ranks, then an update on one of them."""
    begin = BEGIN + step * 1_000_000
    times = [("gen", "controller", 0, 10, 400_010), ("generate_sequences", "actor", 0, 20, 300_000)]
    times += [("generate_sequences", "actor", 1, 25, 400_000), ("update_actor", "actor", 0, 500_000, 900_000)]
    times += [("optimizer_step", "actor", 0, 600_000, 900_000), ("step", "controller", 0, 0, 900_010)]
    return [Span(name, role, rank, begin + first, begin + last) for name, role, rank, first, last in times]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten steps, and what followed the last."""
    file = TimelineFile(tmp_path, 0)
    for step in range(1, 11):
        file.append(step, spans_of_step(step))
    file.append(10, [Span("save_checkpoint", "controller", 0, BEGIN + 10_950_000, BEGIN + 10_980_000)])
    file.append(10, [])
    file.close()
    return tmp_path


def data_of(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        re.findall(r'<script type="application/json" id="data">(.*)</script>', page.read_text())[0]
    )
    return found


def test_page_has_every_span_and_needs_no_network(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run}/timeline.html: steps 6 to 10; open it in a browser\n"
    page = run / "timeline.html"
    data = data_of(page)
    assert data["tracks"] == [
        {"role": "controller", "rank": 0, "lanes": 2},
        {"role": "actor", "rank": 0, "lanes": 2},
        {"role": "actor", "rank": 1, "lanes": 1},
    ]
    own = [row[1:] for row in data["spans"] if row[0] == 7]
    assert own == [
        ["step", 0, 0, 1_000_000, 1_900_010],
        ["gen", 0, 1, 1_000_010, 1_400_010],
        ["generate_sequences", 1, 0, 1_000_020, 1_300_000],
        ["update_actor", 1, 0, 1_500_000, 1_900_000],
        ["optimizer_step", 1, 1, 1_600_000, 1_900_000],
        ["generate_sequences", 2, 0, 1_000_025, 1_400_000],
    ]
    assert len(data["spans"]) == 5 * 6 + 1
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page.read_text())


DOM = """
const html = require("fs").readFileSync(process.argv[1], "utf8");
const scripts = [...html.matchAll(/<script[^>]*>([\\s\\S]*?)<\\/script>/g)].map(match => match[1]);
const node = () => ({ children: [], style: {}, clientWidth: 1000, classList: { add() {}, remove() {} }, addEventListener() {},
  appendChild(child) { this.children.push(child); }, replaceChildren() { this.children = []; } });
const nodes = { chart: node(), steps: node(), title: node(), table: node(), data: { textContent: scripts[0] } };
globalThis.document = { getElementById: id => nodes[id], createElement: node };
globalThis.window = { addEventListener() {} };
new Function(scripts[1])();
const drawn = () => nodes.chart.children.filter(child => child.className === "span").length;
const all = drawn();
nodes.steps.children[2].onclick();
console.log(JSON.stringify([all, drawn(), nodes.steps.children.map(b => b.textContent), nodes.table.children.length]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's script")
def test_script_of_the_page_draws_the_spans(run: Path) -> None:
    assert cli.main(["timeline", str(run), "--steps", "3-4"]) == 0
    done = subprocess.run(["node", "-e", DOM, str(run / "timeline.html")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [12, 6, ["all", "step 3", "step 4"], 3]


def test_chrome_trace(run: Path) -> None:
    assert cli.main(["timeline", str(run), "--steps", "10", "-o", str(run / "trace.json")]) == 0
    trace = json.loads((run / "trace.json").read_text())
    assert trace == chrome_trace({10: read_steps(run)[10]})
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"ts": BEGIN + 10_000_020, "dur": 299_980, "pid": 2, "tid": 0}.items() <= events[2].items()
    assert [event["name"] for event in events if event["pid"] == 1] == ["step", "gen", "save_checkpoint"]
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "controller", 2: "actor"}


def test_resumed_run_drops_later_steps_and_a_cut_line(run: Path) -> None:
    with open(run / "timeline.jsonl", "ab") as file:
        file.write(b'{"step": 11, "begin_us": 17')
    assert list(read_steps(run)) == list(range(1, 11))
    file = TimelineFile(run, 4)
    file.append(5, spans_of_step(5))
    file.close()
    assert list(read_steps(run / "timeline.jsonl")) == [1, 2, 3, 4, 5]
    assert tracks_of(read_steps(run)) == [("controller", 0), ("actor", 0), ("actor", 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "11-12"], "--steps 11-12: the run has steps 1 to 10"),
        (["--steps", "last"], "--steps last: expected numbers such as 3, 3-5 or 1,3-5"),
        (["-o", "t.svg"], "--out t.svg: the file must end in .html or .json"),
        (["-o", "/dev/null/t.html"], "--out /dev/null/t.html: File exists"),
    ],
)
def test_mistakes(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(run), *arguments]) == 2
    assert f"lockstep timeline: {message}" in capsys.readouterr().err


def test_folder_without_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "no timeline.jsonl" in capsys.readouterr().err


def test_steps_on_the_command_line() -> None:
    assert parse_numbers("3", "--steps") == [range(3, 4)]
    assert parse_numbers("1, 3-5", "--steps") == [range(1, 2), range(3, 6)]


def test_spans_of_concurrent_tasks_keep_their_own_rank() -> None:
    spans.set_track("controller", 0)
    take_spans()

    async def call(rank: int) -> None:
        with span("generate", ("rollout", rank)):
            await asyncio.sleep(0)
            with span("decode"):
                await asyncio.sleep(0)

    async def both() -> None:
        with span("gen"):
            await asyncio.gather(call(1), call(2))

    asyncio.run(both())
    found = [(s.name, s.role, s.rank) for s in take_spans()]
    assert found[-1] == ("gen", "controller", 0)
    assert sorted(found[:-1]) == [(name, "rollout", rank) for name in ("decode", "generate") for rank in (1, 2)]


def test_spans_nest_and_inherit_the_workers_rank() -> None:
    spans.set_track("controller", 0)
    take_spans()

    @spanned
    def optimizer_step() -> int:
        return 3

    with span("step"):
        with span("update_actor", ("actor", 5)):
            assert optimizer_step() == 3
        with pytest.raises(ValueError), span("adv"):
            raise ValueError
    inner, call, adv, outer = take_spans()
    assert [(s.name, s.role, s.rank) for s in (inner, call, adv, outer)] == [
        ("optimizer_step", "actor", 5),
        ("update_actor", "actor", 5),
        ("adv", "controller", 0),
        ("step", "controller", 0),
    ]
    times = [outer.begin_us, call.begin_us, inner.begin_us, inner.end_us, call.end_us, adv.begin_us, outer.end_us]
    assert times == sorted(times)
    assert take_spans() == []


def test_spans_that_nobody_takes_are_bounded() -> None:
    for number in range(spans.MAX_SPANS + 10):
        with span(str(number)):
            pass
    taken = take_spans()
    assert (len(taken), taken[0].name) == (spans.MAX_SPANS, "10")


def test_spans_of_threads_keep_their_own_track() -> None:
    """A call of rewards ends while a worker's call goes on, and the other way round."""
    take_spans()
    began, leave = threading.Event(), threading.Event()

    def rewards() -> None:
        with span("reward", ("rewards", 0)):
            began.set()
            leave.wait()

    thread = threading.Thread(target=rewards)
    with span("advance_generation", ("rollout", 1)):
        thread.start()
        began.wait()
        with span("decode"):
            pass
    leave.set()
    thread.join()
    with span("adv"):
        pass
    tracks = {taken.name: (taken.role, taken.rank) for taken in take_spans()}
    assert tracks == {
        "decode": ("rollout", 1),
        "advance_generation": ("rollout", 1),
        "reward": ("rewards", 0),
        "adv": ("controller", 0),
    }
