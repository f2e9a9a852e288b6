"""A training run of a vision-language model whose agent is shown an image in its second turn."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lockstep.data.images import Picture
from lockstep.trainer.main_ppo import main
from tests.tiny_vision import save_tiny_vision_model, tiny_image

LOOP = """
from PIL import Image
from lockstep.agents.loops import AgentLoop

class Look(AgentLoop):
    '''Two turns of one token each: every token ends a turn, since the untrained model ends none.'''

    async def run(self, conversation):
        every = range(len(conversation.renderer.tokenizer))
        turn = await conversation.generate(stop_token_ids=every)
        image = Image.new("RGB", (32, 32 if turn.token_ids[0] % 2 else 64), "red")
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "again"}]
        if conversation.add([{"role": "user", "content": parts}]):
            await conversation.generate(stop_token_ids=every)
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def rows_with_images(path: Path) -> Path:
    """Every second row has an image; two of them have the same text."""
    rows: list[dict[str, Any]] = []
    for number in range(4):
        images = [Picture(tiny_image(32, 32, seed=number)).file] if number % 2 == 0 else []
        content = "<image>how many?" if images else f"{number}+1?"
        rows.append(
            {
                "data_source": "x",
                "prompt": [{"role": "user", "content": content}],
                "images": [{"bytes": image} for image in images],
                "reward_model": {"style": "rule", "ground_truth": "1"},
            }
        )
    pd.DataFrame(rows).to_parquet(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        ["actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.rollout.agent.num_workers=1"],
        ["trainer.async_mode=colocated"],
    ],
)
@pytest.mark.usefixtures("no_registrations")
def test_rollout_and_training_agree(mode: list[str], tmp_path: Path) -> None:
    save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    rows_with_images(tmp_path / "train.parquet")
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "own_reward.py").write_text(REWARD)
    arguments = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={tmp_path}/train.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:Look",
        f"custom_reward_function.path={tmp_path}/own_reward.py",
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        *mode,
    ]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/pg_loss" in line]
    assert len(steps) == 2 and all(step["num_turns/mean"] == 4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert steps[0]["training/rollout_probs_diff_max"] < 1e-4
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
