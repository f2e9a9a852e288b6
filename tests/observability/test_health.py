"""The rules of health: each fires on a run with its fault, and none on healthy runs."""

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import flat_values
from lockstep.config.sft import SFTConfig
from lockstep.observability.health import RULES, findings, reward
from lockstep.observability.health.process import PHASES, TIMERS, phases_of, state_of
from lockstep.observability.health.run_view import Finding, RunView, Series, trend
from tests.observability.dashboard.made_runs import step_metrics

DOCS = Path(__file__).parents[2] / "docs"
Column = Callable[[int], float]
"""Value at a step; NaN stays in, None would be a missing value."""

RL = {"algorithm": {"adv_estimator": "grpo"}, "data": {"max_response_length": 512, "train_batch_size": 64}}
DUMPS = {"trainer": {"rollout_data_dir": "r", "validation_data_dir": "v"}}


def noisy(mean: Callable[[float], float], deviation: float = 0.02, steps: int = 200, seed: int = 0) -> Column:
    """mean: of the progress, 0 to 1."""
    rng = random.Random(seed)
    noise = [rng.gauss(0, deviation) for _ in range(steps + 1)]
    return lambda step: mean(step / steps) + noise[step]


def constant(value: float) -> Column:
    return lambda step: value


HEALTHY: dict[str, Column] = {
    "critic/score/mean": noisy(lambda t: 0.2 + 0.6 * t),
    "critic/score/max": constant(1.0),
    "critic/score/min": constant(0.0),
    "critic/score/zero_variance_groups": noisy(lambda t: 0.4, 0.05),
    "actor/entropy": noisy(lambda t: 1.5 - t, 0.02),
    "actor/grad_norm": noisy(lambda t: 0.5, 0.1),
    "actor/pg_loss": noisy(lambda t: 0.0),
    "actor/kl_loss": noisy(lambda t: 0.1 * t, 0.005),
    "actor/ppo_kl": noisy(lambda t: 0.002, 0.0005),
    "training/rollout_log_probs_gap": noisy(lambda t: 0.01, 0.001),
    "response_length/mean": noisy(lambda t: 200 + 100 * t, 5),
    "response_length/clip_ratio": noisy(lambda t: 0.02, 0.005),
    "response/aborted_ratio": constant(0.0),
    "reward/reward_failed/mean": constant(0.0),
    "tool_call_counts/mean": noisy(lambda t: 2.0, 0.1),
    "tool_error_counts/mean": noisy(lambda t: 0.05, 0.01),
    "malformed_call_counts/mean": noisy(lambda t: 0.3 * (1 - t), 0.01),
    "critic/vf_explained_var": noisy(lambda t: 0.5 * t, 0.05),
    "async/trainer_wait_share": noisy(lambda t: 0.1, 0.02),
    "async/rollout_wait_share": noisy(lambda t: 0.1, 0.02),
    "async/stale_groups": constant(0.0),
    "timing_s/step": noisy(lambda t: 60, 2),
    "timing_s/gen": noisy(lambda t: 30, 2),
    "timing_s/update_actor": noisy(lambda t: 25, 2),
    "perf/max_memory_allocated_gb": constant(60.0),
    "val-core/math/acc/mean@4": noisy(lambda t: 0.2 + 0.5 * t, 0.02),
}
SUPERVISED: dict[str, Column] = {
    "train/loss": noisy(lambda t: 2 - t, 0.05),
    "train/grad_norm": noisy(lambda t: 1.0, 0.1),
    "val/loss": lambda step: 2 - step / 200,
}
PLAN = {
    "gpu": "H100",
    "gpu_memory_gb": 80.0,
    "memory_gb": {"generate": 60.0, "update actor": 70.0},
    "seconds": {"generate": 40.0, "update actor": 30.0},
}
RUNNING = {"state": "running", "time": 1000.0, "step": 200, "total_steps": 400, "pid": 1, "host": "h", "phases": []}


