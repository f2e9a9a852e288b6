"""`lockstep rollouts RUN --step N`: the prompts of a step with their responses, scores and advantages.

groups of a dump (rollout_files.py) ─► selected and sorted ─► text
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.observability import token_file
from lockstep.observability.rollout_files import (
    MAIN_COLUMNS,
    Group,
    NoDumps,
    Row,
    dump_file,
    dumps_of_run,
    number_in,
    rank,
    read_groups,
)
from lockstep.observability.step_line import format_number, one_line
from lockstep.observability.token_file import RowTokens
from lockstep.utils.message_text import content_text
from lockstep.utils.untrusted import printable

TOKEN_COLUMNS = {
    "rollout_log_probs": "log-prob",
    "old_log_probs": "trainer",
    token_file.GAP: "gap",
    "ref_log_prob": "reference",
    "entropys": "entropy",
    "advantages": "advantage",
    "values": "value",
    "token_level_rewards": "reward",
    "rollout_is_weights": "weight",
}
"""Numbers of tokens, and their heading."""
GROUPS = 3
CHARS = 800
"""Groups shown, and characters of each text, unless the user asks for more."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        path = dump_file(options.run, options.step, options.validation)
        groups = read_groups(path)
        shown = select(groups, options.group, options.sort, options.reverse)
        tokens = tokens_of(path, shown, options.group) if options.tokens else {}
    except ValueError as error:
        if isinstance(error, NoDumps) and not options.validation and _has_validations(options.run):
            error = ValueError(f"{error.problem}; --validation shows its validations; {error.remedy}")
        sys.stderr.write(f"lockstep rollouts: {error}\n")
        return 2
    limit = options.show if options.show is not None else (0 if options.group else GROUPS)
    chars = options.chars if options.chars is not None else (0 if options.group else CHARS)
    encoding = sys.stdout.encoding or "utf-8"
    for line in page(path, groups, shown[: limit or None], chars, tokens):
        sys.stdout.write(f"{line.encode(encoding, 'replace').decode(encoding)}\n")
    return 0


def _has_validations(run: Path) -> bool:
    with suppress(ValueError):
        return bool(dumps_of_run(run, validation=True))
    return False


def select(groups: Sequence[Group], name: str | None, sort: str | None, reverse: bool) -> list[Group]:
    """The group with number or uid `name`, or all of them; sorted highest first by mean, and so are the rows in each."""
    if name is not None:
        chosen = [group for group in groups if name in (str(group.number), str(group.rows[0].get("uid")))]
        if not chosen:
            raise ValueError(f"--group {name}: the step has groups 1 to {len(groups)}")
        groups = chosen
    if sort is None:
        return list(groups)[::-1] if reverse else list(groups)
    column = {"reward": "score", "length": "length"}[sort]
    ordered = [group.sorted(column, reverse=not reverse) for group in groups]
    return sorted(ordered, key=lambda group: rank(group.mean(column)), reverse=not reverse)


def tokens_of(path: Path, groups: Sequence[Group], name: str | None) -> dict[int, RowTokens]:
    """The tokens of a group's responses by the line of the dump. ValueError if there are none."""
    if name is None:
        raise ValueError("--tokens shows the tokens of one group; add --group K")
    return {line: token_file.read(token_file.token_path(path), line) for group in groups for line in group.lines}


def page(
    path: Path,
    groups: Sequence[Group],
    shown: Sequence[Group],
    chars: int,
    tokens: Mapping[int, RowTokens] | None = None,
) -> Iterator[str]:
    """tokens: by the line of the dump."""
    rows = [row for group in groups for row in group.rows]
    scores = [number_in(row, "score") for row in rows]
    equal = sum(len({row.get("score") for row in group.rows}) == 1 for group in groups if len(group.rows) > 1)
    parts = [f"step {rows[0].get('step')}: {len(groups)} prompts, {len(rows)} responses"]
    parts += [f"score {format_number(fmean(scores))} ({format_number(min(scores))} to {format_number(max(scores))})"]
    parts += [f"{equal} groups with equal scores"] if equal else []
    if cut := sum(row.get("finish_reason") == "length" for row in rows):
        parts.append(f"{cut} responses cut at the maximum length")
    yield f"{', '.join(parts)} | {path}"
    extras = _extras(rows)
    for group in shown:
        yield ""
        yield from _group_lines(group, len(groups), chars, extras, tokens or {}, path.parent)
    if len(shown) < len(groups):
        yield ""
        yield f"{len(shown)} of {len(groups)} groups; --show 0 shows all, --group K one of them in full"


def _extras(rows: Sequence[Row]) -> list[str]:
    """The other columns, without counters that are 0 everywhere."""
    names = dict.fromkeys(name for row in rows for name in row if name not in MAIN_COLUMNS)
    return [name for name in names if not all(row.get(name) is None or _is_zero_count(row[name]) for row in rows)]


