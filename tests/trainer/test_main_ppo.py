"""The training command end to end: algorithms, outputs, resuming, errors."""

import itertools
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.observability.trackers import Tracking
from lockstep.single_controller import Role
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.group_sampler import GroupSampler
from lockstep.trainer.ppo.group_scorer import GroupScorer
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.trainer.ppo.task_runner import _models
from tests.programs import Program

pytestmark = pytest.mark.first

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3"]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics without timings."""
    return [{k: v for k, v in r.items() if not k.startswith(("time", "timing", "perf/"))} for r in rows]


@pytest.mark.parametrize(
    "extra",
    [
        GRPO,
        ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
        ["algorithm.adv_estimator=reinforce_plus_plus", "actor_rollout_ref.actor.use_kl_loss=true"],
        ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2"],
        [*GRPO, "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96"],
        [*GRPO, "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.actor.entropy_coeff=0.01"],
        [
            *GRPO,
            "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
            "actor_rollout_ref.model.use_remove_padding=false",
        ],
    ],
    ids=["grpo", "gae", "reinforce_plus_plus", "remax", "dynamic", "hf", "bf16-padded"],
)
def test_algorithms_and_engines_train(overrides: list[str], tmp_path: Path, extra: list[str]) -> None:
    assert main([*overrides, *extra, "trainer.total_training_steps=2", "trainer.val_before_train=false"]) == 0
    rows = metrics_of(tmp_path / "run")
    assert [r["step"] for r in rows] == [1, 2]
    assert all(r["actor/grad_norm"] > 0 for r in rows)
    assert all(r["training/rollout_log_probs_gap"] < (0.1 if "bfloat16" in str(extra) else 1e-4) for r in rows)
    if "gae" in str(extra):
        assert all(r["critic/vf_loss"] > 0 and r["critic/grad_norm"] > 0 for r in rows)
        assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)


def test_outputs_of_a_run_and_checkpoints_that_transformers_loads(overrides: list[str], tmp_path: Path) -> None:
    dumps = [f"trainer.rollout_data_dir={tmp_path}/rollouts", f"trainer.validation_data_dir={tmp_path}/val"]
    command = [*overrides, *dumps, "trainer.save_freq=2", "trainer.test_freq=2", "trainer.total_training_steps=3"]
    assert main([*command, "trainer.max_actor_ckpt_to_keep=1", "critic.enable=true"]) == 0
    run = tmp_path / "run"
    rows = metrics_of(run)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert "val-core/openai/gsm8k/reward/mean@1" in rows[0] and "val-core/openai/gsm8k/reward/mean@1" in rows[2]
    for name in (
        "critic/score/mean",
        "actor/pg_loss",
        "actor/entropy",
        "response_length/mean",
        "timing_s/gen",
        "perf/throughput",
    ):
        assert name in rows[1], name
    assert (run / "config.yaml").is_file()
    assert [p.name for p in run.glob("global_step_*")] == ["global_step_3"]
    assert (run / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    step = run / "global_step_3"
    AutoModelForCausalLM.from_pretrained(step / "actor" / "huggingface")
    critic = AutoModelForSequenceClassification.from_pretrained(step / "critic" / "huggingface")
    assert critic.config.num_labels == 1
    assert AutoTokenizer.from_pretrained(step / "actor" / "huggingface").chat_template
    rollouts, validation = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("rollouts/1.jsonl", "val/0.jsonl")
    )
    details = {"uid", "data_source", "index", "length", "finish_reason"}
    assert len(rollouts) == 4
    assert {"input", "output", "gts", "score", "step", "advantage"} | details <= set(rollouts[0])
    assert details <= set(validation[0]) and "advantage" not in validation[0]
    mean = sum(row["length"] for row in rollouts) / 4
    assert mean == rows[1]["response_length/mean"]
    assert all(row["length"] == 8 or row["finish_reason"] == "stop" for row in rollouts)
    advantages = sum(row["advantage"] * row["length"] for row in rollouts) / (4 * mean)
    assert advantages == pytest.approx(rows[1]["critic/advantages/mean"], abs=1e-5)


