"""Whole configurations as users of verl write them, scaled down."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.trainer.main_ppo import main
from tests.hub import use_hub, write_cache
from tests.tiny import save_tiny_model, write_rows

GRPO_CONFIG = """
algorithm:
  adv_estimator: grpo
  gamma: 1.0
  use_kl_in_reward: false
data:
  train_files: ['{files}/train.parquet']
  val_files: ['{files}/val.parquet']
  train_batch_size: 8
  max_prompt_length: 48
  max_response_length: 8
actor_rollout_ref:
  model:
    path: {files}/model
    use_remove_padding: true
    enable_gradient_checkpointing: true
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 4
    clip_ratio_low: 0.8
    clip_ratio_high: 1.2
    optim:
      lr: 1e-6
    fsdp_config:
      param_offload: true
      optimizer_offload: true
  rollout:
    mode: async
    tensor_model_parallel_size: 1
    n: 4
    temperature: 1.0
    top_p: 0.9
custom_reward_function: {{path: {files}/reward.py}}
trainer:
  nnodes: 1
  n_gpus_per_node: 1
  total_epochs: 1
  save_freq: 100
  test_freq: 50
  logger: [console, tensorboard]
"""

PPO_CONFIG = """
algorithm:
  adv_estimator: gae
  gamma: 0.99
  lam: 0.95
  use_kl_in_reward: true
  kl_ctrl:
    kl_coef: 0.01
critic:
  strategy: fsdp
  ppo_mini_batch_size: 4
  optim:
    lr: 5e-6
  fsdp_config:
    param_offload: true
"""


def train(config: str, files: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    (folder / "run.yaml").write_text(config.format(files=files))
    assert main(["--config-name", str(folder / "run.yaml"), f"trainer.default_local_dir={folder}/out", *overrides]) == 0
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_grpo_with_offload_and_async_mode(tiny_run_files: Path, tmp_path: Path) -> None:
    rows = train(GRPO_CONFIG, tiny_run_files, tmp_path)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert rows[1]["actor/grad_norm"] > 0
    assert "val-core/openai/gsm8k/reward/mean@1" in rows[2]
    assert (tmp_path / "out" / "global_step_2" / "manifest.json").is_file()


def test_ppo_with_gae_and_kl_in_the_reward(tiny_run_files: Path, tmp_path: Path) -> None:
    merged = yaml.safe_load(GRPO_CONFIG.format(files=tiny_run_files)) | yaml.safe_load(PPO_CONFIG)
    rows = train(yaml.safe_dump(merged), tiny_run_files, tmp_path, "actor_rollout_ref.rollout.n=1")
    assert rows[1]["critic/vf_loss"] > 0
    assert rows[1]["actor/reward_kl_penalty_coeff"] == 0.01
    assert "timing_s/ref" in rows[1] and "timing_s/values" in rows[1]


SINGLE_GPU_PPO = """
data.train_files={files}/train.parquet
data.val_files={files}/test.parquet
data.train_batch_size=16
data.max_prompt_length=512
data.max_response_length=256
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
critic.optim.lr=1e-5
critic.ppo_micro_batch_size_per_gpu=4
algorithm.kl_ctrl.kl_coef=0.001
trainer.logger=console
trainer.val_before_train=False
trainer.n_gpus_per_node=1
trainer.nnodes=1
trainer.save_freq=10
trainer.test_freq=10
trainer.total_epochs=3
"""
"""As verl's users write it; only the data's path is a placeholder."""


def test_single_gpu_ppo_command_runs_from_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    snapshot = write_cache(tmp_path / "hub", "Qwen/Qwen2.5-0.5B-Instruct", model)
    write_rows(tmp_path / "train.parquet", 16)
    write_rows(tmp_path / "test.parquet", 2)
    use_hub(monkeypatch, tmp_path / "hub", offline=True)
    monkeypatch.chdir(tmp_path)
    short = ["trainer.total_training_steps=1", "trainer.device=cpu"]
    assert main([*SINGLE_GPU_PPO.format(files=tmp_path).split(), *short]) == 0
    assert caplog.text.count(f"Qwen/Qwen2.5-0.5B-Instruct is read from {snapshot}") == 1
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    (row,) = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert row["step"] == 1 and row["critic/vf_loss"] > 0 and "timing_s/ref" in row and "timing_s/values" in row
    assert row["actor/reward_kl_penalty_coeff"] == 0.001