def view(columns: dict[str, Column], steps: int = 200, **changes: Any) -> RunView:
    def read(name: str) -> Series:
        if name not in columns:
            return Series([], [])
        every = 20 if name.startswith("val") else 1
        chosen = [step for step in range(1, steps + 1) if step % every == 0]
        return Series(chosen, [columns[name](step) for step in chosen])

    settings = RL | DUMPS | changes.pop("settings", {})
    return RunView(
        read, sorted(columns), **({"settings": settings, "status": RUNNING, "plan": PLAN, "now": 1002.0} | changes)
    )


def rules_of(run: RunView) -> dict[str, Finding]:
    return {finding.rule: finding for finding in findings(run)}


@pytest.mark.parametrize("steps", [1, 3, 10, 40, 100, 200])
@pytest.mark.parametrize("columns", [HEALTHY, SUPERVISED, {}], ids=["rl", "supervised", "empty"])
def test_healthy_runs_are_silent(columns: dict[str, Column], steps: int) -> None:
    assert findings(view(columns, steps)) == []


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 20, 200])
def test_a_reward_that_is_the_accuracy_says_nothing(steps: int) -> None:
    assert findings(view(HEALTHY | {"reward/acc/mean": HEALTHY["critic/score/mean"]}, steps)) == []


@pytest.mark.parametrize("seed", range(30))
def test_noise_alone_says_nothing(seed: int) -> None:
    """A slow but learning run, with the noise of small batches."""
    slow = {name: noisy(lambda t: 0.3 + 0.15 * t, 0.06, seed=seed) for name in ("critic/score/mean",)}
    others = {
        "actor/entropy": noisy(lambda t: 0.8 - 0.3 * t, 0.1, seed=seed),
        "actor/kl_loss": noisy(lambda t: 0.05 + 0.1 * t, 0.02, seed=seed),
        "training/rollout_log_probs_gap": noisy(lambda t: 0.02, 0.01, seed=seed),
        "val-core/math/acc/mean@4": noisy(lambda t: 0.4 + 0.05 * t, 0.03, seed=seed),
        "actor/grad_norm": lambda step: 0.3 * math.exp(random.Random(1000 * seed + step).gauss(0, 0.4)),
        "critic/score/zero_variance_groups": noisy(lambda t: 0.55, 0.1, seed=seed),
    }
    for steps in (20, 60, 200):
        assert findings(view(HEALTHY | slow | others, steps)) == []


@pytest.mark.parametrize("steps", [5, 20])
def test_made_runs_are_silent(steps: int) -> None:
    columns = {name: (lambda step, name=name: step_metrics(step, steps)[name]) for name in step_metrics(1, steps)}
    assert findings(view(columns, steps)) == []


