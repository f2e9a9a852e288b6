"""Runs with `strategy=megatron`: every layout gives the samples, metrics and weights of the FSDP engine in one process."""

from pathlib import Path

import pytest

from lockstep.trainer import main_ppo

pytest.importorskip("megatron.core")
pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.engines.train.test_megatron_ranks import save_family
from tests.shared_processes import SharedProcesses
from tests.trainer import test_scale
from tests.trainer.test_scale import DYNAMIC, SAVE_STEP_2, STEPS, Runs, assert_equal, workers

ACTOR, REF, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "model", "rollout"))
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


QUICK = ("local", "2-tp")
"""In `make test`; the others are marked."""


@pytest.mark.parametrize(
    ("settings", "layout"),
    [pytest.param([], layout, marks=[] if layout in QUICK else many) for layout in LAYOUTS]
    + [pytest.param(GRPO, layout, marks=many) for layout in ("local", "2-tp", "2-pp", "4-tp-pp")],
    ids=lambda value: value if isinstance(value, str) else "grpo" if value else "ppo",
)
def test_every_layout_trains_as_fsdp_in_one_process(runs: Runs, settings: list[str], layout: str) -> None:
    assert_equal(runs(*settings, *LAYOUTS[layout], *SAVE_STEP_2), runs(*settings))


@many
@pytest.mark.parametrize(
    ("before", "after"),
    [("2-tp", "2-tp"), ("2-tp", "2-pp"), ("4-tp-pp", "local"), ("2-dp", "4-pp-dp"), ("2-pp", None), (None, "4-tp-dp")],
)
def test_a_run_resumes_in_another_layout_or_engine(runs: Runs, before: str | None, after: str | None) -> None:
    settings: dict[str | None, list[str]] = {None: []} | {name: [*own, *SAVE_STEP_2] for name, own in LAYOUTS.items()}
    saved = runs(*settings[before]).folder / "global_step_2"
    resumed = runs(*settings[after], "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    assert_equal(resumed, runs(*settings[before]), steps=STEPS - 2)


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
    settings = [*GRPO, f"{MODEL}.path={folder}"]
    assert_equal(runs(*settings, *workers(count), *megatron(**sizes)), runs(*settings))  # type: ignore[arg-type]


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
