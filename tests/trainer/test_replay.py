"""`lockstep replay`: steps are equal bit for bit, changes and differences of runs are localised, wrong input is refused."""

import json
import logging
import math
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep import cli
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import set_in, with_values
from lockstep.protocol import DataProto
from lockstep.rewards.model_judge import AnswerCache
from lockstep.trainer.main_ppo import run_ppo
from lockstep.trainer.ppo.batch_dump import DumpInfo, write_dump
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.replay.compare import (
    compare_dumps,
    compare_metrics,
    first_different_steps,
    row_changes,
    tensor_changes,
)
from lockstep.trainer.replay.main_replay import OnceFilter
from lockstep.trainer.replay.recording import (
    Digest,
    ModelRecord,
    Recording,
    Update,
    items,
    read_recording,
    write_recording,
)
from lockstep.trainer.replay.replay import replayed_config
from lockstep.trainer.replay.source_run import SourceRun, config_from
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.observer import StepObserver
from tests import replays
from tests.replays import replayed, train

SHORT = ["trainer.total_training_steps=7", "actor_rollout_ref.actor.ppo_epochs=1", "trainer.test_freq=-1"]
COEF = "actor_rollout_ref.actor.kl_loss_coef"


PAGE = Path(__file__).parents[2] / "docs" / "replay.md"


def of_page(number: int, first: Path, second: Path | None = None) -> list[str]:
    """The arguments of a command of docs/replay.md, all of which are run by a test."""
    commands = re.findall(r"```bash\n(.*)\n```", PAGE.read_text())
    assert len(commands) == 3
    program, *words = shlex.split(
        commands[number].replace("$RUN/first", str(first)).replace("$RUN/second", str(second))
    )
    assert program == "lockstep"
    return words


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return replays.write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO with a KL loss and two mini-batches: 7 steps, of which 5 is saved, with the tokens of its rollouts."""
    folder = tmp_path_factory.mktemp("runs") / "grpo"
    return train("grpo", files, folder, *SHORT)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run to tamper with; its dumps are those of the original."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def edit_settings(run: Path, key: str, value: Any) -> None:
    """In the configs of a run's starts."""
    for path in [run / "config.yaml", *(run / "configs").iterdir()]:
        tree = yaml.safe_load(path.read_text())
        set_in(tree, key, value)
        path.write_text(yaml.safe_dump(tree))


