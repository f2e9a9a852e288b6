"""`make hangs`, or `python -m tests.hangs --count 60 --seed 0`: plant many hangs and tabulate whether each was named."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.hangs.cases import KINDS, Bench, Case, Outcome, plan
from tests.hangs.runs import HangLab

BEGIN, END = "<!-- table of make hangs -->\n", "<!-- end of table -->\n"


def main() -> int:
    options = _parser().parse_args()
    if options.repeat is not None:
        kind, config, step = options.repeat
        cases = [Case(kind, config, int(step))]
    else:
        cases = plan(options.count, options.seed, options.kind, options.config)
    begin = time.monotonic()
    outcomes = run_all(cases)
    minutes = (time.monotonic() - begin) / 60
    failed = [outcome for outcome in outcomes if outcome.problem]
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    shown = table(outcomes)
    summary = (
        f"{len(outcomes)} hangs in {minutes:.0f} minutes with seed {options.seed}: {len(failed)} failed. The slowest run ended "
        f"{slowest:.0f} s after its hang began.\n"
    )
    print(f"\n{shown}\n{summary}")
    for outcome in failed:
        case = outcome.case
        print(f"{case}: {outcome.problem}\n  --repeat '{case.kind}' '{case.config}' {case.step}")
    if options.table is not None:
        text = options.table.read_text()
        before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
        options.table.write_text(f"{text[:before]}\n{shown}\n{summary}\n{text[after:]}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hangs", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="number of hangs (60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their choice and order (0)")
    parser.add_argument("--kind", default="", help="only kinds with this text in their name")
    parser.add_argument("--config", default="", help="only configurations with this text in their name")
    parser.add_argument("--table", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--repeat", nargs=3, metavar=("KIND", "CONFIG", "STEP"), help="only this hang")
    return parser


def run_all(cases: list[Case]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder, HangLab(Path(folder) / "lab", teardown=False) as lab:
        bench = Bench(lab)
        for case in cases:
            outcomes.append(outcome := bench.run(case))
            print(
                f"{len(outcomes)}/{len(cases)} {case}: {outcome}, {outcome.seconds:.0f} s: {outcome.verdict}",
                flush=True,
            )
            if outcome.problem:
                print(f"    {outcome.problem}", flush=True)
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a row per kind of hang."""
    by_kind: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for outcome in outcomes:
        by_kind[outcome.case.kind].append(outcome)
    rows = ["| hang | in | named | not or wrongly named | slowest |", "|---|---|---|---|---|"]
    num_named = num_failed = 0
    for kind, own in by_kind.items():
        if not own:
            continue
        failed = sum(bool(outcome.problem) for outcome in own)
        configs = ", ".join(dict.fromkeys(outcome.case.config for outcome in own))
        slowest = max(outcome.seconds for outcome in own)
        rows.append(f"| {kind} | {configs} | {len(own) - failed} | {failed} | {slowest:.0f} s |")
        num_named, num_failed = num_named + len(own) - failed, num_failed + failed
    rows.append(f"| all | | {num_named} | {num_failed} | |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
