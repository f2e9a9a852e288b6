"""Runs with `strategy=deepspeed` on two processes: samples, metrics and weights of the FSDP engine in one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.trainer import fsdp_sft_trainer, main_ppo
from tests.metrics import metrics_of, numbers_of
from tests.programs import Program
from tests.tiny import save_tiny_model

pytest.importorskip("deepspeed")
pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.shared_processes import SharedProcesses
from tests.trainer import test_scale
from tests.trainer.test_scale import SAVE_STEP_2, STEPS, Runs, assert_equal
from tests.trainer.test_sft import KILLER

pytestmark = pytest.mark.deepspeed

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"
GRPO = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.1",
]


def zero(stage: int) -> list[str]:
    """All roles on DeepSpeed, in two processes."""
    sections = (f"{ACTOR}.deepspeed", "actor_rollout_ref.ref.deepspeed", "critic.deepspeed")
    return [
        *test_scale.workers(2),
        f"{ACTOR}.strategy=deepspeed",  # critic and reference follow
        *(f"{section}.zero_stage={stage}" for section in sections),
        *SAVE_STEP_2,
    ]


@pytest.fixture(scope="module")
def runs(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory, shared_processes: SharedProcesses) -> Runs:
    runs: Runs = test_scale.runs.__wrapped__(tiny_run_files, tmp_path_factory, shared_processes)  # type: ignore[attr-defined]
    return runs


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("settings", [[], GRPO], ids=["ppo", "grpo"])
def test_two_processes_train_as_fsdp_in_one(runs: Runs, settings: list[str], stage: int) -> None:
    assert_equal(runs(*settings, *zero(stage)), runs(*settings))


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_decode_with_one_copy_of_the_weights(runs: Runs, stage: int) -> None:
    split = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    assert_equal(runs(*zero(stage), split), runs())


@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 1), (2, None), (None, 2)])
def test_a_run_resumes_at_another_stage_or_engine(runs: Runs, before: int | None, after: int | None) -> None:
    settings: dict[int | None, list[str]] = {None: []} | {stage: zero(stage) for stage in (1, 2, 3)}
    saved = runs(*settings[before]).folder / "global_step_2"
    resumed = runs(*settings[after], "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    assert_equal(resumed, runs(*settings[before]), steps=STEPS - 2)


def test_a_killed_run_resumes_bit_for_bit(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    command = [*overrides, "trainer.total_training_steps=4", "trainer.save_freq=2"]
    command += [f"{ACTOR}.strategy=deepspeed", f"{ACTOR}.deepspeed.zero_stage=3"]
    assert main_ppo.main([*command, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    signals = [*command, f"trainer.logger={tmp_path}/killer.py:Tracker"]
    variables = {"AT_STEP": "3", "BY_SIGNAL": str(signal.SIGKILL.value)}
    killed = Program("lockstep.trainer.main_ppo", signals, tmp_path, **variables)
    assert killed.wait() == -signal.SIGKILL
    assert main_ppo.main(command) == 0
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    weights = [tmp_path / run / "global_step_4/actor/huggingface/model.safetensors" for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_two_ranks_of_torchrun_fine_tune_as_fsdp_in_one(tmp_path: Path) -> None:
    """5 rows per step on 2 ranks: one row of padding."""
    save_tiny_model(tmp_path / "model")
    rows = [{"question": f"{i % 9}+{i % 4}=", "answer": str(i % 9 + i % 4) + " so" * (i % 5)} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/train.jsonl",
        "data.train_batch_size=5",
        "data.max_length=64",
        "optim.lr=1e-3",
        "trainer.total_training_steps=4",
        "trainer.device=cpu",
    ]
    assert fsdp_sft_trainer.main([*overrides, f"trainer.default_local_dir={tmp_path}/one"]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "lockstep.trainer.fsdp_sft_trainer", *overrides, f"trainer.default_local_dir={tmp_path}/two"]
    command += ["model.strategy=deepspeed", "model.deepspeed.zero_stage=3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (metrics_of(tmp_path / name) for name in ("one", "two"))
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens"):
        assert [step[name] for step in two] == pytest.approx([step[name] for step in one], rel=1e-5), name
    files = [tmp_path / name / "global_step_4/huggingface/model.safetensors" for name in ("one", "two")]
    weights = [load_file(file) for file in files]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-6)
