"""Runs that go out of memory end with the weights of runs whose micro-batches were small from the start."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.micro_batch_limits import MicroBatchFailure
from lockstep.observability.glossary import explain as explain_metric
from lockstep.trainer import main_dpo, main_ppo
from lockstep.trainer.run.failures import explain
from lockstep.trainer.run.smaller_micro_batches import STATE, SmallerMicroBatches
from lockstep.trainer.run.training_run import TRAINER_STATE
from lockstep.utils.state_file import load_state
from tests.metrics import metrics_of, numbers_of
from tests.out_of_memory import Memory, limited
from tests.programs import Program

pytestmark = pytest.mark.first

ARR = "actor_rollout_ref"
PPO = [
    "algorithm.adv_estimator=gae",
    f"{ARR}.rollout.n=2",
    f"{ARR}.actor.use_kl_loss=true",
    f"{ARR}.actor.use_dynamic_bsz=true",
    f"{ARR}.actor.ppo_max_token_len_per_gpu=1000",
    "critic.ppo_micro_batch_size_per_gpu=8",
    "critic.forward_micro_batch_size_per_gpu=8",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.audit.micro_batch_split=off",  # which runs out of memory, too
]


def sizes_of(checkpoint: Path) -> dict[str, int]:
    saved = load_state(checkpoint / TRAINER_STATE)[STATE]["sizes"]
    return {key: entry["size"] for key, entry in saved.items()}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.rglob("model.safetensors")))


def check_equal(folder: Path, other: Path, step: int, *roles: str) -> None:
    """Weights of a step, and the metrics of all, bit for bit."""
    for role in roles:
        weights, expected = (_weights(run / f"global_step_{step}" / role) for run in (folder, other))
        assert all(torch.equal(weights[name], expected[name]) for name in expected), role
    assert numbers_of(folder) == numbers_of(other)


@pytest.mark.slow
def test_ppo_equals_the_configured_sizes_and_resumes_with_them(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(name: str, steps: int, *extra: str) -> int:
        place = [f"trainer.default_local_dir={tmp_path}/{name}", f"trainer.total_training_steps={steps}"]
        return main_ppo.main([*overrides, *PPO, *place, *extra])

    with limited(Memory(70, "backward")) as memory, caplog.at_level(logging.WARNING):
        assert run("given", 2) == 0
    rows = metrics_of(tmp_path / "given")
    assert rows[0]["perf/out_of_memory_retries"] == rows[1]["perf/out_of_memory_retries"] == memory.num_failures > 3
    assert all(explain_metric(name) for name in rows[0] if "micro_batch" in name or "out_of" in name)
    sizes = sizes_of(tmp_path / "given" / "global_step_2")
    names = {"update_actor", "old_log_probs", "reference_log_probs", "update_critic", "values"}
    assert {name.rpartition("/")[2] for name in rows[0] if "micro_batch_size" in name} == names
    assert {rows[0][f"perf/micro_batch_size/{name}"] for name in names} == set(map(float, sizes.values()))
    [line] = [r.message for r in caplog.records if f"{ARR}.actor.ppo_max_token_len_per_gpu=1000" in r.message]
    assert f"with {sizes[f'{ARR}.actor.ppo_max_token_len_per_gpu']};" in line

    assert run("small", 2, *(f"{key}={size}" for key, size in sizes.items())) == 0
    check_equal(tmp_path / "given", tmp_path / "small", 2, "actor", "critic")

    with limited(Memory(70, "backward")) as memory:
        assert run("given", 3) == 0
    assert memory.num_failures == 0
    assert sizes_of(tmp_path / "given" / "global_step_3") == sizes


LOSS = """
import torch
from pathlib import Path
from lockstep.algorithms.losses.policy import get_policy_loss_fn

def loss(**inputs):
    is_first = torch.distributed.is_initialized() and torch.distributed.get_rank() == 0
    if is_first and len(inputs["log_prob"]) > 2 and Path("FOLDER/global_step_1").exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return get_policy_loss_fn("vanilla")(**inputs)
