"""Processes with `strategy=megatron`: a killed run resumes, and ranks of torchrun fine-tune as the FSDP engine in one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.commandline import config_from_command_line
from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.trainer import fsdp_sft_trainer, main_ppo
from tests.metrics import metrics_of, numbers_of
from tests.programs import Program
from tests.tiny import save_tiny_model

pytest.importorskip("megatron.core")
pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.shared_processes import OnSharedProcesses
from tests.trainer.test_megatron import megatron
from tests.trainer.test_scale import workers
from tests.trainer.test_sft import KILLER

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("layout", "code"),
    [(megatron(), -signal.SIGKILL), ([*workers(2), *megatron(tp=2)], 1)],
    ids=["local", "2-tp"],
)
def test_a_killed_run_resumes_bit_for_bit(
    overrides: list[str], tmp_path: Path, layout: list[str], code: int, request: pytest.FixtureRequest
) -> None:
    """On Ray the controller is killed, and the command reports it; the other runs share processes."""
    (tmp_path / "killer.py").write_text(KILLER)
    command = [*overrides, *layout, "trainer.total_training_steps=4", "trainer.save_freq=2"]

    def train(*settings: str) -> int:
        config = config_from_command_line([*command, *settings], PPOConfig)
        assert config is not None
        if controller_of(config) != "ray":
            return main_ppo.main([*command, *settings])
        return OnSharedProcesses(request.getfixturevalue("shared_processes")).run(config)

    assert train(f"trainer.default_local_dir={tmp_path}/whole") == 0
    signals = [*command, f"trainer.logger={tmp_path}/killer.py:Tracker"]
    variables = {"AT_STEP": "3", "BY_SIGNAL": str(signal.SIGKILL.value)}
    killed = Program("lockstep.trainer.main_ppo", signals, tmp_path, **variables)
    assert killed.wait() == code
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert train() == 0
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    weights = [tmp_path / run / "global_step_4/actor/huggingface/model.safetensors" for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=["dp", "pp"])
def test_two_ranks_of_torchrun_fine_tune_as_fsdp_in_one(tmp_path: Path, sizes: dict[str, int]) -> None:
    """5 rows per step: two data-parallel ranks have one row of padding."""
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
    command += megatron(section="model.megatron", **sizes)  # type: ignore[arg-type]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (metrics_of(tmp_path / name) for name in ("one", "two"))
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens"):
        assert [step[name] for step in two] == pytest.approx([step[name] for step in one], rel=1e-5), name
    files = [tmp_path / name / "global_step_4/huggingface/model.safetensors" for name in ("one", "two")]
    weights = [load_file(file) for file in files]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-5)
