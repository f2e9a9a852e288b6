"""The conversation panel: one response with its turns, rewards and tokens.

{step}.jsonl ─► /api/conversation (turns, with long texts cut), /api/conversation/text and /image (one of them)
{step}.tokens.parquet ─► /api/tokens
"""

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.observability.dashboard.api.rollouts import RECORDED_GROUPS, filters_of, kind_of, spread
from lockstep.observability.dashboard.request import Api, ApiRequest, NotFound, Recorded
from lockstep.observability.dashboard.rollout_query import matching
from lockstep.observability.dashboard.rollout_store import KINDS
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.image_files import NAME
from lockstep.observability.rollout_table import StepTable, TableRow, as_text, reward_columns, rollout_columns
from lockstep.utils.data_uri import as_data_uri
from lockstep.utils.untrusted import JSON_ERRORS

HEAD_CHARS, TAIL_CHARS = 20_000, 2_000
ALL_CHARS = 300_000
"""Characters of all texts in one answer: once they are used up texts are only named, and fetched when they are asked for."""
PAGE_CHARS = 200_000
MOST_TURNS = 500
MOST_EXTRAS = 200
MOST_TOKENS = 5_000
RECORDED_RESPONSES = 8
"""Of each group, in an exported page."""
IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")
MOST_IMAGE_CHARS = 4_000_000
TOOL_ERROR = "Error: "
"""How a tool message begins if the call failed (`agents/tools/calls.py`)."""

Place = list[str | int]
"""Where a value is in a row, such as ["messages", 2, "content"]."""


class Texts:
    """Cuts the texts of an answer."""

    def __init__(self) -> None:
        self.left = ALL_CHARS

    def cut(self, value: Any, place: Place) -> dict[str, Any]:
        """{"text", "length", "place"}; of a long text also the "tail". What is between them is fetched by its place."""
        text = as_text(value)
        head = HEAD_CHARS if self.left >= HEAD_CHARS + TAIL_CHARS else min(HEAD_CHARS, self.left)
        if len(text) <= head:
            self.left -= len(text)
            return {"text": text, "length": len(text), "place": place}
        tail = min(TAIL_CHARS, len(text) - head, self.left - head)
        self.left -= head + tail
        return {"text": text[:head], "tail": text[len(text) - tail :], "length": len(text), "place": place}


def conversation(request: ApiRequest) -> dict[str, Any]:
    """A response: what was asked and answered turn by turn, its score, and the reward function's own output.

    Its neighbours in the step are those that match the filters of the rollouts panel, if the request has some.
    """
    table, row = _row(request)
    values = table.read(row)
    texts = Texts()
    group = [other.line for other in table.groups[row.group - 1].rows]
    lines = sorted(row.line for _, rows in matching(table, filters_of(request, table)) for row in rows)
    counts = [name for name in rollout_columns(values) if name != "turn_rewards"]  # these are beside their turns
    odd_numbers = values.get("non_finite")
    return {
        "row": row.line,
        "rows": len(table.rows),
        "num_matching": len(lines),
        "step_neighbours": _neighbours(lines, row.line),
        "group_size": len(group),
        "group_place": group.index(row.line),
        "group_neighbours": _neighbours(group, row.line),
        **{name: _number(values.get(name)) for name in ("step", "score", "advantage", "length", "index")},
        "finish_reason": _short(values.get("finish_reason")),
        "data_source": _short(values.get("data_source")),
        "reward_failed": row.reward_failed,
        "odd_score": _short(odd_numbers.get("score")) if isinstance(odd_numbers, dict) else None,
        "prompt": texts.cut(values.get("input"), ["input"]),
        "images": [["images", number] for number in range(_num_images(values))],
        "expected": texts.cut(values["gts"], ["gts"]) if values.get("gts") not in (None, "") else None,
        "turns": list(_turns(values, texts)),
        "num_turns": len(values["messages"]) if _has_messages(values) else 1,
        "extras": [_named(values, name, texts) for name in reward_columns(values)[:MOST_EXTRAS]],
        "counts": [_named(values, name, texts) for name in counts],
    }


def _num_images(values: dict[str, Any]) -> int:
    images = values.get("images")
    return min(len(images), MOST_TURNS) if isinstance(images, list) else 0


def _named(values: dict[str, Any], name: str, texts: Texts) -> dict[str, Any]:
    value = values[name]
    if _is_number(value):
        return {"name": name[:200], "value": _number(value)}
    return {"name": name[:200], "text": texts.cut(value, [name])}


def _row(request: ApiRequest) -> tuple[StepTable, TableRow]:
    _, table = request.run().rollouts.table(kind_of(request), request.number("step"))
    line = request.number("row")
    if line not in table.rows:
        raise NotFound(f"there is no row {line}: the step has {len(table.rows)} rows")
    return table, table.rows[line]


def _neighbours(lines: Sequence[int], line: int) -> list[int | None]:
    """The rows before and after one, which need not be among them."""
    before, after = bisect_left(lines, line), bisect_right(lines, line)
    return [lines[before - 1] if before else None, lines[after] if after < len(lines) else None]


