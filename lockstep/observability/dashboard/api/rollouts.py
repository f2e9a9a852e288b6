"""The rollouts panel: the prompts and responses of a step, search, and the same prompt over the steps.

Answers are pages: a list of 50 entries, a group of 16 responses; long texts are cut and their length is told.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.observability.dashboard.request import Api, ApiRequest, NotFound, Recorded
from lockstep.observability.dashboard.rollout_query import GROUP_ORDERS, ROW_ORDERS, Filters, matching, sort_key
from lockstep.observability.dashboard.rollout_store import KINDS, Kind, RolloutStore
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.rollout_files import Row, number_in
from lockstep.observability.rollout_search import TextSearch
from lockstep.observability.rollout_table import (
    StepTable,
    TableGroup,
    TableRow,
    as_text,
    reward_columns,
    rollout_columns,
    text_in,
)

PAGE = 50
GROUP_PAGE = 16
SHOWN_SCORES = 32
"""Scores of a group in the list."""
PROMPT_CHARS = 20_000
TEXT_CHARS = 4_000
VALUE_CHARS = 600
"""Characters of a text in an answer."""
READ_BYTES = 64 * 2**20
"""Of the rows that are read for one answer; further rows come without their texts."""
BEGINNING_BYTES = 256 * 2**10
"""Rows up to this size show the beginning of their answer in lists."""
SEARCH_S = 1.0
SEARCH_HITS = 50
HISTORY_POINTS = 2000
RECORDED_STEPS = 6
RECORDED_GROUPS = 16
"""Steps of each kind and groups of each step in an exported page."""


def dumps(request: ApiRequest) -> dict[str, Any]:
    """The steps that have dumps, or in words why there are none."""
    store = request.run().rollouts
    answer: dict[str, Any] = {}
    for kind in KINDS:
        why = store.why_none(kind)
        answer[kind] = {"steps": [] if why else list(store.files(kind)), "why": why}
    return answer


def rollouts(request: ApiRequest) -> dict[str, Any]:
    """A page of a step's groups, or of its rows."""
    store, kind = request.run().rollouts, kind_of(request)
    step, table = store.table(kind, step_of(request))
    fill_index(store)
    view = choice(request, "view", ("groups", "rows"))
    sort = choice(request, "sort", list(GROUP_ORDERS))
    descending = choice(request, "order", ("desc", "asc")) == "desc" and sort != "file"
    found = matching(table, filters_of(request, table))
    page = request.number("page", 0)
    begin = page * PAGE
    if view == "groups":
        order = GROUP_ORDERS[sort]
        found.sort(key=lambda pair: sort_key(order(pair[0]), descending))
        total = len(found)
        items = [group_item(group, rows) for group, rows in found[begin : begin + PAGE]]
    else:
        pairs = [(group, row) for group, rows in found for row in rows]
        if sort == "variance":
            pairs.sort(key=lambda pair: sort_key(pair[0].stats.std, descending))
        else:
            pairs.sort(key=lambda pair: sort_key(ROW_ORDERS[sort](pair[1]), descending))
        total = len(pairs)
        items = [row_item(table, group, row) for group, row in pairs[begin : begin + PAGE]]
    summary = asdict(table.summary) | {"file": str(table.path), "damaged": table.damaged}
    return {"step": step, "summary": summary, "total": total, "page": page, "per_page": PAGE, "items": items}


def group_item(group: TableGroup, matching_rows: list[TableRow]) -> dict[str, Any]:
    """matches: whether the response of each score matches the filters."""
    shown = group.rows[:SHOWN_SCORES]
    lines = {row.line for row in matching_rows}
    return group_head(group) | {
        "scores": [row.score for row in shown],
        "matches": [row.line in lines for row in shown],
        "num_matching": len(matching_rows),
    }


def group_head(group: TableGroup) -> dict[str, Any]:
    return {"group": group.number, "key": group.key, "prompt": group.prompt, "stats": asdict(group.stats)}


def row_item(table: StepTable, group: TableGroup, row: TableRow) -> dict[str, Any]:
    beginning = None
    if row.size <= BEGINNING_BYTES:
        beginning = text_in(table.read(row), "output")[:TEXT_CHARS].strip()[:200]
    return {"group": group.number, "prompt": group.prompt[:120], "beginning": beginning} | row_numbers(row)


def row_numbers(row: TableRow) -> dict[str, Any]:
    """row: the line in the file, from 0, by which the conversation is opened."""
    return {
        "row": row.line,
        "score": row.score,
        "advantage": row.advantage,
        "length": row.length,
        "finish_reason": row.finish_reason,
        "turns": row.turns,
        "tool_errors": row.tool_errors,
        "reward_failed": row.reward_failed,
        "passed": row.passed,
    }


