"""`make hangs`, or `python -m tests.hangs --count 60 --seed 0`: plant many hangs and tabulate whether each was named."""

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.hangs.cases import KINDS, Bench, Case, Outcome, plan
from tests.hangs.runs import HangLab
from tests.planted import by_kind, parser, report


def main() -> int:
    arguments = parser("hangs", __doc__, "hang", 60, ("KIND", "CONFIG", "STEP"))
    arguments.add_argument("--config", default="", help="only configurations with this text in their name")
    options = arguments.parse_args()
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
    summary = (
        f"{len(outcomes)} hangs in {minutes:.0f} minutes with seed {options.seed}: {len(failed)} failed. The slowest report "
        f"came {slowest:.0f} s after its hang began.\n"
    )
    told = [(o.case, o.problem, f"'{o.case.kind}' '{o.case.config}' {o.case.step}") for o in failed]
    return report("hangs", table(outcomes), summary, told, options.table)


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
    rows = ["| hang | in | named | not or wrongly named | slowest |", "|---|---|---|---|---|"]
    num_named = num_failed = 0
    for kind, own in by_kind(KINDS, outcomes).items():
        failed = sum(bool(outcome.problem) for outcome in own)
        configs = ", ".join(dict.fromkeys(outcome.case.config for outcome in own))
        slowest = max(outcome.seconds for outcome in own)
        rows.append(f"| {kind} | {configs} | {len(own) - failed} | {failed} | {slowest:.0f} s |")
        num_named, num_failed = num_named + len(own) - failed, num_failed + failed
    rows.append(f"| all | | {num_named} | {num_failed} | |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
