"""The runs of a soak: the tiny model, trained synchronously and asynchronously with agents that call a tool."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import save_tiny_model, small_run, write_rows

ROLLOUT = "actor_rollout_ref.rollout"
LOOP = """\
from lockstep.agents.loops.tool_agent import ToolAgent
from lockstep.agents.tool_parser import FunctionCall

class CallsATool(ToolAgent):
    '''A turn of one token, a tool call that the untrained model would not make, and another turn.'''

    async def _run(self, conversation, session, interaction, instance_id):
        await conversation.generate(stop_token_ids=range(259))
        call = FunctionCall(name="double", arguments='{"x": 3}')
        if await self._call_tools(conversation, session, [call], 0):
            await conversation.generate(stop_token_ids=range(259))
"""
TOOL = """\
def double(x: int) -> int:
    '''Double a number.

    Args:
        x: The number.
    '''
    return 2 * x
"""
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 3 == 0)
"""
SETTINGS = {
    "synchronous": [f"{ROLLOUT}.mode=sync", "data.dataloader_num_workers=1", "trainer.test_freq=50"],
    "asynchronous, agents": [
        "trainer.async_mode=fully_async",
        "trainer.controller=local",
        "trainer.placement=split",
        "trainer.n_gpus_per_node=2",
        f"{ROLLOUT}.agent.num_workers=1",
        "data.max_response_length=80",
    ],
}
"""Runs by name; each gets the same share of the steps."""


def make_files(folder: Path) -> None:
    """Model, data and code of the runs."""
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 64)
    write_rows(folder / "val.parquet", 4)
    for name, text in (("loop.py", LOOP), ("tool.py", TOOL), ("reward.py", REWARD)):
        (folder / name).write_text(text)


def start(name: str, files: Path, run_dir: Path, num_steps: int, save_freq: int) -> "subprocess.Popen[bytes]":
    """Start a run in its own session; its output is in `run_dir`.txt."""
    agents = [
        f"{ROLLOUT}.agent.default_agent_loop={files}/loop.py:CallsATool",
        f"{ROLLOUT}.multi_turn.function_tool_path={files}/tool.py",
    ]
    command = [
        *(sys.executable, "-m", "lockstep.trainer.main_ppo", *small_run(files)),
        *("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.val_before_train=false"),
        *("trainer.total_epochs=1000000", f"trainer.total_training_steps={num_steps}"),
        *(f"trainer.save_freq={save_freq}", "trainer.max_actor_ckpt_to_keep=2"),
        *("trainer.max_critic_ckpt_to_keep=2", f"trainer.default_local_dir={run_dir}"),
        *SETTINGS[name],
        *(agents if "agents" in name else []),
    ]
    with open(f"{run_dir}.txt", "wb") as output:
        modules = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
        return subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=variables, start_new_session=True
        )