def _is_zero_count(value: Any) -> bool:
    return type(value) is int and value == 0


def _group_lines(
    group: Group, num_groups: int, chars: int, extras: Sequence[str], tokens: Mapping[int, RowTokens], folder: Path
) -> Iterator[str]:
    first = group.rows[0]
    index = f" | row {first['index']} of the data" if first.get("index") is not None else ""
    source = f" | {one_line(first['data_source'], 60)}" if first.get("data_source") else ""
    yield f"group {group.number} of {num_groups}{index}{source} | score {format_number(group.mean('score'))}"
    yield from _indented(first["input"], chars, "  ")
    images = first.get("images")
    for name in images if isinstance(images, list) else ():
        yield f"  image: {printable(str(folder / str(name)))}"
    if first.get("gts") not in (None, ""):
        yield f"  expected: {one_line(first['gts'], chars or 10**9)}"
    for number, (row, line) in enumerate(zip(group.rows, group.lines), start=1):
        parts = [f"  [{number}] score {format_number(number_in(row, 'score'))}"]
        if row.get("advantage") is not None:
            parts.append(f"advantage {number_in(row, 'advantage'):+.3g}")
        parts += [f"{row['length']} tokens"] if row.get("length") is not None else []
        parts += {"length": ["cut at the maximum length"], "stop": ["stopped"]}.get(str(row.get("finish_reason")), [])
        parts += ["scoring failed"] if row.get("reward_failed") else []
        parts += [f"{name} {_short(row[name])}" for name in extras if row.get(name) is not None]
        yield " | ".join(parts)
        yield from _answer_lines(row, chars, "      ")
        if line in tokens:
            yield from _token_lines(tokens[line], "      ")


def _token_lines(tokens: RowTokens, indent: str) -> Iterator[str]:
    """A table with a line per token, and why columns are missing."""
    numbers = tokens.shown()
    names = [name for name in TOKEN_COLUMNS if name in numbers]
    yield indent + "".join(f"{TOKEN_COLUMNS[name]:>11}" for name in names) + "  version  trained  token"
    for place, piece in enumerate(tokens.pieces):
        values = (numbers[name][place] for name in names)
        cells = "".join(f"{'-' if value != value else f'{value:.4g}':>11}" for value in values)
        version = str(tokens.policy_versions[place]) if tokens.is_sampled[place] else "-"
        trained = "yes" if tokens.mask[place] else "no"
        yield f"{indent}{cells}{version:>9}{trained:>9}  {printable(_token_text(piece))}"
    for name, reason in tokens.missing().items():
        yield f"{indent}no {TOKEN_COLUMNS[name]}: {reason}"


def _token_text(piece: bytes) -> str:
    """The piece as a quoted text; bytes that are a part of a character as \\xe4."""
    text = piece.decode("utf-8", "backslashreplace")
    return '"' + text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t") + '"'


def _short(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format_number(value) if is_number else one_line(value, 60)


def _answer_lines(row: Row, chars: int, indent: str) -> Iterator[str]:
    """The response; of a conversation each turn, with its role and its tool calls."""
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        yield from _indented(row["output"], chars, indent)
        return
    for message in messages:
        who = f"{message.get('role')} {message.get('name') or ''}"
        yield f"{indent}[{one_line(who, 60)}]"
        if message.get("content"):
            yield from _indented(content_text(message["content"]), chars, indent + "  ")
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            yield from _indented(f"-> {function.get('name')}({function.get('arguments')})", chars, indent + "  ")


def _indented(text: str, chars: int, indent: str) -> Iterator[str]:
    """The text's lines; the middle of a long one is left out, since answers are at the end."""
    if chars and len(text) > chars:
        head, tail = text[: chars * 2 // 3], text[-(chars // 3) :]
        text = f"{head} [... {len(text) - len(head) - len(tail):,} characters ...] {tail}"
    for line in text.splitlines() or [""]:
        yield indent + printable(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep rollouts",
        description="Show the prompts of a step with their responses, scores and advantages.",
        epilog="A run writes its rollouts if trainer.rollout_data_dir is set, its validations if trainer.validation_data_dir is.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, a dump folder or one dump")
    parser.add_argument("--step", type=int, metavar="N", help="the step; default: the last one")
    parser.add_argument("--validation", action="store_true", help="show a validation instead of training samples")
    parser.add_argument("--group", metavar="K", help="only this group (its number or uid), in full")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="with --group: each token with its numbers, if trainer.rollout_token_data was set",
    )
    parser.add_argument("--sort", choices=("reward", "length"), help="sort groups and responses, highest first")
    parser.add_argument("--reverse", action="store_true", help="lowest first")
    parser.add_argument("--show", type=int, metavar="N", help=f"number of groups, 0 for all; default: {GROUPS}")
    parser.add_argument("--chars", type=int, metavar="N", help=f"characters per text, 0 for all; default: {CHARS}")
    return parser
