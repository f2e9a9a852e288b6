"""The plan in front of a training run, and in the message of one that ran out of memory."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.observability.run_folder import PLAN
from lockstep.plan import estimate
from lockstep.plan.hardware import DEVICES, Device, known_gpu
from lockstep.trainer import fsdp_sft_trainer, main_dpo, main_rm
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run import memory_check
from lockstep.trainer.run.failures import explain
from lockstep.trainer.run.memory_check import check_memory, write_plan
from tests.plan.test_plan import write_model

TORCH_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 23.52 GiB of which 1.10 GiB is free. "
    "Process 71 has 22.41 GiB memory in use. Of the allocated memory 20.75 GiB is allocated by PyTorch, and 1.21 GiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.fixture
def use_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(device: Device | None) -> None:
        monkeypatch.setattr(memory_check, "this_gpu", lambda: device)

    return use


@pytest.fixture
def config_of(tmp_path: Path) -> Any:
    """(shape, settings) -> a GRPO config with a model of that shape."""
    (tmp_path / "train.parquet").touch()

    def load(shape: str, *more: str) -> PPOConfig:
        settings = [
            "algorithm=grpo",
            f"data.train_files={tmp_path}/train.parquet",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            f"actor_rollout_ref.model.path={write_model(tmp_path / shape, shape)}",
        ]
        return load_config(PPOConfig, [*settings, *more])

    return load


@pytest.fixture
def supervised(tmp_path: Path) -> Any:
    """(config class, shape, settings) -> a config of SFT, a reward model or DPO with a model of that shape."""
    (tmp_path / "rows.jsonl").touch()

    def load(cls: type[SupervisedConfig], shape: str, *more: str) -> SupervisedConfig:
        path = write_model(tmp_path / shape, shape)
        return load_config(cls, [f"model.path={path}", f"data.train_files={tmp_path}/rows.jsonl", *more])

    return load


def test_plan_is_logged(config_of: Any, use_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    use_gpu(DEVICES["H200"])
    check_memory(config_of("0.5b"))
    assert caplog.records[-1].levelname == "INFO"
    assert caplog.messages[-1].startswith("plan: fits on H200: at most ") and "s per step" in caplog.messages[-1]


def test_only_what_cannot_fit_is_refused(config_of: Any, use_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    use_gpu(DEVICES["RTX4090"])
    with pytest.raises(
        ValueError, match=r"does not fit on RTX4090: update actor needs .* even for short sequences"
    ) as too_large:
        check_memory(config_of("7b"))
    assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true" in str(too_large.value)
    assert "trainer.check_memory=false" in str(too_large.value) and "\n" not in str(too_large.value)
    check_memory(config_of("7b", "trainer.check_memory=false"))
    check_memory(config_of("7b", "trainer.device=cpu"))
    assert not caplog.records
    all_at_once = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80"
    check_memory(config_of("0.5b", all_at_once, "data.max_response_length=2048"))  # responses may be shorter
    assert caplog.records[-1].levelname == "WARNING" and "does not fit on RTX4090" in caplog.messages[-1]


def test_the_plan_is_written_for_pages_about_the_run(config_of: Any, use_gpu: Any, tmp_path: Path) -> None:
    use_gpu(DEVICES["H200"])
    config = config_of("0.5b")
    write_plan(config, tmp_path)
    written = json.loads((tmp_path / PLAN).read_text())
    plan = memory_check.planned(config)
    assert plan is not None and (written["gpu"], written["gpu_memory_gb"]) == ("H200", DEVICES["H200"].memory / 1e9)
    assert written["memory_gb"] == {phase.name: pytest.approx(phase.peak / 1e9, abs=1e-3) for phase in plan.phases}
    assert written["seconds"] == {name: pytest.approx(seconds, abs=1e-3) for name, seconds in plan.times.items()}
    assert written["step_seconds"] == pytest.approx(plan.step_s, abs=1e-3)


def test_a_plan_without_times_or_gpu(config_of: Any, use_gpu: Any, tmp_path: Path) -> None:
    use_gpu(known_gpu("a new GPU", 24e9))
    write_plan(config_of("0.5b"), tmp_path)
    written = json.loads((tmp_path / PLAN).read_text())
    assert written["seconds"] == {} and written["step_seconds"] is None and written["memory_gb"]["generate"] > 0
    write_plan(config_of("0.5b", "trainer.device=cpu"), tmp_path)
    assert json.loads((tmp_path / PLAN).read_text())["gpu"] == "cpu"
    use_gpu(None)
    write_plan(config_of("0.5b"), tmp_path)  # the plan of an earlier start is not this one's
    assert not (tmp_path / PLAN).exists()
    (tmp_path / PLAN).write_text("{}")
    write_plan(config_of("0.5b", "trainer.device=cpu", "trainer.check_memory=false"), tmp_path)
    assert not (tmp_path / PLAN).exists()


def test_a_plan_that_cannot_be_written_is_a_warning(
    config_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PLAN).write_text("{}")
    monkeypatch.setattr(memory_check, "plan_as_json", lambda plan: {"gpu_memory_gb": math.nan})
    write_plan(config_of("0.5b", "trainer.device=cpu"), tmp_path)
    assert not (tmp_path / PLAN).exists() and "plan.json cannot be written (Out of range" in caplog.text


def test_a_plan_that_cannot_be_written_does_not_stop_the_run(
    config_of: Any, use_gpu: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_gpu(DEVICES["H200"])
    write_plan(config_of("0.5b"), tmp_path / "deleted")
    assert "cannot be written (No such file or directory); the run goes on without it" in caplog.messages[-1]


@pytest.mark.parametrize("cls", [SFTConfig, RMConfig, DPOConfig])
def test_supervised_training_is_planned(
    cls: type[SupervisedConfig], supervised: Any, use_gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    use_gpu(DEVICES["H200"])
    check_memory(supervised(cls, "0.5b"))
    assert caplog.messages[-1].startswith("plan: fits on H200: at most ") and "in update;" in caplog.messages[-1]
    use_gpu(DEVICES["RTX4090"])
    with pytest.raises(
        ValueError,
        match=r"does not fit on RTX4090: update needs .* Try model\.fsdp_config\.offload_policy=true; `lockstep",
    ):
        check_memory(supervised(cls, "7b"))
    check_memory(supervised(cls, "7b", "trainer.check_memory=false"))
    check_memory(supervised(cls, "7b", "trainer.device=cpu"))


def test_processes_of_torchrun_share_the_model(supervised: Any, use_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(replace(DEVICES["H100"], memory=70e9))
    config = supervised(SFTConfig, "7b")
    with pytest.raises(ValueError, match="does not fit"):
        check_memory(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(config)
    plan = memory_check.planned(config)
    assert plan is not None and (plan.job.models[0].ranks, plan.job.models[0].machines) == (4, 2)


def test_offload_is_not_refused(config_of: Any, use_gpu: Any) -> None:
    use_gpu(replace(DEVICES["H200"], memory=100e9))
    with pytest.raises(ValueError, match="moments 60"):
        check_memory(config_of("7b"))
    check_memory(config_of("7b", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"))
    use_gpu(DEVICES["RTX4090"])
    streamed = [f"actor_rollout_ref.{role}.fsdp_config.offload_policy=true" for role in ("actor", "ref")]
    check_memory(config_of("7b", *streamed))  # parameters, gradients and moments live in host memory


def test_unknown_gpus_and_models(
    config_of: Any, use_gpu: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    use_gpu(known_gpu("NVIDIA Quantum 9000", 300e9))
    check_memory(config_of("0.5b"))
    assert "fits on NVIDIA Quantum 9000" in caplog.messages[-1] and "a step" not in caplog.messages[-1]
    config = config_of("1.5b")
    (tmp_path / "1.5b" / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 5}))
    estimate.model_shape.cache_clear()
    check_memory(config)
    assert (
        caplog.messages[-1]
        == "memory is not planned: config.json of mamba has no hidden_size, so its memory cannot be planned"
    )
    use_gpu(None)
    caplog.clear()
    check_memory(config)
    assert not caplog.records


def test_gpus_are_recognised() -> None:
    assert known_gpu("NVIDIA A100-SXM4-40GB", 40960 * 2**20).name == "A100-40G"
    assert known_gpu("NVIDIA A100 80GB PCIe", 81920 * 2**20).name == "A100-80G"
    assert known_gpu("NVIDIA GeForce RTX 4090", 24564 * 2**20).name == "RTX4090"
    h100 = known_gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert h100.flops == DEVICES["H100"].flops and h100.memory == 81559 * 2**20


def test_refusal_of_the_command(
    overrides: list[str], use_gpu: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_gpu(replace(DEVICES["H200"], memory=1e5))
    assert main([*overrides, "trainer.device=auto"]) == 2
    assert "error: does not fit on H200" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("program", [fsdp_sft_trainer, main_rm, main_dpo])
def test_refusal_of_the_supervised_commands(
    program: Any, tiny_run_files: Path, use_gpu: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_gpu(replace(DEVICES["H200"], memory=1e5))
    settings = [f"model.path={tiny_run_files}/model", f"data.train_files={tiny_run_files}/train.parquet"]
    assert program.main([*settings, f"trainer.default_local_dir={tmp_path}/run"]) == 2
    message = capsys.readouterr().err
    assert "error: does not fit on H200: update needs" in message and "trainer.check_memory=false" in message
    assert not (tmp_path / "run").exists()


def out_of_memory(method: str) -> torch.OutOfMemoryError:
    error = torch.OutOfMemoryError(TORCH_MESSAGE)
    error.add_note(f"raised in worker group 'actor_rollout' by ActorRolloutRefWorker.{method} on rank 1 of 2")
    return error


def test_out_of_memory_in_supervised_training_says_what_was_planned(supervised: Any, use_gpu: Any) -> None:
    use_gpu(DEVICES["RTX4090"])
    config = supervised(SFTConfig, "0.5b", "data.max_token_len_per_gpu=32768")
    cause = explain(out_of_memory("train_batch"), config)
    assert cause is not None and cause.startswith("out of GPU memory in train_batch (tried to allocate 2.32 GiB")
    assert "; the plan expected up to " in cause and "of 25.3 GB (" in cause and "data.max_token_len_per_gpu" in cause
    by_rows = supervised(DPOConfig, "7b", "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=2")
    pairs = explain(out_of_memory("train_batch"), by_rows)
    assert pairs is not None and "(moments 60.9" in pairs and "model.fsdp_config.optimizer_offload=true" in pairs
    assert "lower data.micro_batch_size_per_gpu, or set " in pairs
    validation = explain(out_of_memory("validate"), config)
    assert validation is not None and "plan" not in validation and "lower data.max_token_len_per_gpu" in validation


def test_out_of_memory_says_what_was_planned(config_of: Any, use_gpu: Any) -> None:
    use_gpu(DEVICES["RTX4090"])
    numbers = (
        "tried to allocate 2.32 GiB; 20.75 GiB of 23.52 GiB are allocated, 1.21 GiB more are cached, 1.10 GiB are free"
    )
    dynamic = (
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
    )
    cause = explain(out_of_memory("update_actor"), config_of("0.5b", *dynamic))
    assert cause is not None and "\n" not in cause
    assert cause.startswith(f"out of GPU memory in update_actor ({numbers}); the plan expected up to ")
    assert "of 25.3 GB (activations " in cause and "actor.ppo_max_token_len_per_gpu" in cause
    large = explain(out_of_memory("update_actor"), config_of("7b"))
    assert large is not None and "(moments 60.9" in large and "optimizer_offload=true" in large
    assert "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or set " in large
    decoding = explain(out_of_memory("generate_sequences"), config_of("0.5b"))
    assert decoding is not None and "KV cache" in decoding and "actor_rollout_ref.rollout.max_num_seqs" in decoding
    loading = explain(out_of_memory("init_model"), config_of("0.5b"))
    assert loading is not None and "plan" not in loading and "trainer.n_gpus_per_node" in loading
    use_gpu(None)
    without = explain(out_of_memory("update_actor"), config_of("0.5b", *dynamic))
    assert (
        without
        == f"out of GPU memory in update_actor ({numbers}); lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )


def test_run_that_runs_out_of_memory(
    overrides: list[str], use_gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError(TORCH_MESSAGE)

    monkeypatch.setattr(FsdpEngine, "forward_backward", exhausted)
    use_gpu(DEVICES["RTX4090"])
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"]
    assert main([*overrides, *settings, "trainer.device=auto"]) == 1
    message = capsys.readouterr().err
    assert "error: out of GPU memory in update_actor (tried to allocate 2.32 GiB" in message
    assert "the plan expected up to " in message and "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in message
