"""`make chaos`, or `python -m tests.faults --count 300 --seed 0`: inject many faults and tabulate what came of them."""

import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tests.faults.cases import KINDS, Bench, Case, Outcome, plan
from tests.faults.runs import Lab
from tests.planted import by_kind, parser, report


def main() -> int:
    arguments = parser("faults", __doc__, "fault", 300, ("KIND", "CONFIG", "MOMENT", "SEED"))
    arguments.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    options = arguments.parse_args()
    kinds = [kind for kind in KINDS if options.kind in kind]
    if options.repeat is not None:
        kind, config, moment, seed = options.repeat
        cases = [Case(kind, config, float(moment), int(seed))]
    else:
        cases = list(plan(options.count, options.seed, kinds))
    begin = time.monotonic()
    outcomes = run_all(cases, options.jobs)
    minutes = (time.monotonic() - begin) / 60
    failed = [outcome for outcome in outcomes if outcome.problem]
    summary = f"{len(outcomes)} faults in {minutes:.0f} minutes with seed {options.seed}: {len(failed)} failed.\n"
    told = [(o.case, o.problem, f"'{o.case.kind}' {o.case.config} {o.case.moment!r} {o.case.seed}") for o in failed]
    return report("chaos", table(outcomes), summary, told, options.table)


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
    columns = ("finished, equal", "stopped, resumed, equal", "no effect", "failed")
    rows = [f"| fault | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    totals = dict.fromkeys(columns, 0)
    for kind, own in by_kind(KINDS, outcomes).items():
        counts = {column: sum(str(outcome) == column for outcome in own) for column in columns}
        totals = {column: totals[column] + counts[column] for column in columns}
        rows.append(f"| {kind} | {' | '.join(map(str, counts.values()))} |")
    rows.append(f"| all | {' | '.join(map(str, totals.values()))} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
