"""A few hangs (`make test-all`), what follows them by `trainer.on_hang`, and no alarm without one; `make hangs` plants sixty."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import difference, result
from tests.hangs.cases import KINDS, Bench, Case, plan, reports
from tests.hangs.plants import Plant
from tests.hangs.runs import HangLab

pytestmark = [pytest.mark.first, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

CASES = [
    Case("tool that never returns", "agents", 2),
    Case("stalled write of metrics.jsonl", "local", 3),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HangLab]:
    with HangLab(tmp_path_factory.mktemp("hangs") / "lab", teardown=False) as lab:
        yield lab


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hang(lab: HangLab, case: Case) -> None:
    outcome = Bench(lab).run(case)
    assert not outcome.problem, outcome


@pytest.mark.slow
def test_a_restarted_run_ends_like_an_undisturbed_one(lab: HangLab, tmp_path: Path) -> None:
    settings = ("trainer.on_hang=restart", "trainer.max_restarts=1", "trainer.watchdog.min_deadline_s=6")
    ended = lab.train("local", tmp_path / "hung", Plant("reward", "lock", step=3), settings)
    assert ended.code == 0 and not ended.left, ended.stderr
    assert len(reports(tmp_path / "hung")) == 1
    assert lab.train("local", tmp_path / "undisturbed", Plant("none"), settings).code == 0
    hung, undisturbed = result(tmp_path / "hung" / "run"), result(tmp_path / "undisturbed" / "run")
    for row in hung["metrics"]:
        for name in [name for name in row if "restart" in name]:
            del row[name]
    assert difference(hung, undisturbed) == ""


@pytest.mark.slow
def test_no_alarm_if_calls_vary_by_10x(lab: HangLab, tmp_path: Path) -> None:
    settings = (
        "custom_reward_function.name=take_your_time",
        "trainer.watchdog.min_deadline_s=1",
        "trainer.watchdog.multiple=10",
        "trainer.total_training_steps=3",
    )
    ended = lab.train("local", tmp_path, Plant("none"), settings)
    assert ended.code == 0 and not reports(tmp_path) and "stuck" not in ended.stderr, ended.stderr


def test_plan_has_every_kind_and_the_requested_number() -> None:
    cases = plan(60, seed=0)
    assert {case.kind for case in cases} == set(KINDS) and len(cases) == len(set(cases)) == 60
    assert cases == plan(60, seed=0) != plan(60, seed=1)