HUNG = (
    "no progress in 'rewards 1/4' for 700 s (deadline 600 s): the reward f has not answered (report: run/hangs/1_rewards.txt); the "
    "run ended early; run the same command to resume from its last checkpoint, run/global_step_1"
)
FAULTS: list[tuple[str, dict[str, Column], dict[str, Any]]] = [
    ("reward_flat", {"critic/score/mean": noisy(lambda t: 0.3)}, {}),
    ("reward_constant", dict.fromkeys(("critic/score/mean", "critic/score/max", "critic/score/min"), constant(0.0)), {}),
    ("reward_falls", {"critic/score/mean": noisy(lambda t: 0.8 - max(0, t - 0.6))}, {}),
    (
        "reward_saturated",
        {
            "critic/score/mean": lambda step: min(0.995, 0.5 + step / 100),
            "critic/score/zero_variance_groups": lambda step: min(0.97, 0.4 + step / 100),
            "val-core/math/acc/mean@4": noisy(lambda t: 0.3),
        },
        {},
    ),
    (
        "reward_without_accuracy",
        {"critic/score/mean": noisy(lambda t: 0.1 + 0.85 * t), "reward/acc/mean": noisy(lambda t: 0.05, 0.01)},
        {},
    ),
    ("equal_groups", {"critic/score/zero_variance_groups": noisy(lambda t: 0.8)}, {}),
    (
        "entropy_collapse",
        {"actor/entropy": lambda step: 1.5 * math.exp(-step / 20), "critic/score/mean": noisy(lambda t: 0.3 + 0.3 * t)},
        {},
    ),
    ("entropy_rises", {"actor/entropy": noisy(lambda t: 1 + 2 * t)}, {}),
    ("kl_rises", {"actor/kl_loss": noisy(lambda t: 0.1 + 3 * max(0, t - 0.6))}, {}),
    ("large_updates", {"actor/ppo_kl": noisy(lambda t: 0.3)}, {}),
    ("gradient_spikes", {"actor/grad_norm": lambda step: 40.0 if step % 30 == 0 else 0.5}, {}),
    ("non_finite", {"actor/grad_norm": lambda step: math.nan if step == 190 else 0.5}, {}),
    ("critic", {"critic/vf_explained_var": noisy(lambda t: -0.4)}, {}),
    ("validation_falls", {"val-core/math/acc/mean@4": noisy(lambda t: 0.6 - 0.6 * abs(t - 0.5), 0.01)}, {}),
    ("responses_cut", {"response_length/clip_ratio": noisy(lambda t: 0.5 * t)}, {}),
    ("responses_empty", {"response/aborted_ratio": constant(0.3)}, {}),
    ("tools_fail", {"tool_error_counts/mean": noisy(lambda t: 0.66)}, {}),
    ("malformed_calls", {"malformed_call_counts/mean": noisy(lambda t: 1.0)}, {}),
    ("conversations_fail", {"environment_error_counts/mean": noisy(lambda t: 0.2)}, {}),
    ("reward_fails", {"reward/reward_failed/mean": noisy(lambda t: 0.05, 0.001)}, {}),
    ("log_prob_gap", {"training/rollout_log_probs_gap": noisy(lambda t: 0.01 + 0.1 * t, 0.002)}, {}),
    ("pool_waits", {"async/trainer_wait_share": constant(0.7)}, {}),
    ("stale_samples", {"async/stale_groups": constant(30.0)}, {}),
    ("memory", {"perf/max_memory_allocated_gb": constant(72.0)}, {}),  # GiB: 77.3 GB
    ("memory_beyond_plan", {"perf/max_memory_allocated_gb": constant(60.0)}, {"plan": PLAN | {"memory_gb": {"update": 50.0}}}),
    ("slow_phase", {"timing_s/gen": noisy(lambda t: 150, 2), "timing_s/step": noisy(lambda t: 200, 2)}, {}),
    ("audit", {"audit/data_order": lambda step: 3.0, "audit/weights": lambda step: 0.0}, {}),
    ("run_failed", {}, {"status": RUNNING | {"state": "failed", "reason": "No space left on device"}}),
    ("run_hung", {}, {"status": RUNNING | {"state": "failed", "reason": HUNG}}),
    ("run_stopped", {}, {"status": RUNNING | {"state": "stopped", "reason": "stopped by the user"}}),
    ("run_killed", {}, {"is_alive": False, "now": 1020.0}),
    ("no_sign_of_life", {}, {"now": 1100.0}),
    ("stalled", {}, {"status": RUNNING | {"stuck": "no progress in 'rewards' for 700 s: the reward f has not answered"}}),
    ("restarts", {}, {"status": RUNNING | {"restarts": [{"time": 900.0, "step": 7, "cause": "rank 1 died"}, 3]}}),
    ("stalled", {}, {"status": RUNNING | {"phases": [[{"name": "generate", "began": 700.0}]]}}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "columns", "changes"), FAULTS, ids=[rule for rule, *_ in FAULTS])
