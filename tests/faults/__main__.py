"""`make chaos`, or `python -m tests.faults --count 300 --seed 0`: inject many faults and tabulate what came of them."""

import argparse
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tests.faults.cases import KINDS, Bench, Case, Outcome, plan
from tests.faults.runs import Lab

BEGIN, END = "<!-- table of make chaos -->\n", "<!-- end of table -->\n"


def main() -> int:
    options = _parser().parse_args()
    kinds = [kind for kind in KINDS if options.kind in kind]
    if options.repeat is not None:
        kind, config, moment, seed = options.repeat
        cases = [Case(kind, config, float(moment), int(seed))]
    else:
        cases = list(plan(options.count, options.seed, kinds))
    begin = time.monotonic()
    outcomes = run_all(cases, options.jobs)
    minutes = (time.monotonic() - begin) / 60
    shown = table(outcomes)
    failed = [outcome for outcome in outcomes if outcome.problem]
    summary = f"{len(outcomes)} faults in {minutes:.0f} minutes with seed {options.seed}: {len(failed)} failed.\n"
    print(f"\n{shown}\n{summary}")
    for outcome in failed:
        case = outcome.case
        print(f"{case}: {outcome.problem}\n  --repeat '{case.kind}' {case.config} {case.moment!r} {case.seed}")
    if options.table is not None:
        text = options.table.read_text()
        before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
        options.table.write_text(f"{text[:before]}\n{shown}\n{summary}\n{text[after:]}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of faults (300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their moments and order (0)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--kind", default="", help="only kinds with this text in their name")
    parser.add_argument("--table", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--repeat", nargs=4, metavar=("KIND", "CONFIG", "MOMENT", "SEED"), help="only this fault")
    return parser


def run_all(cases: list[Case], num_jobs: int) -> list[Outcome]:
    """The outcomes of all cases, in the order they ended."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    outcomes: list[Outcome] = []

    def work(folder: Path) -> None:
        with Lab(folder) as lab:
            bench = Bench(lab)
            while True:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                outcomes.append(outcome := bench.run(case))
                print(f"{len(outcomes)}/{len(cases)} {case}: {outcome} (exit code {outcome.code})", flush=True)

    with tempfile.TemporaryDirectory(prefix="lockstep-faults-") as folder:
        threads = [
            threading.Thread(target=work, args=(Path(folder) / str(number),), daemon=True) for number in range(num_jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a row per kind of fault."""
    by_kind: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for outcome in outcomes:
        by_kind[outcome.case.kind].append(outcome)
    columns = ("finished, equal", "stopped, resumed, equal", "no effect", "failed")
    rows = [f"| fault | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    totals = dict.fromkeys(columns, 0)
    for kind, own in by_kind.items():
        counts = {column: sum(str(outcome) == column for outcome in own) for column in columns}
        totals = {column: totals[column] + counts[column] for column in columns}
        if own:
            rows.append(f"| {kind} | {' | '.join(map(str, counts.values()))} |")
    rows.append(f"| all | {' | '.join(map(str, totals.values()))} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
