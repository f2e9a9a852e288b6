"""GRPO of tiny models with chunked, latent and indexed attention, and of one that computes by its own forward."""

from pathlib import Path

import pytest

from lockstep.trainer.main_ppo import main
from tests.metrics import metrics_of
from tests.models import architectures
from tests.tiny import tiny_tokenizer

GRPO = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=3",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
]
LORA = [
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.target_modules=[q_a_proj,kv_b_proj,o_proj]",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "rollout", "extra"),
    [
        ("llama4_text", "embedded", ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]),
        ("deepseek_v3", "embedded", [*LORA, "actor_rollout_ref.rollout.max_num_batched_tokens=16"]),
        ("deepseek_v32", "embedded", []),
        ("glm_moe_dsa", "embedded", LORA),
        ("gptj", "hf", []),
    ],
)
def test_grpo(model_type: str, rollout: str, extra: list[str], overrides: list[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    architectures.save_tiny_model(model_type, model, vocab_size=259)
    tiny_tokenizer().save_pretrained(model)
    command = [*overrides, *GRPO, *extra, f"actor_rollout_ref.rollout.name={rollout}"]
    assert main([*command, f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path}/run"]) == 0
    for step in metrics_of(tmp_path / "run"):
        assert step["training/rollout_log_probs_gap"] < 1e-4
        assert step["actor/grad_norm"] > 0
