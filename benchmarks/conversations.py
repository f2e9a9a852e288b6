"""Scripted conversations through the embedded engine: how long they take, their memory, and what faulty tools cost.

    python benchmarks/conversations.py [--conversations 2000 --turns 5 --tokens 8 --max-num-seqs 256 --workers 0] [key=value ...]

A tiny model with random weights writes `--tokens` tokens per turn on average; after each turn the script calls a tool, whatever
the model wrote. Of a hundred conversations, one calls a tool that hangs, one a tool that raises and one a tool that returns bytes;
all others must have every turn and no error. `rendering` is the time spent on tool messages and templates, relative to the
CPU time of the rollout (with `--workers 0`). Further `key=value` arguments are overrides.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from lockstep.agents.conversation import Conversation
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.demo.model import make_model_folder
from lockstep.trainer.ppo.sampling import training_rows
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.run.interrupt import Interrupt

PLUGINS = '''
import time, uuid

from lockstep.agents.loops import AgentLoop
from lockstep.agents.tool_parser import FunctionCall
from lockstep.agents.tools.calls import CallLimits, ToolSession

def good() -> str:
    """Works."""
    return "12345"

def hangs() -> str:
    """Exceeds its deadline."""
    time.sleep(60)

def raises() -> str:
    """Raises."""
    raise RuntimeError("out of order")

def binary() -> str:
    """Returns bytes."""
    return b"\\\\x00\\\\xff"

class Script(AgentLoop):
    async def run(self, conversation):
        info = conversation.row["extra_info"]
        limits = CallLimits(timeout_s=self.setup.config.tool_timeout_s)
        session = ToolSession(self.setup.tools, {}, limits, str(uuid.uuid4()), conversation.row)
        try:
            for turn in range(info["turns"]):
                await conversation.generate(stop_token_ids=range(0, 256, info["every"]))
                if turn + 1 == info["turns"]:
                    return
                result = await session.call(FunctionCall(name=info["tool"], arguments="{}"))
                conversation.counts.tool_calls += 1
                conversation.counts.tool_errors += result.failed == "error"
                if not conversation.add([{"role": "tool", "content": result.text}]):
                    return
        finally:
            await session.release()
'''
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
FAULTY = ("hangs", "raises", "binary")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--workers", type=int, default=0)
    args, overrides = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TaskRunner().build(load_config(PPOConfig, [*settings(args, Path(folder)), *overrides]))
        trainer.init_workers()
        try:
            found = measure(trainer)
        finally:
            trainer.close()
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items()))
    return 0 if found["lost"] == found["wrong"] == 0 else 1


def settings(args: argparse.Namespace, folder: Path) -> list[str]:
    words = [f"word{i}" for i in range(240)]  # a vocabulary of 259 tokens, each equally likely
    make_model_folder(folder / "model", 0, words, max_position_embeddings=1 << 20)
    rows = [
        {
            "data_source": "scripted",
            "prompt": [{"role": "user", "content": f"{i}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {
                "index": i,
                "turns": args.turns,
                "every": args.tokens,
                "tool": tool_of(i, args.conversations),
            },
        }
        for i in range(args.conversations)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "plugins.py").write_text(PLUGINS)
    (folder / "reward.py").write_text(REWARD)
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={args.conversations}",
        "data.max_prompt_length=16",
        f"data.max_response_length={args.turns * (3 * args.tokens + 80)}",
        "data.shuffle=false",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.conversations}",
        f"{rollout}.max_num_seqs={args.max_num_seqs}",
        f"{rollout}.agent.default_agent_loop={folder}/plugins.py:Script",
        f"{rollout}.agent.num_workers={args.workers}",
        f"{rollout}.multi_turn.function_tool_path={folder}/plugins.py",
        f"{rollout}.multi_turn.tool_timeout_s=0.5",
        f"custom_reward_function.path={folder}/reward.py",
        f"trainer.default_local_dir={folder}/run",
        "trainer.device=cpu",
        "algorithm.adv_estimator=grpo",
    ]


def tool_of(index: int, num_conversations: int) -> str:
    is_faulty = num_conversations >= 100 and index % 100 < len(FAULTY)
    return FAULTY[index % 100] if is_faulty else "good"


def measure(trainer: Any) -> dict[str, float]:
    timer = Timer()
    prompts = next(trainer._prompts(Interrupt()))
    rows = training_rows(trainer.config, prompts, n=1, step=1, draw=0, first=0, greedy=False)
    before_mb, began, cpu_began = _max_rss_mb(), time.perf_counter(), time.process_time()
    with timer:
        batch = trainer.sampling.rollout_wg.generate_sequences(rows)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    columns, lost, wrong = batch.non_tensor_batch, 0, 0
    for info, reason, turns, errors in zip(
        rows.non_tensor_batch["extra_info"],
        columns["finish_reason"],
        columns["__num_turns__"],
        columns["tool_error_counts"],
    ):
        lost += reason != "stop" or turns != 2 * info["turns"]
        wrong += errors != (info["turns"] - 1 if info["tool"] in FAULTY else 0)
    return {
        "conversations": len(batch),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "sampled_tokens": int(batch.tensors["response_mask"].sum()),
        "lost": lost,
        "wrong": wrong,
        "peak_mb": _max_rss_mb(),
        "peak_before_mb": before_mb,
        "rendering": timer.seconds / cpu_seconds,
    }


class Timer:
    """CPU time of `Conversation.add`, in this process."""

    def __enter__(self) -> "Timer":
        self.seconds, add = 0.0, Conversation.add

        def timed(conversation: Conversation, messages: Any) -> bool:
            began = time.thread_time()
            try:
                return add(conversation, messages)
            finally:
                self.seconds += time.thread_time() - began

        self._add, Conversation.add = add, timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        Conversation.add = self._add  # type: ignore[method-assign]


def _max_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