def _has_messages(values: dict[str, Any]) -> bool:
    return isinstance(values.get("messages"), list) and len(values["messages"]) > 0


def _turns(values: dict[str, Any], texts: Texts) -> Iterator[dict[str, Any]]:
    """The turns after the prompt; a response without messages is one."""
    if not _has_messages(values):
        yield {"role": "assistant", "parts": [{"text": texts.cut(values.get("output"), ["output"])}], "calls": []}
        return
    messages = values["messages"]
    rewards = _turn_rewards(messages, values.get("turn_rewards"))
    for number, message in enumerate(messages[:MOST_TURNS]):
        place: Place = ["messages", number]
        if not isinstance(message, dict):
            yield {"role": "?", "parts": [{"text": texts.cut(message, place)}], "calls": []}
            continue
        content = message.get("content")
        yield {
            "role": _short(message.get("role")) or "?",
            "name": _short(message.get("name")),
            "parts": list(_parts(content, [*place, "content"], texts)),
            "calls": list(_calls(message.get("tool_calls"), [*place, "tool_calls"], texts)),
            "failed": message.get("role") == "tool" and as_text(content).startswith(TOOL_ERROR),
            "reward": rewards.get(number),
        }


def _turn_rewards(messages: list[Any], rewards: Any) -> dict[int, float]:
    """Number of a message of the policy -> its reward. Those of rewritten histories are in the first turn that was kept."""
    if not isinstance(rewards, list) or not all(_is_number(reward) for reward in rewards):
        return {}
    own = [n for n, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "assistant"]
    return dict(zip(own[-len(rewards) :], rewards)) if rewards else {}


def _parts(content: Any, place: Place, texts: Texts) -> Iterator[dict[str, Any]]:
    """The texts and images of a message."""
    if not isinstance(content, list):
        if content not in (None, ""):
            yield {"text": texts.cut(content, place)}
        return
    for number, part in enumerate(content[:MOST_TURNS]):
        inner: Place = [*place, number]
        if not isinstance(part, dict):
            yield {"text": texts.cut(part, inner)}
        elif (image := _image_of(part)) is not None:
            keys, source = image
            shown = len(source) <= MOST_IMAGE_CHARS and IMAGE.fullmatch(source) is not None
            yield {"image": [*inner, *keys]} if shown else {"note": f"image: {source[:300]}"}
        elif isinstance(part.get("text"), str):
            yield {"text": texts.cut(part["text"], [*inner, "text"])}
        else:
            yield {"text": texts.cut(part, inner)}


def _image_of(part: dict[str, Any]) -> tuple[Place, str] | None:
    """Where the image of a part is, and what is there: a data URI, a URL or a path."""
    for name in ("image_url", "image"):
        inner = part.get(name)
        if isinstance(inner, dict) and isinstance(inner.get("url"), str):
            return [name, "url"], inner["url"]
        if isinstance(inner, str):
            return [name], inner
    return None