@pytest.mark.parametrize("estimator", ["gae", pytest.param("grpo", marks=pytest.mark.slow)])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    overrides: list[str], tmp_path: Path, estimator: str
) -> None:
    kl = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=10"]
    command = [*overrides, *kl, f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=2"]
    command += ["trainer.save_freq=2", "trainer.total_training_steps=6", "trainer.test_freq=3"]
    command += ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"]
    whole, parts = f"trainer.default_local_dir={tmp_path}/whole", f"trainer.default_local_dir={tmp_path}/parts"
    assert main([*command, whole]) == 0
    program = Program("lockstep.trainer.main_ppo", [*command, parts], tmp_path)
    assert program.until((tmp_path / "parts" / "global_step_4").exists), program.stderr
    program.signal(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert main([*command, parts]) == 0
    assert untimed(metrics_of(tmp_path / "parts")) == untimed(metrics_of(tmp_path / "whole"))


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(overrides: list[str], tmp_path: Path) -> None:
    command = [*overrides, "trainer.save_freq=1", "trainer.total_training_steps=4", "trainer.val_before_train=false"]
    whole, parts = f"trainer.default_local_dir={tmp_path}/whole", f"trainer.default_local_dir={tmp_path}/parts"
    assert main([*command, whole]) == 0
    program = Program("lockstep.trainer.main_ppo", [*command, parts], tmp_path)
    program.until(lambda: list((tmp_path / "parts").glob(".staging-global_step_3-*")))
    program.signal(signal.SIGKILL)
    assert program.wait() in (-signal.SIGKILL, 0), program.stderr  # 0: writing it took less time than looking
    assert main([*command, parts]) == 0
    assert untimed(metrics_of(tmp_path / "parts")) == untimed(metrics_of(tmp_path / "whole"))
    assert not list((tmp_path / "parts").glob(".staging*"))


def test_ctrl_c_saves_and_the_same_command_resumes(overrides: list[str], tmp_path: Path) -> None:
    command = [*overrides, "trainer.val_before_train=false", "trainer.total_epochs=500"]
    program = Program("lockstep.trainer.main_ppo", command, tmp_path)
    assert program.until(lambda: "\nstep 2/" in program.stdout), program.stderr
    program.signal(signal.SIGINT)
    assert program.wait() == 130
    assert "Traceback" not in program.stderr and "run the same command to resume" in program.stderr
    (saved,) = (tmp_path / "run").glob("global_step_*")
    steps = int(saved.name.rpartition("_")[2])
    assert metrics_of(tmp_path / "run")[-1]["step"] == steps
    assert main([*command, f"trainer.total_training_steps={steps + 1}"]) == 0
    assert metrics_of(tmp_path / "run")[-1]["step"] == steps + 1


STAGES = {
    "generation": (Sampling, "generate", 3),
    "scoring": (Sampling, "score", 4),
    "async-generation": (GroupSampler, "respond", 9),
    "async-scoring": (GroupScorer, "_scored", 4),
    "update": (PPOTrainer, "_update", 2),
    "validation": (PPOTrainer, "_validate", 1),
    "saving": (PPOTrainer, "_save_checkpoint", 1),
    "tracking": (Tracking, "log", 2),
}
"""Stage -> method, and at which of its calls the signal comes."""


@pytest.mark.slow
def test_stop_during_any_stage_resumes_bit_for_bit(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several batches are drawn per step: the batches of a step that is discarded are drawn again."""
    (tmp_path / "even.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(sum(map(ord, solution_str)) % 3 == 0)\n"
    )
    command = [*overrides, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.total_epochs=20"]
    command += ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score", "trainer.test_freq=2"]
    command += ["trainer.val_before_train=false", "trainer.save_freq=2", "trainer.total_training_steps=3"]
    command += [f"custom_reward_function.path={tmp_path}/even.py", "reward_model.timeout_s=null"]

    def result(name: str) -> tuple[Any, bytes]:
        weights = tmp_path / name / "global_step_3" / "actor" / "huggingface" / "model.safetensors"
        return untimed(metrics_of(tmp_path / name)), weights.read_bytes()

    assert main([*command, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    assert max(row["train/num_gen_batches"] for row in metrics_of(tmp_path / "whole")) > 1
    for stage, (owner, name, number) in STAGES.items():
        calls = itertools.count(1)
        method = getattr(owner, name)

        def stopped(*args: Any, _calls: Any = calls, _at: int = number, _method: Any = method, **kwargs: Any) -> Any:
            if next(_calls) == _at:
                os.kill(os.getpid(), signal.SIGTERM)
            return _method(*args, **kwargs)

        mode = "async" if stage.startswith("async") else "sync"
        settings = [*command, f"trainer.default_local_dir={tmp_path}/{stage}", f"actor_rollout_ref.rollout.mode={mode}"]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopped)
            assert main(settings) == 130, stage
        saved = {path: path.read_bytes() for path in (tmp_path / stage).glob("global_step_2/manifest.json")}
        assert main(settings) == 0, stage
        assert result(stage) == result("whole"), stage
        assert all(path.read_bytes() == before for path, before in saved.items()), stage


def test_val_only(overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert main([*overrides, "trainer.val_only=true", "data.train_files=[/no/such.parquet]"]) == 0
    (files,) = [line for line in caplog.messages if line.startswith("reading data")]
    assert "/no/such" not in files and "val" in files
    assert [r["step"] for r in metrics_of(tmp_path / "run")] == [0]


@pytest.mark.slow
def test_val_only_needs_nothing_that_only_training_needs(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No training files, critic or reference; all files of the run stay as they are, its metrics get one line."""
    run = tmp_path / "run"
    command = [*overrides, "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.save_freq=1"]
    assert main([*command, *GRPO]) == 0

    def contents() -> dict[str, bytes]:
        return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    trained = contents()
    metrics = trained.pop("metrics.jsonl")
    only = [word for word in overrides if not word.startswith("data.train_files")]
    only += ["trainer.val_only=true", "algorithm.use_kl_in_reward=true", "critic.model.path=/no/such/folder"]
    loaded: list[str] = []
    init_workers = PPOTrainer.init_workers

    def recorded(trainer: PPOTrainer) -> None:
        loaded.extend(map(str, trainer.workers.roles))
        init_workers(trainer)

    monkeypatch.setattr(PPOTrainer, "init_workers", recorded)
    older = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_1"]
    for resume in ([], older, ["trainer.resume_mode=disable"]):
        assert main([*only, *resume]) == 0
        now = contents()
        assert now.pop("metrics.jsonl").startswith(metrics) and now == trained, resume
    assert loaded == ["actor_rollout"] * 3
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 2, 1, 0]
    assert all("val-core/openai/gsm8k/reward/mean@1" in row for row in rows[2:])
    assert main([*command, *GRPO, "trainer.total_training_steps=3"]) == 0  # resumes; step 2 is not logged again
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 2, 1, 0, 3]
    with pytest.raises(SystemExit, match="2"):
        main([word for word in only if not word.startswith("data.val_files")])


def test_user_errors_are_reported_without_a_traceback(overrides: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bad.py").write_text("def compute_score(a, b):\n    return 0\n")
    assert main([*overrides, f"custom_reward_function.path={tmp_path}/bad.py"]) == 2
    err = capsys.readouterr().err
    assert "custom_reward_function" in err and "Traceback" not in err
    for wrong, meant in (
        ("actor_rollout_ref.rollout.name=embeded", "embedded"),
        ("algorithm.adv_estimator=grop", "grpo"),
    ):
        with pytest.raises(SystemExit, match="2"):  # from the config checks
            main([*overrides, wrong])
        assert f"Did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.slow
def test_saving_during_critic_warmup_changes_nothing(overrides: list[str], tmp_path: Path) -> None:
    command = [*overrides, "algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "trainer.total_training_steps=3"]
    for name, frequency in (("saved", 1), ("unsaved", -1)):
        assert main([*command, f"trainer.save_freq={frequency}", f"trainer.default_local_dir={tmp_path}/{name}"]) == 0
    assert untimed(metrics_of(tmp_path / "saved")) == untimed(metrics_of(tmp_path / "unsaved"))
    again = [*command, f"trainer.default_local_dir={tmp_path}/again", "trainer.resume_mode=resume_path"]
    assert main([*again, f"trainer.resume_from_path={tmp_path}/saved/global_step_1"]) == 0
    assert untimed(metrics_of(tmp_path / "again")) == untimed(metrics_of(tmp_path / "saved"))[1:]


def test_the_actor_schedule_is_as_long_as_its_updates(overrides: list[str], tmp_path: Path) -> None:
    """Two of four steps update the critic alone: the actor's rate falls from 1 to 1/2 in its own two steps."""
    schedule = ["actor_rollout_ref.actor.optim.lr_scheduler_type=linear", "actor_rollout_ref.actor.optim.lr=1e-4"]
    command = [*overrides, "algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "trainer.total_training_steps=4"]
    assert main([*command, *schedule, f"trainer.default_local_dir={tmp_path}/run"]) == 0
    rates = [row["actor/lr"] for row in metrics_of(tmp_path / "run") if "actor/lr" in row]
    assert rates == pytest.approx([1e-4, 0.5e-4])


def test_resuming_without_a_saved_model_is_refused(overrides: list[str], tmp_path: Path, capsys: Any) -> None:
    short = [*overrides, "trainer.save_freq=1", "trainer.val_before_train=false", "trainer.total_training_steps=1"]
    exported = "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"
    assert main([*short, "algorithm.adv_estimator=reinforce_plus_plus", exported]) == 0
    assert main([*overrides, "algorithm.adv_estimator=reinforce_plus_plus"]) == 2
    assert "checkpoint.save_contents" in capsys.readouterr().err


def test_finished_run_exits_without_loading_a_model(
    overrides: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*overrides, *GRPO, "trainer.total_training_steps=1", "trainer.val_before_train=false"]
    command += ["trainer.save_freq=1"]
    assert main([*command, "trainer.total_training_steps=2"]) == 0
    monkeypatch.setattr("lockstep.trainer.ppo.task_runner.PPOTrainer.init_workers", None)
    caplog.clear()
    assert main(command) == 0
    assert "nothing to do: the run is already at step 2 of 1" in caplog.text
    assert main([*command, "algorithm.adv_estimator=rloo"]) == 2  # another experiment


def test_the_start_line_names_the_folder_of_each_role(
    overrides: list[str], tiny_run_files: Path, tmp_path: Path
) -> None:
    step = tmp_path / "earlier" / "global_step_3"
    for part in ("actor", "critic"):
        shutil.copytree(tiny_run_files / "model", step / part / "huggingface")
    config = load_config(PPOConfig, [*overrides, f"actor_rollout_ref.model.path={step}"])
    size = (tiny_run_files / "model" / "model.safetensors").stat().st_size / 1e6
    places = [f"{step}/{part}/huggingface ({size:.3g} MB)" for part in ("actor", "critic")]
    roles = [Role.ActorRollout, Role.RefPolicy, Role.Critic]
    assert _models(config, roles) == f"{places[0]} as {roles[0]}, {roles[1]}; {places[1]} as {roles[2]}"


def test_the_smallest_rows_and_the_short_command(tiny_run_files: Path, tmp_path: Path) -> None:
    """`{"prompt", "answer"}` in files, for training and validation, with a reward function of one's own."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "val.json").write_text(json.dumps(rows[:2]))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert extra_info['answer'] == ground_truth == str(2 * extra_info['level'])\n"
        "    return len(set(solution_str)) / 10\n"
    )
    command = [f"model={tiny_run_files}/model", f"data={tmp_path}/train.jsonl", f"val_data={tmp_path}/val.json"]
    command += [f"reward={tmp_path}/reward.py", "n=2", "lr=1e-3", "steps=1", "batch_size=4", f"run_dir={tmp_path}/run"]
    command += ["max_prompt_length=40", "max_response_length=8", "trainer.device=cpu"]
    assert cli.main(["grpo", *command]) == 0
    before, after = metrics_of(tmp_path / "run")
    assert "val-core/default/reward/mean@1" in before and after["actor/grad_norm"] > 0
