"""Runs with `strategy=megatron`: every layout gives the samples, metrics and weights of the FSDP engine in one process."""

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

pytest.importorskip("megatron.core")
pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.engines.train.test_megatron_ranks import save_family
from tests.shared_processes import SharedProcesses
from tests.trainer import test_scale
from tests.trainer.test_scale import DYNAMIC, Runs, assert_equal, workers
from tests.trainer.test_sft import KILLER

ROOT = Path(__file__).parents[2]
ACTOR, REF, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "model", "rollout"))
STEPS = 5
SHORT = ["trainer.total_training_steps=3"]
LENGTH = [f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=3", "trainer.save_freq=4"]
GRPO = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.1",
]
many = pytest.mark.megatron


def megatron(tp: int = 1, pp: int = 1, ep: int = 1, section: str = f"{ACTOR}.megatron", **others: object) -> list[str]:
    """All roles on Megatron: they follow the actor."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    changed = {name: value for name, value in sizes.items() if value != 1} | others
    return [
        f"{section.removesuffix('.megatron')}.strategy=megatron",
        *(f"{section}.{k}={v}" for k, v in changed.items()),
    ]


LAYOUTS = {
    "local": megatron(),
    "1": [*workers(1), *megatron(), *DYNAMIC],
    "2-dp": [*workers(2), *megatron()],
    "2-dp-whole-optimizer": [*workers(2), *megatron(use_distributed_optimizer="false")],
    "2-tp": [*workers(2), *megatron(tp=2), *DYNAMIC],
    "2-tp-without-sequence-parallelism": [*workers(2), *megatron(tp=2, sequence_parallel="false")],
    "2-pp": [*workers(2), *megatron(pp=2), *DYNAMIC],
    "4-tp-dp": [*workers(4), *megatron(tp=2)],
    "4-pp-dp": [*workers(4), *megatron(pp=2)],
    "4-tp-pp": [*workers(4), *megatron(tp=2, pp=2), *DYNAMIC],
    "2-tp-rollout-over-ranks": [*workers(2), *megatron(tp=2), f"{ROLLOUT}.tensor_model_parallel_size=2"],
    "4-hybrid": [*workers(4, "hybrid"), *megatron(tp=2), "critic.megatron.tensor_model_parallel_size=1"],
}
"""The last has the actor and the critic in pools of two, with different layouts."""


@pytest.fixture(scope="module")
def runs(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory, shared_processes: SharedProcesses) -> Runs:
    runs: Runs = test_scale.runs.__wrapped__(tiny_run_files, tmp_path_factory, shared_processes)  # type: ignore[attr-defined]
    return runs


@pytest.mark.parametrize("layout", ["local", "2-tp"])
def test_a_short_run(runs: Runs, layout: str) -> None:
    assert_equal(runs(*LAYOUTS[layout], *SHORT, "trainer.save_freq=3"), runs(*SHORT, "trainer.save_freq=3"), 3)


@many
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", [[], GRPO], ids=["ppo", "grpo"])
def test_every_layout_trains_as_fsdp_in_one_process(runs: Runs, settings: list[str], layout: str) -> None:
    if settings is GRPO and layout == "4-hybrid":
        pytest.skip("GRPO has no critic")
    assert_equal(runs(*settings, *LAYOUTS[layout], *LENGTH), runs(*settings, *LENGTH), STEPS)


@many
@pytest.mark.parametrize(
    ("before", "after"),
    [("2-tp", "2-tp"), ("2-tp", "2-pp"), ("4-tp-pp", "local"), ("2-dp", "4-pp-dp"), ("2-pp", None), (None, "4-tp-dp")],
)
def test_a_run_resumes_in_another_layout_or_engine(runs: Runs, before: str | None, after: str | None) -> None:
    settings: dict[str | None, list[str]] = {None: []} | LAYOUTS
    saved = runs(*settings[before], *LENGTH).folder / "global_step_4"
    resumed = runs(*settings[after], *LENGTH, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    assert_equal(resumed, runs(*settings[before], *LENGTH), steps=STEPS - 4)


@many
@pytest.mark.parametrize(
    ("count", "sizes"), [(2, {"ep": 2}), (4, {"tp": 2, "ep": 2, "expert_tensor_parallel_size": 1})]
)
def test_experts_on_several_ranks(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory, count: int, sizes: dict[str, int]
) -> None:
    folder = runs.folder / "experts"
    if not folder.exists():
        save_family(folder, "qwen3_moe")
    settings = [*GRPO, f"{MODEL}.path={folder}", *SHORT, "trainer.save_freq=3"]
    assert_equal(runs(*settings, *workers(count), *SHORT, *megatron(**sizes)), runs(*settings), 3)  # type: ignore[arg-type]


@many
@pytest.mark.parametrize(
    ("layout", "code"),
    [(megatron(), -signal.SIGKILL), ([*workers(2), *megatron(tp=2)], 1)],
    ids=["local", "2-tp"],
)
def test_a_killed_run_resumes_bit_for_bit(overrides: list[str], tmp_path: Path, layout: list[str], code: int) -> None:
    """On Ray the controller is killed, and the command reports it."""
    (tmp_path / "killer.py").write_text(KILLER)
    command = [*overrides, *layout, "trainer.total_training_steps=4", "trainer.save_freq=2"]
    assert main_ppo.main([*command, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    signals = [*command, f"trainer.logger={tmp_path}/killer.py:Tracker"]
    variables = {"AT_STEP": "3", "BY_SIGNAL": str(signal.SIGKILL.value)}
    killed = Program("lockstep.trainer.main_ppo", signals, tmp_path, **variables)
    assert killed.wait() == code
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert main_ppo.main(command) == 0
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    weights = [tmp_path / run / "global_step_4/actor/huggingface/model.safetensors" for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@many
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=["dp", "tp", "pp"])
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


SEED = """\
actor_rollout_ref:
  model:
    path: {model}
    use_remove_padding: true
    enable_gradient_checkpointing: true
  actor:
    strategy: megatron
    ppo_mini_batch_size: 4
    ppo_micro_batch_size_per_gpu: 1
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    optim: {{lr: 1.0e-6, weight_decay: 0.1, clip_grad: 1.0}}
    megatron:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      param_offload: true
      optimizer_offload: true
      grad_offload: true
      override_transformer_config:
        recompute_granularity: null
        recompute_modules: [core_attn]
        recompute_method: null
        recompute_num_layers: null
        attention_backend: flash
  rollout:
    name: embedded
    n: 2
    tensor_model_parallel_size: 1
    gpu_memory_utilization: 0.6
    log_prob_micro_batch_size_per_gpu: 1
  ref:
    log_prob_micro_batch_size_per_gpu: 1
    megatron: {{param_offload: true}}
algorithm: {{adv_estimator: grpo}}
data:
  train_files: {data}
  train_batch_size: 4
  max_prompt_length: 40
  max_response_length: 8
trainer: {{total_training_steps: 1, device: cpu, default_local_dir: {folder}, logger: [console]}}
"""


def test_the_seeds_config_runs_as_printed(tiny_run_files: Path, tmp_path: Path) -> None:
    """`strategy: megatron` in a file, with the worker class that their programs import."""
    from lockstep.verl.workers.megatron_workers import ActorRolloutRefWorker
    from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker as Served

    assert ActorRolloutRefWorker is Served
    files = {"model": tiny_run_files / "model", "data": tiny_run_files / "train.parquet", "folder": tmp_path / "run"}
    (tmp_path / "run.yaml").write_text(SEED.format(**files))
    assert main_ppo.main(["--config-name", str(tmp_path / "run.yaml")]) == 0
