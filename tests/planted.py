"""What `make hangs` and `make chaos` share: their arguments, the order of their outcomes, and the table in a document."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

END = "<!-- end of table -->\n"


def parser(
    name: str, description: str | None, what: str, count: int, repeat: tuple[str, ...]
) -> argparse.ArgumentParser:
    """what: one thing that is planted. repeat: the fields that name one case."""
    made = argparse.ArgumentParser(prog=f"python -m tests.{name}", description=description)
    made.add_argument("--count", type=int, default=count, help=f"number of {what}s ({count})")
    made.add_argument("--seed", type=int, default=0, help="seed of their choice and order (0)")
    made.add_argument("--kind", default="", help="only kinds with this text in their name")
    made.add_argument("--table", type=Path, help="Markdown file whose table is replaced")
    made.add_argument("--repeat", nargs=len(repeat), metavar=repeat, help=f"only this {what}")
    return made


def by_kind(kinds: Iterable[str], outcomes: Iterable[Any]) -> dict[str, list[Any]]:
    """The outcomes of each kind that has any."""
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for outcome in outcomes:
        found[outcome.case.kind].append(outcome)
    return {kind: own for kind, own in found.items() if own}


def report(
    target: str, table: str, summary: str, failed: Sequence[tuple[object, str, str]], document: Path | None
) -> int:
    """Print it all, and write the table into the document; returns the exit code.

    target: of make. failed: case, problem, and the arguments that repeat it.
    """
    print(f"\n{table}\n{summary}")
    for case, problem, repeat in failed:
        print(f"{case}: {problem}\n  --repeat {repeat}")
    if document is not None:
        text, begin = document.read_text(), f"<!-- table of make {target} -->\n"
        before, after = text.index(begin) + len(begin), text.index(END)
        document.write_text(f"{text[:before]}\n{table}\n{summary}\n{text[after:]}")
    return 1 if failed else 0