"""
"""Runs out of memory on one of several ranks; the other waits for it in a collective."""


@pytest.mark.slow
def test_several_ranks_are_restarted_with_smaller_micro_batches(overrides: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    key = f"{ARR}.actor.ppo_micro_batch_size_per_gpu"
    run, alone = tmp_path / "run", tmp_path / "alone"
    (tmp_path / "mine.py").write_text(LOSS.replace("FOLDER", str(run)))
    command = [*overrides, "algorithm.adv_estimator=grpo", f"{ARR}.rollout.n=4", "trainer.save_freq=1", f"{key}=4"]
    command += [f"{ARR}.actor.policy_loss.loss_mode='{tmp_path}/mine.py:loss'", "trainer.total_training_steps=2"]
    command += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    program = Program("lockstep.trainer.main_ppo", [*command, "trainer.n_gpus_per_node=2"], tmp_path)
    assert program.wait() == 0, program.stderr
    assert ": out of GPU memory in update_actor" in program.stderr and "\nerror: " not in program.stderr
    assert f"going on with {key}=2; restarting the workers from" in program.stderr
    assert "global_step_1" in program.stderr
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2]
    retries = [row.get("perf/out_of_memory_retries") for row in rows]
    assert retries == [None, 1] and rows[1]["perf/micro_batch_size/update_actor"] == 2
    assert sizes_of(run / "global_step_2") == {key: 2}
    assert main_ppo.main([*command, f"trainer.default_local_dir={alone}"]) == 0
    for row, expected in zip(rows, metrics_of(alone)):
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
    weights, expected = (_weights(folder / "global_step_2" / "actor") for folder in (run, alone))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=3e-5)


@pytest.mark.slow
def test_an_engine_that_cannot_retry_is_restarted_from_the_last_checkpoint(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FsdpEngine, "_can_retry", property(lambda self: False))
    key = f"{ARR}.actor.ppo_micro_batch_size_per_gpu"
    command = [*overrides, "algorithm.adv_estimator=grpo", f"{ARR}.rollout.n=2", "trainer.save_freq=1", f"{key}=4"]
    command += ["trainer.val_before_train=false", "trainer.total_training_steps=2"]
    with limited(Memory(70, "backward", updates_only=True)) as memory:
        assert main_ppo.main(command) == 0
    assert memory.num_failures == 1 and caplog.text.count(f"going on with {key}=2; restarting the workers from") == 1
    rows = metrics_of(tmp_path / "run")
    assert [row["perf/out_of_memory_retries"] for row in rows] == [1, 1]
    assert sizes_of(tmp_path / "run" / "global_step_2") == {key: 2}
    small = [f"{key}=2", f"trainer.default_local_dir={tmp_path}/small"]
    assert main_ppo.main([*command, *small]) == 0
    names = ("training/restarts",)
    numbers = [
        {name: value for name, value in row.items() if name not in names} for row in numbers_of(tmp_path / "run")
    ]
    assert numbers == numbers_of(tmp_path / "small")


def test_pairs_stay_together(tmp_path: Path, tiny_run_files: Path) -> None:
    rows = [
        f'{{"prompt": "{i}+1=", "chosen": "{"y" * (i % 5 + 1)}", "rejected": "{"n" * (i % 3 + 4)}"}}\n'
        for i in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))

    def run(name: str, *extra: str) -> int:
        command = [
            f"model.path={tiny_run_files}/model",
            f"data.train_files={tmp_path}/pairs.jsonl",
            "trainer.device=cpu",
        ]
        command += ["data.train_batch_size=8", "data.max_length=64", "trainer.total_epochs=2", "optim.lr=1e-3"]
        return main_dpo.main([*command, f"trainer.default_local_dir={tmp_path}/{name}", *extra])

    with limited(Memory(150, "backward")) as memory:
        assert run("given", "data.micro_batch_size_per_gpu=8") == 0
    assert metrics_of(tmp_path / "given")[-1]["perf/out_of_memory_retries"] == memory.num_failures > 0
    sizes = sizes_of(tmp_path / "given" / "global_step_2")
    assert run("small", *(f"{key}={size}" for key, size in sizes.items())) == 0
    check_equal(tmp_path / "given", tmp_path / "small", 2, "huggingface")


def test_a_single_sequence_that_does_not_fit_ends_the_run(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with limited(Memory(5)):
        assert main_ppo.main([*overrides, *PPO, "trainer.total_training_steps=1"]) == 1
    line = capsys.readouterr().err
    assert "update_actor" in line or "compute_log_prob" in line
    assert "error: out of GPU memory in compute_log_prob" in line and "prompt, 8 response) does not fit: lower" in line
    assert f"{ARR}.actor.fsdp_config.param_offload=true, or use more GPUs" in line


def error_with(failure: MicroBatchFailure, method: str) -> torch.OutOfMemoryError:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error.micro_batch = failure  # type: ignore[attr-defined]
    error.add_note(f"raised in rank 1 of 2 by Worker.{method}")
    return error


def test_what_to_set_for_a_long_sequence() -> None:
    config = load_config(PPOConfig, ["critic.model.enable_gradient_checkpointing=false"], run_checks=False)
    line = explain(error_with(MicroBatchFailure("critic.k", None, 700, 300, 1), "update_critic"), config)
    assert line is not None and "one sequence of 1000 tokens (700 prompt, 300 response) does not fit" in line
    assert "critic.model.enable_gradient_checkpointing=true" in line and "data.max_response_length" in line
    pair = explain(error_with(MicroBatchFailure("critic.k", None, 700, 300, 2), "update_critic"), config)
    assert pair is not None and "2 sequences that stay together of 1000 tokens" in pair
    smaller = explain(error_with(MicroBatchFailure("critic.k", 64, 700, 300, 9), "update_critic"), config)
    assert smaller is not None and smaller.endswith("set critic.k=64")


def test_what_to_set_after_a_trial_of_the_split_audit(tiny_run_files: Path) -> None:
    files = [f"model.path={tiny_run_files}/model", f"data.train_files={tiny_run_files}/train.parquet"]
    for settings, expected in (
        ([], "set data.max_token_len_per_gpu=500"),
        (["data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=4"], "set data.micro_batch_size_per_gpu=2"),
    ):
        config = load_config(SFTConfig, [*files, *settings])
        line = explain(error_with(MicroBatchFailure("num_rows", 2, 700, 300, 4), "train_batch"), config)
        assert line is not None and expected in line, line


def test_sizes_of_a_checkpoint_are_dropped_if_the_key_has_changed() -> None:
    def of(value: int) -> SmallerMicroBatches:
        return SmallerMicroBatches(
            load_config(PPOConfig, [f"{ARR}.actor.ppo_max_token_len_per_gpu={value}"], run_checks=False)
        )

    before = of(4096)
    assert before.metrics() == before.state() == {}
    before.note([(f"{ARR}.actor.ppo_max_token_len_per_gpu", 2048), (f"{ARR}.actor.ppo_max_token_len_per_gpu", 1024)])
    for value, sizes in ((4096, {f"{ARR}.actor.ppo_max_token_len_per_gpu": 1024}), (512, {}), (8192, {})):
        after = of(value)
        after.load(before.state())
        assert after.sizes == sizes and after.num_retries == 2
    empty = of(4096)
    empty.load({"num_updates": 3})
    assert empty.sizes == {}
