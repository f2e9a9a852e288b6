"""The rollouts panel: lists, filters, groups, search, histories, runs of any content, and the page itself."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.observability.dashboard import prompt_index, rollout_store
from lockstep.observability.dashboard.api import rollouts
from lockstep.observability.dashboard.app import APIS, json_response
from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.request import ApiRequest
from lockstep.observability.dashboard.rollout_store import RolloutStore
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.jsonl import json_line
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import dump_step, make_run

Get = Callable[..., Any]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_index, "START_DELAY_S", 0.0)


def getter(folder: Path) -> Get:
    """What the page gets: `get("/api/rollouts", step=3)`; each answer is valid JSON of a moderate size."""
    runs = Runs([folder])

    def get(path: str, **params: Any) -> Any:
        request = ApiRequest(runs, {"run": folder.name} | {name: str(value) for name, value in params.items()})
        body = bytes(json_response(APIS[path](request)).body)
        assert len(body) < 600_000
        return json.loads(body)

    return get


def store_of(run: Path) -> RolloutStore:
    return RolloutStore(run, MetricsStore(run / "metrics.jsonl"))


def row(uid: str, score: float | None, **more: Any) -> dict[str, Any]:
    return {"input": f"question {uid}", "output": "so 4", "gts": "4", "score": score, "step": 3, "uid": uid} | more


def run_with(folder: Path, *rows: dict[str, Any] | bytes, step: int = 3) -> Path:
    (folder / "dumps").mkdir(parents=True, exist_ok=True)
    trainer = {"default_local_dir": str(folder), "rollout_data_dir": str(folder / "dumps")}
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    lines = [entry if isinstance(entry, bytes) else json_line(entry) for entry in rows]
    (folder / "dumps" / f"{step}.jsonl").write_bytes(b"".join(lines))
    return folder


ROWS = [
    row("a", 0.0, length=5, advantage=-1.0, finish_reason="stop", num_turns=2, tool_error_counts=0),
    row("a", 1.0, length=9, advantage=1.0, finish_reason="length", num_turns=4, tool_error_counts=2),
    row("b", 0.5, length=2, advantage=0.0, finish_reason="stop", num_turns=2, tool_error_counts=0, reward_failed=1.0),
    row("b", 0.5, length=3, advantage=0.0, finish_reason="stop", num_turns=9, tool_error_counts=0, output="Über 42"),
    row("c", None, length=30, finish_reason="abort"),
]


@pytest.fixture
def get(tmp_path: Path) -> Get:
    return getter(run_with(tmp_path / "run", *ROWS))


def test_the_list_of_groups(get: Get) -> None:
    answer = get("/api/rollouts")
    assert (answer["step"], answer["total"], answer["page"]) == (3, 3, 0)
    assert [item["scores"] for item in answer["items"]] == [[0.0, 1.0], [0.5, 0.5], [None]]
    summary = answer["summary"]
    assert (summary["num_groups"], summary["num_equal"], summary["num_several"]) == (3, 1, 2)
    assert summary["stops"] == {"stop": 3, "length": 1, "abort": 1} and summary["stats"]["mean"] == 0.5
    assert (summary["num_tool_errors"], summary["num_reward_failed"], summary["damaged"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("sort", "highest_first", "lowest_first"),
    [
        ("reward", [1, 2, 3], [1, 2, 3]),  # equal means: in the order of the file
        ("file", [1, 2, 3], [1, 2, 3]),
        ("length", [3, 1, 2], [2, 1, 3]),
        ("variance", [1, 2, 3], [2, 1, 3]),
        ("advantage", [1, 2, 3], [2, 1, 3]),
        ("turns", [2, 1, 3], [1, 2, 3]),
        ("tool_errors", [1, 2, 3], [2, 1, 3]),
    ],
)
def test_order_of_groups(get: Get, sort: str, highest_first: list[int], lowest_first: list[int]) -> None:
    """Groups without a value come last in both orders."""
    for order, expected in (("desc", highest_first), ("asc", lowest_first)):
        found = [item["group"] for item in get("/api/rollouts", sort=sort, order=order)["items"]]
        assert found == expected, order


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"stop": "length"}, [1]),
        ({"stop": "abort"}, [4]),
        ({"min_score": 0.5}, [1, 2, 3]),
        ({"min_score": 0.1, "max_score": 0.9}, [2, 3]),
        ({"min_length": 3, "max_length": 9}, [0, 1, 3]),
        ({"variance": "zero"}, [2, 3]),
        ({"variance": "nonzero"}, [0, 1]),
        ({"problem": "tool_error"}, [1]),
        ({"problem": "reward_failed"}, [2]),
        ({"text": "üBER 4"}, [3]),
        ({"text": "question a", "stop": "stop"}, [0]),
        ({"text": "nowhere"}, []),
    ],
)
def test_filters(get: Get, filters: dict[str, Any], rows: list[int]) -> None:
    found = get("/api/rollouts", view="rows", **filters)
    assert [item["row"] for item in found["items"]] == rows and found["total"] == len(rows)
    groups = get("/api/rollouts", **filters)["items"]
    assert sum(item["num_matching"] for item in groups) == len(rows)


def test_which_responses_of_a_group_match_and_pass(tmp_path: Path) -> None:
    rows = [row("a", 1.0, acc=0.0, length=5), row("a", 0.2, acc=1.0, length=9), row("b", 1.0, acc=0.0, length=9)]
    get = getter(run_with(tmp_path / "run", *rows))
    answer = get("/api/rollouts", min_length=6)
    assert answer["summary"]["has_acc"] and [item["stats"]["pass_rate"] for item in answer["items"]] == [0.5, 0.0]
    assert [item["matches"] for item in answer["items"]] == [[False, True], [True]]
    assert [item["passed"] for item in get("/api/rollouts", view="rows")["items"]] == [False, True, False]
    (tmp_path / "run/dumps/3.jsonl").write_bytes(json_line(row("a", 1.0)))
    assert not get("/api/rollouts")["summary"]["has_acc"]


def test_wrong_parameters_are_refused_in_words(get: Get) -> None:
    for path, params, message in (
        ("/api/rollouts", {"sort": "colour"}, "sort='colour': must be one of file, reward"),
        ("/api/rollouts", {"kind": "x"}, "kind='x': must be one of train, validation"),
        ("/api/rollouts", {"min_score": "nan"}, "min_score='nan': must be a number"),
        ("/api/rollouts", {"variance": "x"}, "must be zero or nonzero"),
        ("/api/rollouts", {"problem": "x"}, "must be tool_error or reward_failed"),
        ("/api/rollouts", {"step": "9"}, "step 9 has no dump: there are 1, from 3 to 3"),
        ("/api/rollouts", {"step": "x"}, "must be a number"),
        ("/api/rollouts", {"page": "-1"}, "page=-1"),
        ("/api/group", {"group": "9"}, "there is no group '9': the step has groups 1 to 3"),
        ("/api/group", {"row": "9"}, "there is no row 9"),
        ("/api/prompt", {"key": "zz"}, "16 hexadecimal digits"),
        ("/api/search", {"text": ""}, "must be 1 to 500 characters"),
        ("/api/rollouts", {"kind": "validation"}, "set trainer.validation_data_dir=FOLDER"),
    ):
        with pytest.raises(ValueError) as refused:
            get(path, **params)
        assert message in str(refused.value)


def test_a_group_side_by_side(tmp_path: Path) -> None:
    extras = {"acc": 1.0, "reason": "because", "parts": {"form": 0.5}, "long": "z" * 5000}
    extras |= {"num_turns": 4, "tool_call_counts": 1, "reward_scores": {}, "reward_failed": 0.0}
    rows = [row("a", 1.0, data_source="gsm8k", index=12, **extras), row("a", 0.0, output="y" * 100_000 + "END")]
    get = getter(run_with(tmp_path / "run", *rows))
    group = get("/api/group", step=3, group=1)
    assert group["prompt"]["text"] == "question a" and group["expected"]["text"] == "4"
    assert (group["data_source"], group["index"]) == ("gsm8k", "12")
    first, second = group["responses"]
    assert list(first["extras"]) == ["acc", "reason", "parts", "long"], "the reward's own"
    assert first["counts"] == {"num_turns": 4, "tool_call_counts": 1}
    assert first["extras"]["acc"] == 1.0 and first["extras"]["reason"] == "because"
    assert first["extras"]["parts"] == '{"form": 0.5}' and first["extras"]["long"].endswith("z… (5,000 characters)")
    assert second["output"]["end"].endswith("END")
    assert len(second["output"]["text"]) + len(second["output"]["end"]) + second["output"]["left_out"] == 100_003
    assert get("/api/group", group="a")["responses"] == group["responses"] == get("/api/group", row=1)["responses"]


def test_pages(tmp_path: Path) -> None:
    rows = [row(f"{number // 40}", float(number % 2)) for number in range(40 * 60)]
    get = getter(run_with(tmp_path / "run", *rows))
    pages = [get("/api/rollouts", page=page) for page in (0, 1, 2)]
    assert [len(page["items"]) for page in pages] == [50, 10, 0] and pages[0]["total"] == 60
    assert len(pages[0]["items"][0]["scores"]) == 32 and pages[0]["items"][0]["stats"]["n"] == 40
    responses = [get("/api/group", group=3, page=page)["responses"] for page in (0, 1, 2, 3)]
    assert [each["row"] for page in responses for each in page] == list(range(80, 120))


def test_which_steps_have_dumps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6, dump_every=2)
    get = getter(run)
    assert get("/api/dumps") == {"train": {"steps": [2, 4, 6], "why": None}, "validation": {"steps": [6], "why": None}}
    dump_step(run / "rollouts", 7, 8, 2, 2)
    assert get("/api/dumps")["train"]["steps"] == [2, 4, 6, 7], "a new step is seen"
    assert get("/api/rollouts")["step"] == 7
    shutil.rmtree(run / "rollouts")
    answer = get("/api/dumps")["train"]
    assert answer["steps"] == [] and "which does not exist here" in answer["why"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["rollout_data_dir"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "set trainer.rollout_data_dir=FOLDER" in get("/api/dumps")["train"]["why"]
    (run / "config.yaml").write_bytes(b"\xff[")
    assert "is not the config of a run" in get("/api/dumps")["train"]["why"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[a, b]", "trainer.rollout_data_dir is not a path but list"),
        ("{a: 1}", "trainer.rollout_data_dir is not a path but dict"),
        ("7", "trainer.rollout_data_dir is not a path but int"),
        ("~nosuchuser/x", "~nosuchuser/x, which does not exist here"),
        ("${trainer.inside}/x\n  inside: &inside [*inside]", "does not exist here"),
        ('"a\\0b"', "does not exist here"),
    ],
)
def test_odd_dump_folders_in_a_config(tmp_path: Path, value: str, words: str) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "config.yaml").write_text(f"trainer:\n  default_local_dir: {run}\n  rollout_data_dir: {value}\n")
    assert words in getter(run)("/api/dumps")["train"]["why"]


def test_a_folder_that_has_settled_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=3)
    store = store_of(run)
    monkeypatch.setattr(rollout_store, "SETTLED_NS", -1)
    first = store.files("train")
    assert store.files("train") is first
    dump_step(run / "rollouts", 4, 4, 2, 2)
    assert list(store.files("train")) == [1, 2, 3, 4]


def test_dumps_of_an_abandoned_attempt_are_left_out(tmp_path: Path) -> None:
    """After a resume from step 3 the metrics are cut, and the dumps of steps 4 to 8 are still those of before."""
    run = make_run(tmp_path / "run", steps=8)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    store, get = store_of(run), getter(run)
    assert list(store.files("train")) == [1, 2, 3, 4] and store.files("train") is store.files("train")
    assert store.table("train")[0] == 4 and list(store.files("validation")) == []
    assert "has not reached step 8 again" in (store.why_none("validation") or "")
    key = get("/api/rollouts", sort="reward")["items"][0]["key"]
    answer = until(lambda: get("/api/prompt", key=key), lambda answer: answer["num_indexed"] == 4)
    assert answer["step"] == [1, 2, 3, 4]
    (run / "status.json").write_text('{"state": "running", "step": 5}')
    assert list(store.files("train")) == [1, 2, 3, 4, 5, 6]
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    assert len(store.files("train")) == 8 and list(store.files("validation")) == [8]
    (run / "status.json").unlink()
    (run / "metrics.jsonl").unlink()
    assert len(store.files("train")) == 8


def test_tables_are_kept_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = rollout_store.TableCache()
    monkeypatch.setattr(rollout_store, "TABLES", tables)
    store, other = (store_of(make_run(tmp_path / name, steps=6)) for name in ("run", "other"))
    assert store.table("train", 6)[1] is store.table("train")[1]
    monkeypatch.setattr(rollout_store, "KEPT_TABLES", 2)
    for step in range(1, 7):
        store.table("train", step)
        other.table("train", step)
    assert len(tables) == 2
    monkeypatch.setattr(rollout_store, "KEPT_ROWS", 1)
    store.table("train", 1)
    assert len(tables) == 1


def test_the_same_prompt_over_the_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    get = getter(run)
    key = get("/api/rollouts", sort="reward")["items"][0]["key"]
    answer = until(lambda: get("/api/prompt", key=key), lambda answer: answer["num_indexed"] == 5)
    assert answer["step"] == [1, 2, 3, 4, 5] and answer["num_steps"] == 5 == answer["num_seen"]
    for step, number, mean, rate in zip(answer["step"], answer["group"], answer["mean"], answer["pass_rate"]):
        scores = [each["score"] for each in get("/api/group", step=step, group=number)["responses"]]
        assert mean == pytest.approx(sum(scores) / len(scores)) and rate == mean
    dump_step(run / "rollouts", 6, 6, 4, 4)
    until(lambda: get("/api/prompt", key=key), lambda answer: answer["step"] == [1, 2, 3, 4, 5, 6])


def until(ask: Callable[[], Any], is_right: Callable[[Any], bool]) -> Any:
    for _ in range(600):
        answer = ask()
        if is_right(answer):
            return answer
        time.sleep(0.05)
    raise AssertionError(answer)


def test_long_histories_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "HISTORY_POINTS", 3)
    get = getter(make_run(tmp_path / "run", steps=7))
    key = get("/api/rollouts")["items"][0]["key"]
    answer = until(lambda: get("/api/prompt", key=key), lambda answer: answer["num_indexed"] == 7)
    assert answer["step"] == [1, 4, 7] and answer["num_seen"] == 7


def test_search_in_all_steps_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        rows = [row(f"{number}", 1.0, output="a needle" if number % 2 else "hay") for number in range(8)]
        run_with(run, *rows, step=step)
    get = getter(run)
    expected = [(step, line) for step in (3, 2, 1) for line in (1, 3, 5, 7)]
    for hits, seconds in ((50, 1.0), (3, 1.0), (50, 0.0)):
        monkeypatch.setattr(rollouts, "SEARCH_HITS", hits)
        monkeypatch.setattr(rollouts, "SEARCH_S", seconds)
        assert found_in_all_steps(get, "NEEDLE") == expected


def found_in_all_steps(get: Get, text: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    cursor: dict[str, int] | None = {}
    while cursor is not None:
        answer = get("/api/search", text=text, **cursor)
        found += [(hit["step"], hit["row"]) for hit in answer["hits"]]
        cursor = answer["next"]
    assert answer["num_left"] == 0
    return found


def test_search_finds_tool_messages(tmp_path: Path) -> None:
    messages = [{"role": "tool", "content": "31 degrees"}]
    get = getter(run_with(tmp_path / "run", row("a", 1.0), row("b", 0.0, messages=messages)))
    assert get("/api/search", text="31 DEG")["hits"][0]["column"] == "tool message"
    assert [item["row"] for item in get("/api/rollouts", view="rows", text="31 deg")["items"]] == [1]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>\x00\u2028"
    odd = b'{"input": "bytes \xff", "output": "\\ud800", "uid": "z", "score": 1, "<b>": "<i>"}\n'
    big = row("big", 1.0, output="y" * 10_000_000 + "END", reason=script)
    get = getter(run_with(tmp_path / "run", row(script, 1.0, output=script), odd, big, b"\x00\xff\n"))
    answer = get("/api/rollouts")
    assert answer["summary"]["damaged"] == 1 and answer["items"][0]["prompt"] == f"question {script}"
    assert get("/api/rollouts", view="rows")["items"][2]["beginning"] is None
    group = get("/api/group", group=3)
    assert group["responses"][0]["output"]["left_out"] > 9_900_000
    assert get("/api/group", group=2)["responses"][0]["extras"] == {"<b>": "<i>"}
    assert found_in_all_steps(get, "yyyEND") == [(3, 2)]


def test_many_large_rows_are_not_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "READ_BYTES", 3000)
    get = getter(run_with(tmp_path / "run", *[row("a", 1.0, output="y" * 2000)] * 3))
    outputs = [each["output"] for each in get("/api/group", group=1)["responses"]]
    assert outputs[0] is not None and outputs[1:] == [None, None]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """Cut off, rewritten and deleted, again and again: answers are lists or words, never another error."""
    run = run_with(tmp_path / "run", *ROWS * 50)
    path = run / "dumps" / "3.jsonl"
    whole = path.read_bytes()
    get = getter(run)
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            for content in (whole[: len(whole) // 2], whole, b""):
                path.write_bytes(content)
            path.unlink()
            path.write_bytes(whole)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(60):
            for ask in (
                ("/api/rollouts", {"view": "rows"}),
                ("/api/group", {"group": 1}),
                ("/api/search", {"text": "4"}),
            ):
                with suppress(ValueError, OSError):
                    get(ask[0], **ask[1])
    finally:
        is_over.set()
        thread.join()
    assert get("/api/rollouts")["summary"]["stats"]["n"] == 250


def test_a_deleted_run_is_an_answer(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", *ROWS)
    get = getter(tmp_path / "run")
    get("/api/rollouts")
    shutil.rmtree(run / "dumps")
    with pytest.raises((ValueError, OSError)):
        get("/api/rollouts")
    shutil.rmtree(run)
    assert get("/api/dumps")["train"]["why"]


def test_an_empty_step(tmp_path: Path) -> None:
    answer = getter(run_with(tmp_path / "run"))("/api/rollouts")
    assert answer["items"] == [] and answer["summary"]["stats"] is None


@pytest.mark.slow
def test_a_step_of_100_000_rows(tmp_path: Path) -> None:
    line = json_line(row("U", 1.0, length=9, finish_reason="stop"))
    lines = [line.replace(b'"U"', b'"%d"' % (number // 8)) for number in range(100_000)]
    get = getter(run_with(tmp_path / "run", *lines))
    answer = get("/api/rollouts", sort="variance", page=3)
    assert answer["total"] == 12_500 and answer["summary"]["num_equal"] == 12_500
    assert get("/api/rollouts", view="rows", sort="reward", page=1999)["items"][-1]["row"] == 99_999
    assert len(get("/api/search", text="so 4", before=4)["hits"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_the_panel(serve: Serve, open_page: OpenPage, tmp_path: Path, width: int, dark: bool) -> None:
    run = make_run(tmp_path / "run", steps=12, prompts=60, n=4)
    hostile = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    run_with(
        tmp_path / "other", *(row("a", 1.0, output=hostile, input=hostile, **{hostile: hostile}) for _ in range(2))
    )
    page = open_page(f"{serve(tmp_path)}/#/rollouts?run=run", width=width, dark=dark)
    page.wait_for_selector("#rollouts tbody tr")
    assert page.locator("#rollouts tbody tr").count() == 50
    page.get_by_role("button", name="Next page").click()
    page.wait_for_selector("text=Page 2 of 2")
    page.get_by_label("Previous step").click()
    page.wait_for_selector("text=Step 11: 60 prompts, 240 responses")
    assert "step=11" in page.url
    page.get_by_label("Sort by").select_option("variance")
    page.wait_for_selector("#rollouts .list:not([aria-busy])")
    page.locator("#rollouts .opener").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#rollouts article")
    assert page.locator("#rollouts article").count() == 4 and "group=" in page.url
    assert (
        page.get_by_role("link", name="Open conversation")
        .first.get_attribute("href")
        .startswith("#/conversation?run=run")
    )
    page.wait_for_selector("#rollouts .history .main-svg")
    assert "false" not in page.locator("#rollouts .group").inner_text()
    page.get_by_text("As a table").click()
    page.get_by_role("button", name="Step 5", exact=True).click()
    page.wait_for_selector("text=of step 5")
    page.reload()
    page.wait_for_selector("text=of step 5")
    page.get_by_role("button", name="Newest").click()
    page.wait_for_selector("text=follows the run")
    assert page.locator("#rollouts article").count() == 0
    if width < 700:
        page.get_by_text("Filters and search").click()
    page.get_by_role("button", name="Search all steps").click()
    page.wait_for_selector("[role=status]:text('Type a text to search for.')")
    page.get_by_label("Text in prompt, answer or messages").fill("WHAT IS 7 + 7")
    page.get_by_role("button", name="Search all steps").click()
    page.wait_for_selector(
        "text=searched 12 of 12 steps of training, all of them. Samples of validation are searched separately."
    )
    page.get_by_role("button", name="Step 3, row 28").click()
    page.wait_for_selector("text=Group 8 of step 3")
    page.get_by_role("button", name="Close group").click()
    page.get_by_role("button", name="Search this step").click()
    assert page.get_by_role("columnheader", name="Passed").count() == 1
    page.wait_for_selector("#rollouts .square.match")
    assert page.locator("#rollouts .square.match").count() == 4
    page.wait_for_selector("text=1 prompt matches")
    page.get_by_label("Problem").select_option("tool_error")
    page.wait_for_selector("text=Nothing matches")
    page.get_by_role("button", name="Clear filters").click()
    page.wait_for_selector("#rollouts .opener")
    assert page.get_by_label("Problem").input_value() == "" and "problem=" not in page.url
    assert page.get_by_label("Results in all steps").is_hidden()
    page.get_by_role("button", name="Newest").click()
    page.wait_for_selector("text=Step 12:")
    dump_step(run / "rollouts", 13, 13, 5, 4)
    with open(run / "metrics.jsonl", "ab") as metrics:
        metrics.write(json_line({"step": 13, "time": 1.0, "critic/score/mean": 1.0}))
    page.wait_for_selector("text=Step 13: 5 prompts")
    page.get_by_label("Samples of").select_option("validation")
    page.wait_for_selector("text=Step 12: 60 prompts, 120 responses")
    page.get_by_label("Run").first.select_option("other")
    page.wait_for_selector("text=Step 3: 1 prompt, 2 responses")
    page.locator("#rollouts .opener").first.click()
    page.wait_for_selector("#rollouts article")
    assert page.title().startswith("Rollouts") and page.locator("#rollouts img").count() == 0
    page.get_by_label("Samples of").select_option("validation")
    page.wait_for_selector("text=set trainer.validation_data_dir=FOLDER")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    names = "[...document.querySelectorAll('#rollouts :is(button,input,select,a)')]"
    unnamed = f"{names}.filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).length"
    assert page.evaluate(unnamed) == 0