def test_a_planted_fault_is_the_only_finding(rule: str, columns: dict[str, Column], changes: dict[str, Any]) -> None:
    (found,) = findings(view(HEALTHY | columns, **changes))
    assert found.rule == rule
    assert found.text.endswith((".", "device", "user")) and re.search(r"\d|user|device", found.text)
    assert set(found.metrics[:1]) <= {*HEALTHY, *columns}


SUPERVISED_FAULTS: list[tuple[str, dict[str, Column]]] = [
    ("loss_flat", {"train/loss": noisy(lambda t: 2.0, 0.05)}),
    ("overfitting", {"val/loss": lambda step: 1 + abs(step - 100) / 100}),
    ("gradient_spikes", {"train/grad_norm": lambda step: 400.0 if step % 30 == 0 else 1.0}),
    ("non_finite", {"train/loss": lambda step: math.inf if step == 200 else 2 - step / 200}),
]


@pytest.mark.parametrize(("rule", "columns"), SUPERVISED_FAULTS)
def test_faults_of_supervised_runs(rule: str, columns: dict[str, Column]) -> None:
    assert list(rules_of(view(SUPERVISED | columns))) == [rule]


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_that_falls_early_and_then_rests_says_nothing(seed: int) -> None:
    early = {"train/loss": noisy(lambda t: 1.6 + 0.6 * math.exp(-100 * t), 0.02, seed=seed)}
    assert findings(view(SUPERVISED | early)) == []


def test_a_hang_and_an_audit_say_where() -> None:
    (found,) = findings(view(HEALTHY, status=RUNNING | {"state": "failed", "reason": HUNG}))
    assert (
        found.title == "The run was stuck in 'rewards 1/4'"
        and "the reward f has not answered (report: run/" in found.text
    )
    assert found.advice.endswith("resume from its last checkpoint, run/global_step_1.")
    (found,) = findings(view(HEALTHY | {"audit/finite": lambda step: 1.0}, audit_dumps=["run/audits/step_5_finite"]))
    assert found.advice.endswith("`lockstep replay` computes it again: run/audits/step_5_finite.")


def test_numbers_and_evidence() -> None:
    cut = rules_of(view(HEALTHY | {"response_length/clip_ratio": constant(0.35)}))["responses_cut"]
    assert cut.severity == "bad" and cut.title == "35 % of the responses are cut"
    assert "data.max_response_length=512" in cut.text and cut.rollouts == {"stop": "length"} and cut.steps == (191, 200)
    tools = rules_of(
        view(HEALTHY | {"tool_error_counts/mean": constant(2 / 3), "tool_call_counts/mean": constant(2.0)})
    )
    assert tools["tools_fail"].title == "33 % of the tool calls fail" and tools["tools_fail"].rollouts == {
        "problem": "tool_error"
    }
    without_dumps = view(HEALTHY | {"response_length/clip_ratio": constant(0.35)}, settings={"trainer": {}})
    assert rules_of(without_dumps)["responses_cut"].rollouts is None
    memory = rules_of(view(HEALTHY | {"perf/max_memory_allocated_gb": constant(72.0)}))["memory"]
    assert "77.3 of 80 GB (97 %)" in memory.text


def test_a_solved_task_is_only_a_note() -> None:
    solved = {
        "critic/score/mean": lambda step: min(0.995, 0.5 + step / 100),
        "val-core/math/acc/mean@4": constant(0.98),
    }
    found = rules_of(view(HEALTHY | solved))
    assert found["reward_saturated"].severity == "info" and list(found) == ["reward_saturated"]


def found_for(score: Callable[[float], float], acc: Callable[[float], float], **more: Column) -> dict[str, Finding]:
    columns = {"critic/score/mean": noisy(score, 0.005), "reward/acc/mean": noisy(acc, 0.005)}
    return rules_of(view(HEALTHY | columns | more))


