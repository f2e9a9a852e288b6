"""Programs per second in the sandbox compared with plain `subprocess`, on small programs that read stdin and print.

python benchmarks/sandbox.py --programs 100 --cases 1
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import get_args

from lockstep.rewards.sandbox.process import VARIABLE, Form, failure
from lockstep.rewards.scorers.prime_code import compute_score, output_agrees

PROGRAMS = [
    "print(sum(range(int(input()) + 1)))",
    "n = int(input())\nwhile n % 2 == 0 and n: n //= 2\nprint(n)",
    "n = int(input())\nsieve = [True] * (n + 2)\nfor i in range(2, n + 1):\n"
    "    if sieve[i]:\n        for j in range(i * i, n + 1, i): sieve[j] = False\nprint(sum(sieve[2:n + 1]))",
    "import collections\nprint(collections.Counter(input()).most_common(1)[0][0])",
]


def run_plain(program: str, given: str) -> str:
    done = subprocess.run([sys.executable, "-I", "-c", program], input=given, capture_output=True, text=True)
    return done.stdout


def plain_score(program: str, inputs: list[str], outputs: list[str]) -> float:
    return float(all(output_agrees(run_plain(program, given), wanted) for given, wanted in zip(inputs, outputs)))


def sandbox_score(program: str, inputs: list[str], outputs: list[str]) -> float:
    return compute_score(program, {"inputs": inputs, "outputs": outputs})[0]


def programs_per_s(
    score: Callable[[str, list[str], list[str]], float], jobs: list[tuple[str, list[str], list[str]]]
) -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        scores = list(threads.map(lambda job: score(*job), jobs))
    assert scores == [1.0] * len(jobs)
    return len(jobs) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--cases", type=int, default=1, help="test cases per program")
    parser.add_argument("--rounds", type=int, default=5, help="each form runs once per round, in turn")
    options = parser.parse_args()
    inputs = [str(1_000 + case) for case in range(options.cases)]
    answers = {program: [run_plain(program, given) for given in inputs] for program in PROGRAMS}
    jobs = [(program, inputs, answers[program]) for program in (PROGRAMS * options.programs)[: options.programs]]
    forms = [form for form in get_args(Form)[:-1] if failure(form) is None]
    rates: dict[str, list[float]] = {name: [] for name in ("plain", *forms)}
    for _ in range(options.rounds):
        rates["plain"].append(programs_per_s(plain_score, jobs))
        for form in forms:
            os.environ[VARIABLE] = form
            rates[form].append(programs_per_s(sandbox_score, jobs))
    print(f"{options.programs} programs, {options.cases} cases each, {len(os.sched_getaffinity(0))} threads")
    for name, values in rates.items():
        ratios = [value / plain for value, plain in zip(values, rates["plain"])]
        print(f"{name:12s} {median(values):7.1f} programs/s   {median(ratios):5.2f} of plain subprocess")


if __name__ == "__main__":
    main()