def test_a_step_is_equal_and_the_run_untouched(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(run)
    code = cli.main(of_page(0, run))
    out = capsys.readouterr().out
    assert code == 0 and "computing steps 6-7 from global_step_5" in out, out
    assert "metrics equal bit for bit" in out and "differ" not in out and "7.jsonl: equal" in out
    assert "step 7 is equal" in out
    assert listing(run) == before


@pytest.mark.slow
def test_other_numbers_in_the_log_are_named(copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert row["step"] == 1
    row |= {"actor/grad_norm": row["actor/grad_norm"] + 2e-7, "timing_s/step": 99.0, "extra/metric": 1}
    (copy / "metrics.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    dump = copy / "rollouts" / "1.jsonl"
    edit_settings(copy, "trainer.rollout_data_dir", str(copy / "rollouts"))
    dump.write_text(dump.read_text().replace('"score": 0.', '"score": 1.', 1))
    code, out = replayed(copy, 1)
    assert code == 1 and "from the start of the run" in out, out
    assert "2 differ" in out and "actor/grad_norm" in out and "extra/metric" in out and "timing_s" not in out
    assert "1.jsonl: 1 rows differ" in out and "in score" in out and "step 1 is different" in out


@pytest.mark.slow
def test_a_changed_coefficient_is_localised_to_the_loss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(run)
    code = cli.main(of_page(1, run))
    out = capsys.readouterr().out
    assert code == 1 and f"{COEF}: 0.01 -> 0.2" in out, out
    assert "rows: all equal" in out
    assert "first difference: loss: loss of the actor, update 1:" in out
    assert "stages that differ: loss -> gradient -> weights" in out
    assert listing(run) == before


@pytest.mark.slow
def test_changed_sampling_changes_rows(run: Path) -> None:
    code, out = replayed(run, 6, "--set", "actor_rollout_ref.rollout.seed=5", "--all")
    assert code == 1 and "part at 0" in out and "first difference: generation: responses:" in out, out
    assert "generation -> rewards -> old log-probs -> reference log-probs -> advantages -> loss -> gradient" in out


@pytest.mark.slow
def test_runs_part_where_a_resumed_one_got_another_coefficient(
    run: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    shutil.rmtree(other / "global_step_7")
    train("grpo", files, other, *SHORT, f"{COEF}=0.5")
    capsys.readouterr()
    assert cli.main(of_page(2, run, other)) == 1
    out = capsys.readouterr().out
    assert "the metrics first differ at step 6" in out and f"{COEF}  0.01  0.5" in out, out
    assert "first difference: loss: loss of the actor, update 1:" in out
    # replaying the changed step from the checkpoint before the change uses the changed config
    assert replayed(other, 6)[0] == 0
    assert cli.main(["replay", str(run), "--until-first-difference", str(run)]) == 0
    assert "the metrics of all 7 common steps are equal" in capsys.readouterr().out
    # without the checkpoint at which the settings changed, steps after it cannot be computed again
    shutil.rmtree(other / "global_step_5")
    assert cli.main(["replay", str(other), "--step", "7"]) == 2
    error = capsys.readouterr().err
    assert f"{COEF} changed between step 0 and step 7" in error and "can be replayed: 1-5" in error


class Keeper(StepObserver):
    """Keeps the batch of step 6 as an audit does: as it is, and with a score that is not a number."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def updating(self, trainer: PPOTrainer, batch: DataProto) -> None:
        if trainer.global_steps != 6:
            return
        info = DumpInfo("advantages", "planted", 6, trainer.num_updates, "global_step_5")
        assert write_dump(self.run, batch, info) is not None
        broken = batch.select(deepcopy=True)
        broken.tensors["token_level_scores"] = torch.full_like(batch.tensors["token_level_scores"], math.nan)
        assert write_dump(self.run, broken, replace(info, audit="finite")) is not None
        assert write_dump(self.run, broken, replace(info, audit="rollout_gap")) is not None
        assert write_dump(self.run, batch, replace(info, audit="gradient")) is not None


@pytest.mark.slow
def test_the_update_of_a_dumped_batch(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Keeping(TaskRunner):
        def build(self, config: Any) -> PPOTrainer:
            trainer = super().build(config)
            trainer.observer = Keeper(copy)
            return trainer

    shutil.rmtree(copy / "global_step_7")
    config: Any = config_from(copy / "config.yaml")
    assert run_ppo(replace(config, trainer=replace(config.trainer, default_local_dir=str(copy))), Keeping) == 0
    capsys.readouterr()
    dumps = copy / "audits"
    assert cli.main(["replay", str(dumps / "step_6_finite")]) == 1
    out = capsys.readouterr().out
    assert "audit finite at step 6: planted" in out and "computing step 6 from global_step_5" in out, out
    assert "found again" in out and "not finite" in out and "batch is kept" not in out and "ended early" not in out
    assert cli.main(["replay", str(dumps / "step_6_advantages")]) == 0
    assert "not found again" in capsys.readouterr().out
    assert cli.main(["replay", str(dumps / "step_6_rollout_gap")]) == 4
    assert "it ended at step 6 with another finding: " in capsys.readouterr().out
    assert cli.main(["replay", str(dumps / "step_6_gradient")]) == 4
    assert "audit gradient compares with what only the run had" in capsys.readouterr().out
    assert cli.main(["replay", str(dumps / "step_6_finite"), "--step", "6"]) == 2
    shutil.rmtree(copy / "global_step_5")
    assert cli.main(["replay", str(dumps / "step_6_finite")]) == 2
    assert "global_step_5, from which step 6 was computed, has been removed" in capsys.readouterr().err


def no_optimizer(run: Path) -> None:
    edit_settings(run, "actor_rollout_ref.actor.checkpoint.save_contents", ["model"])
    for checkpoint in run.glob("global_step_*"):
        shutil.copy(run / "config.yaml", checkpoint)
    (run / "configs" / "001_step_0.yaml").rename(run / "configs" / "001_step_2.yaml")


def other_data(run: Path) -> None:
    rows = run / "rows.parquet"
    config = yaml.safe_load((run / "config.yaml").read_text())
    shutil.copy(config["data"]["val_files"][0], rows)
    edit_settings(run, "data.train_files", [str(rows)])


def damaged(run: Path) -> None:
    file = next((run / "global_step_5" / "actor").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def own_code(run: Path) -> None:
    edit_settings(run, "custom_reward_function.path", str(run / "reward.py"))
    (run / "reward.py").write_text("raise SystemExit('this was run')")


def servers(run: Path) -> None:
    edit_settings(run, "actor_rollout_ref.rollout.server.urls", ["http://127.0.0.1:9"])
    edit_settings(run, "actor_rollout_ref.rollout.server.reload_command", "restart {url}")


def nothing(run: Path) -> None:
    pass


URLS = "rollout.server.urls=[http://127.0.0.1:8]"


@pytest.mark.parametrize(
    ("tamper", "arguments", "problem"),
    [
        (shutil.rmtree, ["--step", "1"], "no such folder; give the folder of a run"),
        (lambda run: (run / "metrics.jsonl").unlink(), ["--step", "1"], "not the folder of a training run"),
        (nothing, [], "say which step: --step N"),
        (nothing, ["--step", "12"], "--step 12: {run} has no such training step; it has 1-7"),
        (nothing, ["--step", "0"], "no such training step"),
        (nothing, ["--step", "6", "--set", "actor_rollout_ref.actor.kl_los_coef=1"], "kl_loss_coef"),
        pytest.param(*(nothing, ["--step", "6", "--set", f"{COEF}"], "cannot be parsed"), marks=pytest.mark.slow),
        pytest.param(*(nothing, ["--step", "6", "--set", f"{COEF}=high"], COEF), marks=pytest.mark.slow),
        (nothing, ["--step", "6", "--until-first-difference", "{run}"], "leave --step and --set out"),
        (nothing, ["--until-first-difference", "{run}/none"], "no such folder"),
        (no_optimizer, ["--step", "7"], "global_step_5 has no extra and no optimizer"),
        (other_data, ["--step", "7"], "rows.parquet is new"),
        pytest.param(*(other_data, ["--step", "1"], "the data of the run has changed since"), marks=pytest.mark.slow),
        (damaged, ["--step", "7"], "is damaged"),
        (lambda run: edit_settings(run, "trainer.async_mode", "colocated"), ["--step", "6"], "depends on timing"),
        (own_code, ["--step", "6"], "a replay runs no code from the run's own folder"),
        (servers, ["--step", "6"], "would get the weights of the replay; start others"),
        pytest.param(
            *(servers, ["--step", "6", "--set", URLS], "rollout.server.reload_command=COMMAND"),
            marks=pytest.mark.slow,
        ),
        (lambda run: edit_settings(run, "trainer.bogus", 1), ["--step", "6"], "trainer.bogus"),
        (lambda run: (run / "configs" / "001_step_0.yaml").write_text("[1"), ["--step", "6"], "cannot be read"),
    ],
)
def test_wrong_input_is_refused(
    copy: Path,
    tamper: Callable[[Path], object],
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tamper(copy)
    assert cli.main(["replay", str(copy), *(word.format(run=copy) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lockstep replay: ") and problem.format(run=copy) in error, error


def test_messages_come_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("replay")
    logger.addFilter(OnceFilter())
    for number in (1, 1, 2):
        logger.warning("no GPU: %d", number)
    assert caplog.messages == ["no GPU: 1", "no GPU: 2"]


def test_help_lists_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", "--help"])
    assert ended.value.code == 0 and "lockstep replay runs/gsm8k --step 120 --set" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize("kind", ["tools", "drafts", "dpo"])
def test_every_kind_is_equal(kind: str, files: Path, tmp_path: Path) -> None:
    """`python -m tests.replays` replays ten steps of each."""
    run = train(kind, files, tmp_path / kind, "trainer.total_training_steps=4", "trainer.save_freq=2")
    code, out = replayed(run, 4)
    assert code == 0, out


@pytest.mark.slow
def test_samples_that_depend_on_timing_come_from_the_journal(files: Path, tmp_path: Path) -> None:
    never_saved = ["trainer.total_training_steps=4", "trainer.save_freq=0", "trainer.test_freq=-1"]
    run = train("one_update", files, tmp_path / "run", "trainer.async_mode=colocated", *never_saved)
    code, out = replayed(run, 3)
    assert code == 0 and "metrics equal bit for bit" in out, out
    code, out = replayed(run, 3, "--set", f"{COEF}=0.3")
    assert code == 1 and "stages that differ: loss -> gradient -> weights" in out, out


def test_what_a_replay_writes_is_in_its_own_folder(run: Path, tmp_path: Path) -> None:
    cache = tmp_path / "answers.sqlite"
    AnswerCache(str(cache)).put("question", "answer")
    found = SourceRun(run).find(6)
    assert isinstance(found.config, PPOConfig)
    ensemble = {"style": {"source": "judge", "kwargs": {"cache_path": str(cache)}}, "correct": {"source": "scorer"}}
    server = "actor_rollout_ref.rollout.server"
    values = {f"{server}.weights_folder": "/shared", f"{server}.weights_owner": str(run), f"{server}.urls": ["u"]}
    values |= {"reward_model.judge.cache_path": str(cache), "reward_model.ensemble": ensemble}
    found = replace(found, config=with_values(found.config, values))
    (tmp_path / "scratch").mkdir()
    config: Any = replayed_config(found, tmp_path / "scratch", {})
    server_config = config.actor_rollout_ref.rollout.server
    written = [server_config.weights_folder, server_config.weights_owner, config.reward_model.judge.cache_path]
    written.append(config.reward_model.ensemble["style"]["kwargs"]["cache_path"])
    assert all(Path(path).is_relative_to(tmp_path / "scratch") for path in written) and len(set(written)) == 4
    assert AnswerCache(written[2]).get("question") == AnswerCache(written[3]).get("question") == "answer"


def test_the_dump_of_another_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    for name in ("weights_of_may", "global_step_6"):
        (tmp_path / name).mkdir()
        with pytest.raises(RunError, match="is not a checkpoint before step 6") as raised:
            SourceRun(run).find_dumped(6, tmp_path / name)
        assert raised.value.exit_code == 2


# Comparison, without runs.


def test_metrics_are_compared_bit_for_bit_but_for_timings_and_rounding() -> None:
    gap = "training/rollout_log_probs_gap"
    old = {
        "step": 3,
        "time": 1.0,
        "timing_s/gen": 1.0,
        "perf/throughput": 9,
        "a": 1.0,
        "b": math.nan,
        gap: 1e-7,
        "c": 4.0,
    }
    new = {
        "step": 3,
        "time": 2.0,
        "timing_s/gen": 2.0,
        "perf/throughput": 8,
        "a": 1.0,
        "b": math.nan,
        gap: 2e-7,
        "c": 2.0,
    }
    found = compare_metrics(old, new | {"d": 1.0}, rollout_rounds=True)
    verdicts = [("d", "differs"), ("c", "differs"), (gap, "rounding"), ("a", "equal"), ("b", "equal")]
    assert [(change.name, change.verdict) for change in found] == verdicts
    change = next(change for change in found if change.name == "c")
    assert (change.difference, change.relative) == (-2.0, 0.5)
    assert {c.name: c.verdict for c in compare_metrics(old, new)}[gap] == "differs"
    for sign, steps in (({"num_turns/mean": 2.0}, []), ({"perf/drafts/share": 0.5}, []), ({}, [3])):
        logs = [{3: {gap: value, **sign}} for value in (1e-7, 2e-7)]
        assert list(first_different_steps(*logs)) == steps
    assert {c.verdict for c in compare_metrics({"a": 1.0}, {"a": 1.0 + 1e-9}, rounds=True)} == {"rounding"}


def recording(**changes: Any) -> Recording:
    columns = {
        "responses": torch.tensor([[5, 6], [7, 0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.5, 0.0]]),
        "advantages": torch.tensor([[1.0, 1.0], [-1.0, 0.0]]),
    }
    update = Update([0.5, 0.25], torch.tensor([-1.0, -2.0, -3.0]), {"w": Digest(2.0, 11), "v": Digest(1.0, 12)})
    models = {"actor": [ModelRecord([update], {"w": Digest(3.0, 13)})]}
    return replace(Recording(4, columns, ["ab", "c"], models), **changes)


def test_recordings_are_written_and_read(tmp_path: Path) -> None:
    write_recording(tmp_path, recording(findings={"finite": "x"}))
    found = read_recording(tmp_path)
    assert found.findings == {"finite": "x"} and found.texts == ["ab", "c"]
    assert list(tensor_changes(recording(), found)) == []
    assert [item.stage for item in items(found)] == [
        *("generation",) * 3,
        *("rewards", "advantages", "loss", "loss", "gradient", "weights"),
    ]


def test_the_first_tensor_that_differs_is_named() -> None:
    old = recording()
    columns = old.columns | {"advantages": torch.tensor([[1.0, 1.0], [-1.5, 0.0]])}
    (change,) = tensor_changes(old, recording(columns=columns))
    assert change.stage == "advantages" and not change.is_rounding
    assert "1 of 4 entries, in 1 of 2 rows; the first in row 1 at position 0: -1 and -1.5" in change.how
    assert "largest difference 0.5" in change.how
    (row,) = row_changes(old, recording(columns=columns)) or []
    assert (row.row, row.advantage, row.parts_at) == (1, (-1.0, -1.5), None)
    columns = old.columns | {"responses": torch.tensor([[5, 9], [7, 0]])}
    (row,) = row_changes(old, recording(columns=columns)) or []
    assert (row.row, row.parts_at, row.log_prob) == (0, 1, (-3.0, -3.0))
    columns = old.columns | {"rollout_log_probs": old.columns["rollout_log_probs"] * (1 + 1e-6)}
    agents = recording(rollout_rounds=True)
    assert [c.is_rounding for c in tensor_changes(agents, recording(columns=columns))] == [True]
    assert [c.is_rounding for c in tensor_changes(old, recording(columns=columns))] == [False]
    wider = old.columns | {"responses": torch.zeros(2, 3, dtype=torch.int64)}
    assert next(tensor_changes(old, recording(columns=wider))).how == "shapes (2, 2) and (2, 3)"
    update = Update([0.5, 0.25], torch.tensor([-1.0, -2.0, -3.0]), {"w": Digest(2.0, 11), "v": Digest(1.5, 14)})
    models = {"actor": [ModelRecord([update], {"w": Digest(3.0, 13)})]}
    (change,) = tensor_changes(old, recording(models=models))
    assert (change.stage, change.name) == ("gradient", "gradient of the actor")
    assert change.how.startswith("1 of 2 tensors; the first v: norm 1 and 1.5")


def test_nan_and_padding_are_no_difference(tmp_path: Path) -> None:
    for name, second in (("old", 1.0), ("new", 1.0), ("other", 2.0)):
        (tmp_path / name).write_text(f'{{"score": NaN, "values": [NaN, {second}]}}\n')
    assert compare_dumps(tmp_path / "old", tmp_path / "new") == []
    (difference,) = compare_dumps(tmp_path / "old", tmp_path / "other")
    assert (difference.rows, difference.columns) == ([0], ["values"])
    old = recording()
    wider = recording(columns={name: torch.nn.functional.pad(value, (0, 2)) for name, value in old.columns.items()})
    assert row_changes(old, wider) == []


def test_checkpoints_of_an_earlier_course_are_not_used(copy: Path) -> None:
    """Step 7 was saved, then the run was resumed from 5: what was saved at 7 is not on the way to a later step 8."""
    manifest = json.loads((copy / "global_step_5" / "manifest.json").read_text())
    manifest["sequence"] = 9
    (copy / "global_step_5" / "manifest.json").write_text(json.dumps(manifest))
    assert list(SourceRun(copy).checkpoints()) == [5]


@pytest.mark.slow
def test_a_key_that_follows_a_changed_one_follows_it_again(run: Path) -> None:
    length = "data.max_response_length"
    config: Any = config_from(run / "config.yaml", [f"{length}=12"])
    assert config.actor_rollout_ref.rollout.response_length == 12
    config = config_from(run / "config.yaml")
    assert config.actor_rollout_ref.rollout.response_length == config.data.max_response_length == 8
    with pytest.raises(RunError, match="max_response_length"):
        config_from(run / "config.yaml", [f"{length}=-1"])
