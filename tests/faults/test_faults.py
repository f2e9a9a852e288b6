"""A fault of each kind (`make test-all`); `make chaos` runs hundreds. Killed agent workers are in trainer/test_agent_workers.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import KINDS, Bench, Case, plan
from tests.faults.runs import Lab, difference, result

pytestmark = [pytest.mark.first, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

CASES = [
    Case("kill -9 at an event", "grpo", 0.45, 0),
    Case("SIGTERM at an event", "filter_groups", 0.3, 0),
    Case("SIGINT at an event", "grpo", 0.2, 0),
    Case("SIGTERM to all processes at an event", "ppo", 0.4, 0),
    Case("disk full", "ppo", 0.6, 0),
    Case("read-only folder", "grpo", 0.79, 0),
    Case("file too large", "filter_groups", 0.7, 0),
    Case("folder in the way of a file", "grpo", 0.1, 0),
    Case("memory limit", "grpo", 0.05, 0),
    Case("truncated checkpoint", "ppo", 0.5, 0),
    Case("file missing in a checkpoint", "filter_groups", 0.9, 0),
    Case("killed reward worker", "ppo", 0.5, 0),
    Case("killed data-loader worker", "grpo", 0.5, 0),
    Case("pre-emption", "ppo", 0.5, 0),
    Case("pre-emption at an event", "grpo", 0.6, 0),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Lab(tmp_path_factory.mktemp("faults") / "lab", teardown=False) as lab:
        yield Bench(lab)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(bench: Bench, case: Case) -> None:
    outcome = bench.run(case)
    assert not outcome.problem, outcome


@pytest.mark.slow
def test_forked_run_equals_a_fresh_process(bench: Bench, tmp_path: Path) -> None:
    ended = bench.lab.run("ppo", tmp_path, fresh=True)
    assert ended.code == 0, ended
    assert difference(result(tmp_path / "run"), bench.baseline("ppo").result) == ""


def test_plan_has_every_kind_and_the_requested_number() -> None:
    cases = list(plan(300, seed=0))
    assert {case.kind for case in cases} == set(KINDS) and 290 <= len(cases) <= 300
    assert cases == list(plan(300, seed=0)) != list(plan(300, seed=1))