def test_a_reward_that_is_not_the_accuracy() -> None:
    found = found_for(lambda t: 0.1 + 0.5 * t, lambda t: 0.02)["reward_without_accuracy"]
    assert found.severity == "bad" and found.title == "The reward rises without the accuracy"
    assert found.metrics == ("critic/score/mean", "reward/acc/mean") and found.rollouts == {"sort": "reward"}
    exact = {"critic/score/mean": lambda step: 0.1 + step / 400, "reward/acc/mean": constant(0.02)}
    assert rules_of(view(HEALTHY | exact))["reward_without_accuracy"].text == (
        "The mean score was 0.108 in the first steps and is 0.589 in the last 10 (scores are from 0 to 1), "
        "while reward/acc/mean was 0.02 and is 0.02."
    )
    falls = found_for(lambda t: 0.75, lambda t: 0.6 - 0.4 * t)["reward_without_accuracy"]
    assert falls.title == "The accuracy falls, and the reward does not"


@pytest.mark.parametrize(
    ("score", "acc"),
    [
        (lambda t: 0.5 * min(1, 4 * t) + 0.5 * (0.1 + 0.5 * t), lambda t: 0.1 + 0.5 * t),  # a bonus for the format
        (lambda t: 0.8 + 0.1 * t, lambda t: 0.3 + 0.2 * t),  # larger from the start
        (lambda t: min(0.9, 0.2 + 1.4 * t), lambda t: max(0.02, 0.4 * (t - 0.6))),  # the format first, answers later
        (lambda t: 0.1 + 0.25 * t, lambda t: 0.05),  # a small gap
    ],
)
def test_a_reward_that_is_larger_by_design_says_nothing(
    score: Callable[[float], float], acc: Callable[[float], float]
) -> None:
    assert "reward_without_accuracy" not in found_for(score, acc)


def test_scores_of_other_scales_are_compared_as_shares() -> None:
    """-1 and 1 for wrong and right; and up to 10 for right answers."""
    ends = {"critic/score/min": constant(-1.0)}
    assert found_for(lambda t: 1.6 * t - 0.8, lambda t: 0.1 + 0.8 * t, **ends) == {}
    ends = {"critic/score/max": constant(10.0)}
    assert found_for(lambda t: 1 + 2 * t, lambda t: 0.1, **ends) == {}


def test_the_accuracy_of_the_validation_if_training_has_none() -> None:
    hacked = HEALTHY | {"val-core/math/acc/mean@4": constant(0.01)}
    assert rules_of(view(hacked))["reward_without_accuracy"].metrics[1] == "val-core/math/acc/mean@4"


def test_prompts_are_not_called_easy_if_answers_are_wrong() -> None:
    wrong = {"reward/acc/mean": constant(0.01), "critic/score/zero_variance_groups": constant(0.9)}
    high = rules_of(view(HEALTHY | wrong | {"critic/score/mean": constant(0.99)}))
    assert list(high) == ["reward_saturated"] and high["reward_saturated"].severity == "warning"
    assert "few answers are right" in high["reward_saturated"].title
    equal = found_for(lambda t: 0.8 + 0.1 * t, lambda t: 0.01, **{"critic/score/zero_variance_groups": constant(0.9)})
    for found in (high["reward_saturated"], equal["equal_groups"]):
        assert found.advice == reward.REWARD_HACK and "harder" not in found.advice


def test_the_worst_comes_first() -> None:
    columns = {
        "response_length/clip_ratio": constant(0.2),
        "tool_error_counts/mean": constant(1.0),
        "async/trainer_wait_share": constant(0.8),
    }
    assert [found.severity for found in findings(view(HEALTHY | columns))] == ["bad", "warning", "info"]


def test_equal_groups_do_not_matter_to_a_critic() -> None:
    columns = HEALTHY | {"critic/score/zero_variance_groups": constant(0.9)}
    assert "equal_groups" in rules_of(view(columns))
    assert set(reward.WITHOUT_GROUPS) <= set(AdvantageEstimator)
    for name in reward.WITHOUT_GROUPS:
        assert "equal_groups" not in rules_of(view(columns, settings={"algorithm": {"adv_estimator": name}}))