def group(request: ApiRequest) -> dict[str, Any]:
    """One prompt with its responses. group: the number of the group, or its uid; or row: the line of one of its responses."""
    store, kind = request.run().rollouts, kind_of(request)
    step, table = store.table(kind, step_of(request))
    fill_index(store)
    found = (
        group_of_row(table, request.number("row"))
        if "row" in request.params
        else find_group(table, request.text("group"))
    )
    page = request.number("page", 0)
    rows = found.rows[page * GROUP_PAGE : (page + 1) * GROUP_PAGE]
    first = table.read(found.rows[0])
    left = READ_BYTES
    responses = []
    for row in rows:
        left -= row.size
        whole = table.read(row) if left >= 0 or row is rows[0] else None
        responses.append(response(row, whole))
    return group_head(found) | {
        "step": step,
        "prompt": cut(text_in(first, "input"), PROMPT_CHARS),
        "expected": cut(text_in(first, "gts"), VALUE_CHARS),
        "data_source": cut(text_in(first, "data_source"), VALUE_CHARS)["text"],
        "index": cut(text_in(first, "index"), VALUE_CHARS)["text"],
        "page": page,
        "per_page": GROUP_PAGE,
        "responses": responses,
    }


def group_of_row(table: StepTable, line: int) -> TableGroup:
    if line not in table.rows:
        raise NotFound(f"there is no row {line}: the step has {len(table.rows)} rows")
    return table.groups[table.rows[line].group - 1]


def find_group(table: StepTable, name: str) -> TableGroup:
    if name.isdecimal() and len(name) < 10 and 1 <= int(name) <= len(table.groups):
        return table.groups[int(name) - 1]
    found = next((group for group in table.groups if group.uid == name), None)
    if found is None:
        raise NotFound(f"there is no group {name[:40]!r}: the step has groups 1 to {len(table.groups)}")
    return found


def response(row: TableRow, whole: Row | None) -> dict[str, Any]:
    if whole is None:
        return row_numbers(row) | {"output": None, "num_bytes": row.size, "extras": {}, "counts": {}}
    extras = {name: value_of(whole[name]) for name in reward_columns(whole)[:60]}
    counts = {name: value_of(whole[name]) for name in rollout_columns(whole)}
    return row_numbers(row) | {
        "output": cut(text_in(whole, "output"), TEXT_CHARS),
        "extras": extras,
        "counts": counts,
    }


