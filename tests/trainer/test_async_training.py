"""Asynchronous training end to end: the modes, staleness, resuming, stop signals and validation."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.group_sampler import GroupSampler
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.rollout_sources.journal import read_events, trained_groups
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.run.interrupt import Interrupt
from lockstep.workers.rollout_client import RolloutClient
from tests.programs import Program

pytestmark = pytest.mark.first

ROLLOUT = "actor_rollout_ref.rollout"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.val_before_train=false"]
SPLIT = ["trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2"]
"""Actor and rollout in two threads of this process."""
MODES = {
    "colocated": ["trainer.async_mode=colocated"],
    "one_step_off": ["trainer.async_mode=one_step_off", *SPLIT],
    "fully_async": ["trainer.async_mode=fully_async", *SPLIT],
}
LONG_TAIL = ["data.max_response_length=24", f"{ROLLOUT}.max_num_seqs=5"]
"""Five sequences at a time: when a step has enough groups, others are half done."""
PER_STEP = 4


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")


def assert_each_group_is_trained_on_once(run: Path, steps: int) -> None:
    """From the journal: all groups of the batches that were drawn, and each in one step."""
    trained = trained_groups(run)
    assert list(trained) == list(range(1, steps + 1))
    ids = [group for groups in trained.values() for group in groups]
    assert sorted(ids) == [(batch, row) for batch in range(1, steps + 1) for row in range(PER_STEP)]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[DataProto]:
    """The batches that steps train on."""
    found: list[DataProto] = []
    train_step = PPOTrainer._train_step

    def recorded(self: PPOTrainer, *args: Any) -> tuple[DataProto, dict[str, Any]]:
        batch, metrics = train_step(self, *args)
        found.append(batch)
        return batch, metrics

    monkeypatch.setattr(PPOTrainer, "_train_step", recorded)
    return found


@pytest.fixture(scope="module")
def synchronous(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from tests.tiny import small_run

    run = tmp_path_factory.mktemp("synchronous")
    settings = [*small_run(tiny_run_files), *GRPO, "trainer.test_freq=2", f"trainer.default_local_dir={run}"]
    assert main([*settings, "trainer.total_training_steps=4"]) == 0
    return run


@pytest.mark.parametrize("mode", MODES)
def test_without_staleness_training_is_bit_identical(
    synchronous: Path, overrides: list[str], tmp_path: Path, mode: str
) -> None:
    settings = [*overrides, *GRPO, *MODES[mode], "trainer.test_freq=2", "trainer.total_training_steps=4"]
    assert main([*settings, "trainer.max_staleness=0"]) == 0
    mine, theirs = weights_of(tmp_path / "run", 4), weights_of(synchronous, 4)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for row, expected in zip(metrics_of(tmp_path / "run"), metrics_of(synchronous), strict=True):
        assert row.get("async/staleness/max") == 0
        names = [name for name in expected if name.startswith(("actor/", "critic/", "val-", "response_length/"))]
        assert names and {name: row[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.parametrize("mode", MODES)
def test_stale_samples_are_bounded_corrected_and_trained_on_once(
    overrides: list[str], tmp_path: Path, batches: list[DataProto], mode: str
) -> None:
    settings = [*MODES[mode], *LONG_TAIL, "trainer.test_freq=2", "trainer.total_training_steps=5"]
    assert main([*overrides, *GRPO, *settings]) == 0
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 6))
    stalest = max(row["async/staleness/max"] for row in rows)
    assert stalest == 1 if mode == "one_step_off" else stalest <= 1
    assert all("rollout_corr/rollout_is_mean" in row for row in rows), "importance weights are on by default"
    assert all("val-core/openai/gsm8k/reward/mean@1" in row for row in rows if row["step"] in (2, 4, 5))
    assert all(0 <= row[f"async/{side}_wait_share"] <= 1 for row in rows for side in ("trainer", "rollout"))
    assert_each_group_is_trained_on_once(tmp_path / "run", steps=5)
    fresh_gap = stale_gap = 0.0
    for update, batch in enumerate(batches):
        versions, mask = batch.tensors["policy_versions"], batch.tensors["response_mask"].bool()
        assert torch.equal(versions >= 0, mask)
        assert torch.equal(versions[:, 0], batch.tensors["policy_version"])
        gap = (batch.tensors["rollout_log_probs"] - batch.tensors["old_log_probs"]).abs()
        fresh_gap = max(fresh_gap, _max(gap[versions == update]))
        stale_gap = max(stale_gap, _max(gap[mask & (versions < update)]))
    assert fresh_gap < 1e-4, "a token has the log-prob of the policy that its version names"
    assert stale_gap > 1e-4 or stalest == 0
    assert mode != "one_step_off" or all(row["async/mixed_policy_share"] == 0 for row in rows)
    ahead = [row["async/queue_length"] + row["async/running_groups"] for row in rows]
    assert ahead == [PER_STEP] * 4 + [0], "one batch ahead, and none after the last step"


def test_responses_go_on_with_the_new_weights(
    overrides: list[str], tmp_path: Path, batches: list[DataProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is slow, so that responses are unfinished when the step has enough groups."""
    advance = RolloutClient._advance

    def slow(self: RolloutClient, *args: Any) -> Any:
        time.sleep(0.3)
        return advance(self, *args)

    monkeypatch.setattr(RolloutClient, "_advance", slow)
    assert main([*overrides, *GRPO, *MODES["colocated"], *LONG_TAIL, "trainer.total_training_steps=2"]) == 0
    assert metrics_of(tmp_path / "run")[1]["async/mixed_policy_share"] > 0
    versions, tensors = batches[1].tensors["policy_versions"], batches[1].tensors
    mixed = (versions == 0).any(-1) & (versions == 1).any(-1)
    gap = (tensors["rollout_log_probs"] - tensors["old_log_probs"]).abs()[mixed]
    assert _max(gap[versions[mixed] == 1]) < 1e-4 < _max(gap[versions[mixed] == 0])


