"""GRPO of a tiny hybrid model (Gated DeltaNet and attention) on the embedded engine, in conversations with tool results."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.trainer.main_ppo import main
from tests.models import architectures
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("no_registrations")
LOOP = """
from lockstep.agents.loops import AgentLoop

class Tool(AgentLoop):
    '''Turns of a few tokens, each followed by a tool result.'''

    async def run(self, conversation):
        ends = range(0, 259, 3)
        for number in range(3):
            turn = await conversation.generate(ends)
            if not turn.ended or not conversation.add([{"role": "tool", "content": str(number)}]):
                return
"""
ROLLOUT = "actor_rollout_ref.rollout"
GRPO = [
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.name=embedded",
    f"{ROLLOUT}.n=3",
    "data.max_response_length=60",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
]


@pytest.mark.parametrize(
    "settings",
    [
        [f"{ROLLOUT}.max_num_seqs=5", f"{ROLLOUT}.max_num_batched_tokens=48"],
        pytest.param(
            ["trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4"],
            marks=pytest.mark.slow,
            id="two processes, LoRA",
        ),
    ],
)
def test_a_hybrid_model_trains_on_its_own_rollout(
    settings: list[str], overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architectures.save_tiny_model("qwen3_5_text", tmp_path / "model", vocab_size=259, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "loop.py").write_text(LOOP)
    num_slots: list[int] = []
    schedule = EmbeddedEngine._schedule

    def noted(self: EmbeddedEngine, batch: Any) -> None:
        schedule(self, batch)
        num_slots.append(self.blocks.num_slots)

    monkeypatch.setattr(EmbeddedEngine, "_schedule", noted)
    loop = f"{ROLLOUT}.agent.default_agent_loop={tmp_path}/loop.py:Tool"
    assert main([*overrides, *GRPO, loop, f"actor_rollout_ref.model.path={tmp_path}/model", *settings]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/pg_loss" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4 and step["actor/grad_norm"] > 0
        assert step["num_turns/max"] > 2
    if "trainer.n_gpus_per_node=2" not in settings:  # else in other processes
        assert num_slots and min(num_slots) > 0
    assert list((tmp_path / "run" / "global_step_2" / "actor").iterdir())