def test_states() -> None:
    read: Callable[[str], Series] = lambda name: Series([], [])  # noqa: E731
    run = RunView(read, status=RUNNING, now=1010.0)
    assert state_of(run) == "running"
    assert state_of(dataclasses.replace(run, is_alive=False)) == "running"  # within the time of a heartbeat
    assert state_of(dataclasses.replace(run, is_alive=False, now=1020.0)) == "killed"
    assert state_of(dataclasses.replace(run, now=1061.0)) == "silent"
    assert state_of(dataclasses.replace(run, status={"state": "finished"}, now=1e9)) == "finished"
    assert state_of(dataclasses.replace(run, status=None)) == "unknown"


def test_phases_of_a_validation_are_not_compared_with_those_of_training() -> None:
    def found(testing_s: float) -> dict[str, Finding]:
        nested = [{"name": "validation", "began": 700.0}, {"name": "generate", "began": 701.0}]
        columns = HEALTHY | {"timing_s/testing": constant(testing_s)}
        return rules_of(view(columns, status=RUNNING | {"phases": [nested, [{"name": "rewards", "began": 701.0}]]}))

    assert found(testing_s=280.0) == {}
    assert found(testing_s=20.0)["stalled"].title == "The run is stuck in “validation”"


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"state": 7, "time": "x"},
        {"state": "running", "time": 1000.0, "restarts": {"a": 1}},
        {"state": "running", "time": None, "phases": 3},
        {
            "state": "running",
            "time": 1000,
            "phases": [3, [{"name": None, "began": "x", "total": "y"}, 5], []],
            "step": "x",
        },
        {"state": "failed", "reason": {"a": 1}, "step": [], "total_steps": float("nan")},
        {"state": ["running"], "time": float("inf")},
    ],
)
def test_a_damaged_status_raises_nothing(status: dict[str, Any]) -> None:
    run = view(
        HEALTHY,
        status=status,
        plan={"seconds": 5, "memory_gb": {"a": "b"}, "gpu_memory_gb": "x"},
        settings={"data": 3, "trainer": None},
    )
    findings(run)
    assert all(isinstance(row["name"], str) for own in phases_of(status) for row in own)


def test_trend_against_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(0)
    values = [0.01 * i + rng.gauss(0, 0.1) for i in range(50)]
    (slope, _), covariance = numpy.polyfit(range(50), values, 1, cov=True)
    found = trend(values)
    assert found.change == pytest.approx(49 * slope)
    assert found.error >= 49 * math.sqrt(covariance[0, 0]) * 0.999  # alike neighbours only widen it
    assert trend([1.0] * 10) == (0.0, 0.0)


def texts() -> Iterator[Finding]:
    for _, columns, changes in FAULTS:
        yield from findings(view(HEALTHY | columns, **changes))
    for _, columns in SUPERVISED_FAULTS:
        yield from findings(view(SUPERVISED | columns))


def test_advice_names_existing_keys_and_pages() -> None:
    known = {*flat_values(PPOConfig()), *flat_values(SFTConfig())}
    roots = {key.split(".")[0] for key in known}
    for finding in texts():
        for key in re.findall(r"(?<![\w/])([a-z_]+(?:\.[a-z_]+)+)(?!\w)", finding.advice + finding.text):
            if key.split(".")[0] in roots:
                assert any(each == key or each.startswith(f"{key}.") for each in known), f"{finding.rule}: {key}"
        page, _, anchor = finding.docs.partition("#")
        content = (DOCS / page).read_text()
        headings = {
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
            for line in content.splitlines()
            if line.startswith("#")
        }
        assert not anchor or anchor in headings


def test_every_rule_is_tested_and_documented() -> None:
    planted = {rule for rule, *_ in FAULTS} | {rule for rule, _ in SUPERVISED_FAULTS}
    assert len(planted) >= len(RULES)
    assert set(PHASES.values()) <= set(TIMERS)