def _max(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def test_stale_groups_can_be_dropped(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One response never ends: its group is dropped, and its request aborted, when it is two updates old."""
    sample = GroupSampler.sample

    async def stuck(self: GroupSampler, *args: Any, step: int, draw: int, number: int) -> DataProto:
        if (step, number) == (1, 2):
            await asyncio.sleep(1000)
        return await sample(self, *args, step=step, draw=draw, number=number)

    monkeypatch.setattr(GroupSampler, "sample", stuck)
    settings = [*MODES["colocated"], "trainer.stale_samples=drop", "trainer.total_training_steps=4"]
    assert main([*overrides, *GRPO, *settings]) == 0
    rows, events = metrics_of(tmp_path / "run"), list(read_events(tmp_path / "run"))
    assert [row["async/stale_groups"] for row in rows] == [0, 0, 1, 0]
    dropped = [event for event in events if event["event"] == "drop"]
    assert dropped == [{"event": "drop", "group": (1, 2), "step": 3, "reason": "stale"}]
    trained = [group for groups in trained_groups(tmp_path / "run").values() for group in groups]
    assert len(set(trained)) == len(trained) == 4 * PER_STEP and (1, 2) not in trained


def test_filtered_groups_are_replaced(overrides: list[str], tmp_path: Path, batches: list[DataProto]) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
    )
    rewards = f"custom_reward_function.path={tmp_path}/reward.py"
    settings = [*MODES["colocated"], rewards, "algorithm.filter_groups.enable=true", "trainer.total_training_steps=3"]
    assert main([*overrides, *GRPO, *settings]) == 0
    assert sum(row["async/filtered_groups"] for row in metrics_of(tmp_path / "run")) > 0
    for batch in batches:
        scores = batch.tensors["token_level_scores"].sum(-1).view(PER_STEP, 2)
        assert (scores[:, 0] != scores[:, 1]).all()
        assert len(set(batch.non_tensor_batch["uid"])) == PER_STEP


def test_killed_and_resumed_run_loses_and_repeats_nothing(overrides: list[str], tmp_path: Path) -> None:
    run, settings = (
        tmp_path / "run",
        ["trainer.save_freq=2", "trainer.max_staleness=2", "trainer.total_training_steps=6"],
    )
    command = [*overrides, *GRPO, *MODES["fully_async"], *LONG_TAIL, *settings]
    program = Program("lockstep.trainer.main_ppo", command, tmp_path)
    assert program.until(lambda: 4 in trained_groups(run)), program.stderr
    program.signal(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    saved = max(int(folder.name.rsplit("_", 1)[1]) for folder in run.glob("global_step_*"))
    assert main(command) == 0
    events = list(read_events(run))
    assert [event["step"] for event in events if event["event"] == "resume"] == [saved]
    assert_each_group_is_trained_on_once(run, steps=6)
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 7))
    assert max(row["async/staleness/max"] for row in metrics_of(run)) <= 2


def run_until(config: PPOConfig, stop_after: int | None = None) -> int:
    runner = TaskRunner()
    runner.on_step = lambda step, metrics: step == stop_after
    return runner.run(config)


def test_stopped_run_goes_on_with_the_samples_it_has(overrides: list[str], tmp_path: Path) -> None:
    settings = [*overrides, *GRPO, *MODES["colocated"], "trainer.save_freq=1", "trainer.total_training_steps=2"]
    config, run = load_config(PPOConfig, settings), tmp_path / "run"
    assert run_until(config, stop_after=1) == 130
    made = [event["group"] for event in read_events(run) if event["event"] == "finish"]
    assert set(made) > set(trained_groups(run)[1]), "groups of the second step finished in the first"
    assert run_until(config) == 0
    assert [event["group"] for event in read_events(run) if event["event"] == "finish"] == made
    assert_each_group_is_trained_on_once(run, steps=2)


def test_a_run_goes_on_with_a_damaged_journal(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [*overrides, *GRPO, *MODES["colocated"], "trainer.save_freq=1", "trainer.total_training_steps=2"]
    config, run = load_config(PPOConfig, settings), tmp_path / "run"
    assert run_until(config, stop_after=1) == 130
    file = run / "rollout_journal/journal.jsonl"
    lines = file.read_bytes().split(b"\n")
    number = next(number for number, line in enumerate(lines) if b'"finish"' in line)
    file.write_bytes(b"\n".join([*lines[:number], b'{"event": "fin#', *lines[number + 1 :]]))
    assert run_until(config) == 0
    assert f"{file}, line {number + 1} is damaged" in caplog.text
    assert_each_group_is_trained_on_once(run, steps=2)


def test_step_that_a_stop_discards_loses_no_prompt(overrides: list[str], tmp_path: Path) -> None:
    settings = [*overrides, *GRPO, *MODES["one_step_off"], *LONG_TAIL, "trainer.total_training_steps=4"]
    config, run = load_config(PPOConfig, settings), tmp_path / "run"
    assert run_until(config, stop_after=2) == 130
    assert (run / "global_step_2").is_dir()
    assert run_until(config) == 0
    assert_each_group_is_trained_on_once(run, steps=4)


@pytest.mark.parametrize("frequency", ["test_freq=-1", "test_freq=2"])
def test_a_resumed_run_reports_the_weights_that_it_sends(overrides: list[str], tmp_path: Path, frequency: str) -> None:
    """Weights of a step are sent in the next one, or before its validation."""
    settings = [*overrides, *GRPO, *MODES["one_step_off"], f"trainer.{frequency}", "trainer.total_training_steps=4"]
    runs = [f"trainer.default_local_dir={tmp_path}/{name}" for name in ("whole", "stopped")]
    whole, stopped = (load_config(PPOConfig, [*settings, run]) for run in runs)
    assert run_until(whole) == 0
    assert (run_until(stopped, stop_after=2), run_until(stopped)) == (130, 0)
    names = [
        [{name for name in row if name.startswith("weight_sync/")} for row in metrics_of(tmp_path / run)]
        for run in ("whole", "stopped")
    ]
    assert names[0] == names[1] and len(names[0][2]) == 4


def test_stop_while_prompts_are_drawn_loses_none(
    overrides: list[str], tmp_path: Path, batches: list[DataProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes within the second step, before it draws prompts; four steps are one epoch."""
    settings = [*overrides, *GRPO, *MODES["colocated"], "trainer.save_freq=-1", "trainer.total_training_steps=4"]
    config, run = load_config(PPOConfig, settings), tmp_path / "run"
    interrupt, train_step = Interrupt(), PPOTrainer._train_step

    def stopping(self: PPOTrainer, *args: Any) -> tuple[DataProto, dict[str, Any]]:
        interrupt.requested |= self.global_steps == 2
        return train_step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "_train_step", stopping)
        assert TaskRunner().run(config, interrupt) == 130
    assert list(trained_groups(run)) == [1]
    assert run_until(config) == 0
    rows = [row for batch in batches for row in batch.non_tensor_batch["index"][::2]]
    assert sorted(rows) == list(range(4 * PER_STEP))


def test_ctrl_c_stops_after_the_step(overrides: list[str], tmp_path: Path) -> None:
    run, command = tmp_path / "run", [*overrides, *GRPO, *MODES["fully_async"], "trainer.total_training_steps=8"]
    program = Program("lockstep.trainer.main_ppo", command, tmp_path)
    assert program.until(lambda: 2 in trained_groups(run)), program.stderr
    program.signal(signal.SIGINT)
    assert program.wait() == 130
    saved = max(int(folder.name.rsplit("_", 1)[1]) for folder in run.glob("global_step_*"))
    assert f"stopped by the user after step {saved}" in program.stderr + program.stdout
    assert list(trained_groups(run)) == list(range(1, saved + 1))


def test_failure_of_a_background_sample_ends_the_run(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("the engine is broken")

    monkeypatch.setattr(RolloutClient, "_advance", fail)
    assert main([*overrides, *GRPO, *MODES["fully_async"]]) == 1
    assert "the engine is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.async_mode=one_step_off"], "trainer.placement=split and trainer.n_gpus_per_node=2"),
        (["trainer.async_mode=fully_async"], "trainer.placement=split and trainer.n_gpus_per_node=2"),
        (["trainer.async_mode=colocated", *SPLIT[1:]], "set one_step_off or fully_async"),
        ([*MODES["one_step_off"], "trainer.max_staleness=2"], "set 1, or trainer.async_mode=fully_async"),
        ([*MODES["colocated"], f"{ROLLOUT}.mode=sync"], "generates by single requests; set async"),
        ([*MODES["colocated"], f"{ROLLOUT}.over_sample_rate=0.1"], "instead of aborting them; set 0"),
        ([*MODES["colocated"], "trainer.max_staleness=-1"], "must be 0 or more"),
        ([*MODES["colocated"], f"{ROLLOUT}.calculate_log_probs=false"], f"{ROLLOUT}.calculate_log_probs=true"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: list[str], settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_config(PPOConfig, [*overrides, *GRPO, *settings])


def test_importance_sampling_is_on_by_default_and_can_be_turned_off(overrides: list[str]) -> None:
    def rollout_is(*settings: str) -> str | None:
        config = load_config(PPOConfig, [*overrides, *GRPO, *settings])
        return config.algorithm.rollout_correction.rollout_is

    assert rollout_is() is None
    assert rollout_is("trainer.async_mode=colocated") == "token"
    assert rollout_is("trainer.async_mode=colocated", "algorithm.rollout_correction.rollout_is=null") is None
    assert rollout_is("trainer.async_mode=colocated", "trainer.max_staleness=0") is None