def _calls(calls: Any, place: Place, texts: Texts) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(calls[:MOST_TURNS] if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            yield {"name": "?", "arguments": texts.cut(call, [*place, number])}
            continue
        arguments = texts.cut(function.get("arguments"), [*place, number, "function", "arguments"])
        yield {"name": _short(function.get("name")) or "?", "arguments": arguments}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    return value if _is_number(value) and abs(value) < 2**1023 else None


def _short(value: Any) -> str | None:
    return None if value is None else as_text(value)[:200]


def text(request: ApiRequest) -> dict[str, Any]:
    """A page of a text of the row. place: as JSON, from an answer of `conversation`; begin: in characters."""
    whole = as_text(_value(request))
    begin = request.number("begin", 0)
    return {"text": whole[begin : begin + PAGE_CHARS], "begin": begin, "length": len(whole)}


def image(request: ApiRequest) -> dict[str, str]:
    """An image that is embedded in the row, or is in the dump's folder of images, as a data URI."""
    source = _value(request)
    if isinstance(source, str) and NAME.fullmatch(source):
        source = _stored(_row(request)[0].path.parent / source)
    if not isinstance(source, str) or len(source) > MOST_IMAGE_CHARS or not IMAGE.fullmatch(source):
        raise ValueError("not an embedded PNG, JPEG, GIF or WebP image of at most 4 million characters")
    return {"uri": source}


def _stored(file: Path) -> str:
    try:
        if file.is_symlink() or file.stat().st_size > MOST_IMAGE_CHARS * 3 // 4:
            raise ValueError("the image is too large to be shown")
        return as_data_uri(file.read_bytes())
    except OSError as error:
        raise NotFound(f"{file}: {error.strerror}") from None


def _value(request: ApiRequest) -> Any:
    """What is at the request's `place` in the row."""
    try:
        keys = json.loads(request.text("place"))
    except JSON_ERRORS:
        keys = None
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise ValueError("place must be a list of names and numbers, as JSON")
    table, row = _row(request)
    value: Any = table.read(row)
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise NotFound(f"the row has nothing at {json.dumps(keys)[:200]}") from None
    return value


def tokens(request: ApiRequest) -> dict[str, Any]:
    """A page of the response's tokens with their numbers, or of the prompt's. begin: number of the first token."""
    from lockstep.observability import token_file  # imports pyarrow

    table, row = _row(request)
    path = token_file.token_path(table.path)
    found = token_file.read(path, row.line)
    if found.uid != table.groups[row.group - 1].uid or len(found.ids) != row.length:
        raise ValueError(f"{path.name} is not of this {table.path.name}: the step was run again without it")
    begin = request.number("begin", 0)
    page = slice(begin, begin + MOST_TOKENS)
    if request.text("of", "response") == "prompt":
        pieces, ids = found.prompt, found.prompt_ids
        return {"num_tokens": len(ids), "begin": begin, "ids": ids[page], "pieces": shown_pieces(pieces, page)}
    numbers = found.shown()
    lowest = {name: _place(numbers.get(name), np.argmin) for name in ("rollout_log_probs", "old_log_probs")}
    return {
        "num_tokens": len(found.ids),
        "begin": begin,
        "ids": found.ids[page],
        "pieces": shown_pieces(found.pieces, page),
        "mask": found.mask[page].astype(int).tolist(),
        "versions": found.policy_versions[page].tolist(),
        "numbers": {name: _rounded(values[page]) for name, values in numbers.items()},
        "ranges": {name: _range(values) for name, values in numbers.items()},
        "version_range": _range(found.policy_versions[found.is_sampled]),
        "least_likely": lowest["rollout_log_probs"]
        if lowest["rollout_log_probs"] is not None
        else lowest["old_log_probs"],
        "largest_gap": _place(np.abs(numbers["gap"]) if "gap" in numbers else None, np.argmax),
        "turns": [list(turn) for turn in found.turns()[:MOST_TURNS]],
        "num_trained": int(found.mask.sum()),
        "missing": found.missing(),
    }


def _place(values: np.ndarray | None, choose: Any) -> int | None:
    """The token that is chosen among those with a finite number."""
    if values is None or not (finite := np.flatnonzero(np.isfinite(values))).size:
        return None
    return int(finite[choose(values[finite])])


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _range(values: np.ndarray) -> list[float] | None:
    finite = values[np.isfinite(values)]
    return [float(f"{float(edge):.6g}") for edge in (finite.min(), finite.max())] if finite.size else None


def shown_pieces(pieces: Sequence[bytes], page: slice) -> list[Any]:
    """Texts; a piece that is not one by itself is {"hex": its bytes, "of": the characters that it and its neighbours are}."""
    start, stop, _ = page.indices(len(pieces))
    decoded = {place: _decoded(pieces[place]) for place in range(start, stop)}
    shown: list[Any] = []
    place = start
    while place < stop:
        if (text := decoded[place]) is not None:
            shown.append(text)
            place += 1
            continue
        end = place
        while end < stop and decoded[end] is None:
            end += 1
        for piece, characters in zip(pieces[place:end], _characters(pieces[place:end])):
            shown.append({"hex": piece.hex(" ")} | ({"of": characters} if characters else {}))
        place = end
    return shown


def _characters(pieces: Sequence[bytes]) -> list[str]:
    """For each piece the characters that are split over it and its neighbours; empty for bytes that are in no character."""
    marked = b"".join(pieces).decode("utf-8", "surrogateescape")
    spans: list[tuple[int, int, str]] = []
    at = 0
    for char in marked:
        size = 1 if "\udc80" <= char <= "\udcff" else len(char.encode())
        spans.append((at, at + size, "" if size == 1 else char))
        at += size
    found, begin, first = [], 0, 0
    for piece in pieces:
        end = begin + len(piece)
        while first < len(spans) and spans[first][1] <= begin:
            first += 1
        last = first
        while last < len(spans) and spans[last][0] < end:
            last += 1
        found.append("".join(char for _, _, char in spans[first:last]))
        begin = end
    return found


def _decoded(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    """The responses, with their tokens, of the groups that the rollouts panel records of each newest step."""
    for run in runs:
        for kind in KINDS:
            if run.rollouts.why_none(kind):
                continue
            for step in reversed(spread(list(run.rollouts.files(kind)))):
                try:
                    groups = run.rollouts.table(kind, step)[1].groups[:RECORDED_GROUPS]
                except (ValueError, OSError):  # damaged or deleted
                    continue
                for row in (row for group in groups for row in group.rows[:RECORDED_RESPONSES]):
                    params = {"run": run.name, "kind": kind, "step": str(step), "row": str(row.line)}
                    yield Recorded("/api/conversation", params)
                    yield Recorded("/api/tokens", params)


ROUTES: dict[str, Api] = {
    "/api/conversation": conversation,
    "/api/conversation/text": text,
    "/api/conversation/image": image,
    "/api/tokens": tokens,
}