def value_of(value: Any) -> Any:
    """A value of the reward function: numbers as they are, all else as text that is cut."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    text = as_text(value)
    return text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}… ({len(text):,} characters)"


def cut(text: str, limit: int) -> dict[str, Any]:
    """The beginning and the end, where answers are, of a long text. left_out: characters between them."""
    if len(text) <= limit:
        return {"text": text, "end": "", "left_out": 0}
    head, tail = text[: limit * 2 // 3], text[-(limit // 3) :]
    return {"text": head, "end": tail, "left_out": len(text) - len(head) - len(tail)}


def prompt(request: ApiRequest) -> dict[str, Any]:
    """One prompt over the steps in which it was seen, as columns; and how much of the run the index has read."""
    store, kind = request.run().rollouts, kind_of(request)
    key = request.text("key")
    fill_index(store)
    num_indexed = store.index.num_steps(kind)  # before the history, which then has at least these steps
    history = store.index.history(kind, key)
    num_seen = len(history)
    every = math.ceil(num_seen / HISTORY_POINTS) or 1
    history = history[::-1][::every][::-1]  # always with the last one
    num_steps = len(store.files(kind))
    return {
        "step": [step for step, _, _ in history],
        "group": [number for _, number, _ in history],
        **{
            name: [getattr(stats, name) for _, _, stats in history]
            for name in ("n", "mean", "low", "high", "std", "length", "cut", "pass_rate")
        },
        "num_seen": num_seen,
        "num_steps": num_steps,
        "num_indexed": min(num_indexed, num_steps),
    }


def search(request: ApiRequest) -> dict[str, Any]:
    """Text in the prompts and answers of all steps, newest first.

    Ends after about a second or a page of hits; `next` then has the parameters with which to go on: only steps before `before`, and
    in the newest of these only from `line` on, which is at byte `offset`.
    """
    store, kind = request.run().rollouts, kind_of(request)
    text_search = TextSearch(request.text("text"))
    files = store.files(kind)
    before = request.number("before", 2**53)
    steps = [step for step in sorted(files, reverse=True) if step < before]
    begin = request.number("line", 0), request.number("offset", 0)
    deadline = time.monotonic() + SEARCH_S
    hits: list[dict[str, Any]] = []
    for num_done, step in enumerate(steps):
        stopped_at = search_step(text_search, step, files[step], begin if num_done == 0 else (0, 0), deadline, hits)
        if stopped_at is not None:
            line, offset = stopped_at
            go_on = {"before": step + 1, "line": line, "offset": offset}
            return {"hits": hits, "num_steps": len(files), "num_left": len(steps) - num_done, "next": go_on}
    return {"hits": hits, "num_steps": len(files), "num_left": 0, "next": None}


def search_step(
    text_search: TextSearch,
    step: int,
    path: Path,
    begin: tuple[int, int],
    deadline: float,
    hits: list[dict[str, Any]],
) -> tuple[int, int] | None:
    """Add the hits of a step from `begin` (line, offset) on; returns where it stopped, None at the end."""
    try:
        for line, end, hit in text_search.lines(path, *begin):
            if hit is not None:
                score = number_in(hit.row, "score")
                hits.append({"step": step, "row": line, "score": score, "column": hit.column, "excerpt": hit.excerpt})
            if len(hits) >= SEARCH_HITS or time.monotonic() > deadline:
                return line + 1, end
    except OSError:  # it was deleted
        pass
    return None


def fill_index(store: RolloutStore) -> None:
    def listing() -> dict[str, Any]:
        return {kind: store.files(kind) for kind in KINDS}

    store.index.fill(listing)


def kind_of(request: ApiRequest) -> Kind:
    return "validation" if choice(request, "kind", KINDS) == "validation" else "train"


def step_of(request: ApiRequest) -> int | None:
    return request.number("step") if request.params.get("step") else None


def choice(request: ApiRequest, name: str, allowed: Collection[str]) -> str:
    """The first one is the default."""
    value = request.text(name, "") or next(iter(allowed))
    if value not in allowed:
        raise ValueError(f"{name}={value[:40]!r}: must be one of {', '.join(allowed)}")
    return value


def filters_of(request: ApiRequest, table: StepTable) -> Filters:
    text = request.text("text", "")
    variance = request.text("variance", "")
    problem = request.text("problem", "")
    if variance not in ("", "zero", "nonzero"):
        raise ValueError(f"variance={variance[:40]!r}: must be zero or nonzero")
    if problem not in ("", "tool_error", "reward_failed"):
        raise ValueError(f"problem={problem[:40]!r}: must be tool_error or reward_failed")
    return Filters(
        stop=request.text("stop", ""),
        scores=(real(request, "min_score", -math.inf), real(request, "max_score", math.inf)),
        lengths=(real(request, "min_length", -math.inf), real(request, "max_length", math.inf)),
        variance=variance,  # type: ignore[arg-type]
        problem=problem,  # type: ignore[arg-type]
        lines=TextSearch(text).matching(table.path) if text else None,
    )


def real(request: ApiRequest, name: str, default: float) -> float:
    text = request.text(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name}={text[:40]!r}: must be a number")
    return value


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    """Of each run and kind the newest step, the first one and a few between them: its list and its first groups."""
    chosen: list[tuple[RunFolder, Kind, int]] = []
    for run in runs:
        steps = {kind: [] if run.rollouts.why_none(kind) else spread(list(run.rollouts.files(kind))) for kind in KINDS}
        yield Recorded("/api/dumps", {"run": run.name}, partial(with_steps, steps))
        chosen += [(run, kind, step) for kind in KINDS for step in steps[kind]]
    for run, kind, step in chosen:
        yield Recorded("/api/rollouts", {"run": run.name, "kind": kind, "step": str(step)})
    for run, kind, step in chosen:
        try:
            groups = run.rollouts.table(kind, step)[1].groups[:RECORDED_GROUPS]
        except (ValueError, OSError):  # damaged or deleted
            continue
        for group in groups:
            params = {"run": run.name, "kind": kind, "step": str(step), "group": str(group.number)}
            yield Recorded("/api/group", params)


def spread(steps: list[int]) -> list[int]:
    """The first, the last and some steps between them."""
    places = (
        {round(place * (len(steps) - 1) / (RECORDED_STEPS - 1)) for place in range(RECORDED_STEPS)} if steps else ()
    )
    return [steps[place] for place in sorted(places)]


def with_steps(steps: Mapping[Kind, list[int]], answer: dict[str, Any]) -> dict[str, Any]:
    return {kind: answer[kind] | {"steps": found} for kind, found in steps.items()}


ROUTES: dict[str, Api] = {
    "/api/dumps": dumps,
    "/api/rollouts": rollouts,
    "/api/group": group,
    "/api/prompt": prompt,
    "/api/search": search,
}
