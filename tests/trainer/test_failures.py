"""Failures outside the program are explained in one line."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.registry import load_object
from lockstep.rewards.errors import RewardError
from lockstep.single_controller.futures import ON_WORKER
from lockstep.trainer import main_ppo
from lockstep.trainer.run.failures import cause_of, explain


@pytest.fixture
def config(overrides: list[str], tmp_path: Path) -> PPOConfig:
    return load_config(PPOConfig, [*overrides, f"trainer.rollout_data_dir={tmp_path}/run/rollouts"])


def os_error(code: int, *paths: str) -> OSError:
    return (
        OSError(code, os.strerror(code), paths[0], None, paths[1])
        if paths[1:]
        else OSError(code, os.strerror(code), *paths)
    )


def on_worker(error: Exception, method: str) -> Exception:
    error.add_note(f"raised in worker group 'actor_rollout' by ActorRolloutRefWorker.{method} on rank 1 of 2")
    error.add_note(ON_WORKER + "Traceback ...")
    return error


def test_file_system(config: PPOConfig, tmp_path: Path) -> None:
    run = f"{tmp_path}/run"
    full = explain(os_error(errno.ENOSPC, f"{run}/metrics.jsonl"), config)
    assert full == (
        f"No space left on device: {run}/metrics.jsonl, in trainer.default_local_dir={run}; "
        "free some space or set another folder"
    )
    read_only = explain(os_error(errno.EROFS, f"{run}/rollouts/1.jsonl"), config)
    assert read_only is not None and "trainer.rollout_data_dir=" in read_only and "make it writable" in read_only
    renamed = explain(os_error(errno.EISDIR, f"{run}/.x.tmp", f"{run}/config.yaml"), config)
    assert (
        renamed is not None and renamed.startswith(f"Is a directory: {run}/config.yaml, in") and "in the way" in renamed
    )
    message = "cannot save global_step_2 in trainer.default_local_dir=/x: File too large; free some space"
    assert explain(OSError(errno.EFBIG, message), config) == message
    compiled = explain(RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), config)
    assert compiled is not None and compiled.startswith(f"File too large in trainer.default_local_dir={run}")


@pytest.mark.parametrize(
    ("error", "method", "key"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "update_actor", "actor.ppo_max_token_len_per_gpu"),
        (torch.OutOfMemoryError("CUDA out of memory."), "generate_sequences", "rollout.gpu_memory_utilization"),
        (torch.OutOfMemoryError("CUDA out of memory."), "advance_generation", "rollout.gpu_memory_utilization"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "compute_values", "critic.forward_max_token_len"),
        (MemoryError(), "init_model", "actor_rollout_ref.model.path"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), None, "ulimit -v"),
        (RuntimeError("can't start new thread"), None, "data.train_batch_size"),
        (pa.ArrowException("Unknown error: Failed to launch worker thread"), None, "data.train_batch_size"),
    ],
)
def test_out_of_memory(config: PPOConfig, error: Exception, method: str | None, key: str) -> None:
    cause = explain(on_worker(error, method) if method else error, config)
    assert cause is not None and cause.startswith(("out of memory", "out of GPU memory")) and key in cause
    assert "\n" not in cause and (method or "") in cause


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        MemoryError("MemoryError"),
        BaseException('ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: WouldBlock, message: "..." }) }'),
    ],
)
def test_out_of_memory_outside_the_run(
    error: BaseException, overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.utils.progress.ProgressLog.__enter__", Mock(side_effect=error))
    assert main_ppo.main(overrides) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("INFO")]
    assert lines == [f"error: out of memory ({error}); raise the limit (ulimit -v)"]


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("train_batch", "lower data.max_token_len_per_gpu"),
        ("prepare", "lower data.max_token_len_per_gpu"),
        (None, "set model.lora_rank or model.fsdp_config.param_offload=true"),
    ],
)
def test_out_of_gpu_memory_in_supervised_training(method: str | None, key: str, tiny_run_files: Path) -> None:
    settings = [f"model.path={tiny_run_files}/model", f"data.train_files={tiny_run_files}/train.parquet"]
    error = torch.OutOfMemoryError("CUDA out of memory.")
    if method is not None:
        error.add_note(f"raised in rank 0 by SFTTrainer.{method}")
    cause = explain(error, load_config(SFTConfig, settings))
    assert cause is not None and cause.startswith("out of GPU memory") and key in cause
    assert "ulimit" not in cause and "actor_rollout_ref" not in cause


def test_dead_processes_and_rewards(config: PPOConfig) -> None:
    for end in ("(pid(s) 12, 13) exited unexpectedly", "(pid 12) is killed by signal: Killed. "):
        cause = explain(RuntimeError(f"DataLoader worker {end}"), config)
        assert cause is not None and "a data-loader process" in cause and "data.dataloader_num_workers" in cause
    assert explain(RewardError("all rows failed"), config) == "all rows failed"


def test_unexpected_errors_keep_their_traceback(config: PPOConfig) -> None:
    assert explain(RuntimeError("shape mismatch"), config) is None
    assert explain(KeyError("values"), config) is None
    assert explain(on_worker(ValueError("shape mismatch"), "update_actor"), config) is None
    assert explain(ValueError("algorithm.gamma=2: must be at most 1"), config) == "algorithm.gamma=2: must be at most 1"
    folder = Path(config.trainer.default_local_dir)
    folder.mkdir()
    with pytest.raises(RuntimeError, match="shape mismatch"):
        cause_of(RuntimeError("shape mismatch"), config)
    assert "shape mismatch" in (folder / "error.txt").read_text()


def test_errors_of_user_code(config: PPOConfig, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("def loss(x):\n    return x.foo\n")
    loss = load_object(f"{tmp_path}/loss.py:loss")
    expected = (
        f"AttributeError: 'int' object has no attribute 'foo', raised by your code at {tmp_path}/loss.py:2 in loss"
    )
    with pytest.raises(AttributeError) as caught:
        loss(3)
    assert explain(caught.value, config) == expected
    far = AttributeError("'int' object has no attribute 'foo'")
    report = f'Traceback (most recent call last):\n  File "{tmp_path}/loss.py", line 2, in loss\n    return x.foo\n'
    far.add_note(ON_WORKER + report)
    assert explain(far, config) == expected


def test_value_error_of_user_code_has_its_place(config: PPOConfig, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(
        "from lockstep.registry import load_module\n\n\ndef loss(x):\n"
        "    if x:\n        load_module('nowhere.py')\n    raise ValueError('shapes differ')\n"
    )
    loss = load_object(f"{tmp_path}/loss.py:loss")
    with pytest.raises(ValueError, match="shapes differ") as caught:
        loss(0)
    expected = f"ValueError: shapes differ, raised by your code at {tmp_path}/loss.py:7 in loss"
    assert explain(caught.value, config) == expected
    far = ValueError("shapes differ")
    far.add_note(f'{ON_WORKER}Traceback (most recent call last):\n  File "{tmp_path}/loss.py", line 7, in loss\n')
    assert explain(far, config) == expected
    with pytest.raises(ValueError, match="no file") as ours:
        loss(1)
    assert explain(ours.value, config) == str(ours.value)


def test_an_os_error_of_a_library_is_not_about_our_folder(config: PPOConfig) -> None:
    assert explain(OSError("config.json is not\nvalid JSON"), config) == "config.json is not valid JSON"
