"""Tiny runs of every kind, and the matrix of replays: `python -m tests.replays` trains each and replays 10 of its steps.

Each must be equal bit for bit, but for the metrics of the rollout's log-probs of agents and with drafts from history, which may
differ by rounding.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.trainer import fsdp_sft_trainer, main_dpo, main_ppo, main_rm
from lockstep.trainer.replay.main_replay import main as replay
from tests.tiny import save_tiny_model, small_run, write_rows

STEPS = 11
SAVE_FREQ = 5
TOOLS = """
import random, time
from lockstep.agents.tool_parser import FunctionCall, ToolParser

class EveryTurn(ToolParser):
    # Every turn is a call: the untrained model writes none, and most of its tokens end a turn.
    opening = "unused"

    @property
    def stop_token_ids(self):
        return list(range(3, 200))

    def parse(self, text, tools=None):
        return text, [FunctionCall(name="double", arguments='{"x": %d}' % len(text))]

def double(x: int) -> int:
    '''Double a number.

    Args:
        x: The number.
    '''
    time.sleep(random.SystemRandom().random() / 100)  # so that requests arrive in another order each time
    return 2 * x
"""


def write_files(folder: Path) -> Path:
    """model/, train.parquet, val.parquet, reward.py, tools.py, chats.jsonl and pairs.jsonl."""
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 16)
    write_rows(folder / "val.parquet", 4)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
    )
    (folder / "tools.py").write_text(TOOLS)
    chats = [{"question": f"{i % 9}+{i % 4}=", "answer": str(i % 9 + i % 4) + " so" * (i % 5)} for i in range(20)]
    pairs = [
        {"prompt": f"{i % 9}+{i % 4}=", "chosen": str(i % 9 + i % 4), "rejected": "no" * (1 + i % 4)} for i in range(20)
    ]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rl(files: Path, *settings: str) -> list[str]:
    short = ["trainer.total_epochs=9", "trainer.val_before_train=false", "trainer.test_freq=4", "trainer.logger=[]"]
    return [*small_run(files), *short, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", *settings]


GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
KL_LOSS = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.01"]


def command(kind: str, files: Path, run: Path) -> list[str]:
    """The settings of a run in `run`."""
    rollout = "actor_rollout_ref.rollout"
    supervised = [f"model.path={files}/model", "data.train_batch_size=4", "optim.lr=1e-3", "trainer.total_epochs=3"]
    supervised += ["trainer.device=cpu", "trainer.logger=[]", "data.max_length=64"]
    pairs = [*supervised, f"data.train_files={files}/pairs.jsonl"]
    commands = {
        "ppo": rl(
            files,
            *("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.1"),
            *(f"critic.model.path={files}/model", "critic.optim.lr=1e-3", f"trainer.rollout_data_dir={run}/rollouts"),
        ),
        "grpo": rl(
            files,
            *(*GRPO, *KL_LOSS, "actor_rollout_ref.actor.ppo_epochs=2", f"trainer.rollout_data_dir={run}/rollouts"),
            *("trainer.rollout_token_data=true", "data.shuffle=true", f"data.val_files={files}/val.parquet"),
        ),
        "one_update": rl(files, *GRPO, *KL_LOSS, "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        "tools": rl(
            files,
            *(*GRPO, "data.max_response_length=60", f"{rollout}.multi_turn.function_tool_path={files}/tools.py"),
            *(f"{rollout}.multi_turn.format={files}/tools.py:EveryTurn", f"{rollout}.multi_turn.max_assistant_turns=3"),
            *(f"{rollout}.agent.default_agent_loop=tool_agent", f"{rollout}.mode=async"),
        ),
        "lora": rl(
            files, *GRPO, *KL_LOSS, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"
        ),
        "drafts": rl(
            files,
            *(*GRPO, "data.max_response_length=60", f"{rollout}.temperature=0.05"),
            f"{rollout}.history_drafts.enable=true",
        ),
        "exact": rl(files, *GRPO, f"{rollout}.exact=true"),
        "sft": [
            *supervised,
            f"data.train_files={files}/chats.jsonl",
            "data.prompt_key=question",
            "data.response_key=answer",
        ],
        "rm": pairs,
        "dpo": pairs,
    }
    return [*commands[kind], f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVE_FREQ}"]


MAINS: dict[str, Callable[[list[str]], int]] = {
    "sft": fsdp_sft_trainer.main,
    "rm": main_rm.main,
    "dpo": main_dpo.main,
}
KINDS = ("ppo", "grpo", "one_update", "tools", "lora", "drafts", "exact", "sft", "rm", "dpo")


def train(kind: str, files: Path, run: Path, *settings: str) -> Path:
    """Train a run of a kind; returns its folder."""
    main = MAINS.get(kind, main_ppo.main)
    assert main([*command(kind, files, run), f"trainer.default_local_dir={run}", *settings]) == 0
    return run


def replayed(run: Path, step: int, *more: str) -> tuple[int, str]:
    """The exit code and the output of a replay."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = replay([str(run), "--step", str(step), *more])
    return code, out.getvalue()


def matrix(kinds: Sequence[str], folder: Path) -> int:
    """Replay steps 1 to 10 of each kind; returns how many are not equal."""
    files, num_failed = write_files(folder), 0
    for kind in kinds:
        run = train(kind, files, folder / kind)
        results = {step: replayed(run, step) for step in range(1, 11)}
        failed = {step: out for step, (code, out) in results.items() if code}
        rounded = sum("rounding" in out for _, out in results.values())
        note = f", {rounded} of them with metrics of rollout log-probs up to rounding" if rounded else ""
        sys.stdout.write(f"{kind}: {10 - len(failed)} of 10 steps equal bit for bit{note}\n" + "".join(failed.values()))
        sys.stdout.flush()
        num_failed += len(failed)
    return num_failed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(min(1, matrix(sys.argv[1:] or KINDS, Path(place))))
