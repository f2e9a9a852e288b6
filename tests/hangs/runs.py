"""Starts the runs that hangs are planted in: the Lab of tests/faults with the configurations and files of this folder."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from tests.faults.runs import Ended, Lab, Running
from tests.hangs.plants import FOLDER, Plant
from tests.tiny import small_run, write_rows

USER = Path(__file__).parent / "user"
ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 4

GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")
SPLIT = ("trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2")
AGENTS = (
    *GRPO,
    "data.max_response_length=60",
    f"{ROLLOUT}.agent.default_agent_loop={USER}/loops.py:CallsTool",
    f"{ROLLOUT}.multi_turn.tool_timeout_s=600",
    f"{ROLLOUT}.multi_turn.function_tool_path={USER}/tools.py",
)
CONFIGS: dict[str, tuple[str, ...]] = {
    "local": GRPO,
    "colocated": (*GRPO, "trainer.async_mode=colocated"),
    "one_step_off": (*GRPO, "trainer.async_mode=one_step_off", *SPLIT),
    "fully_async": (*GRPO, "trainer.async_mode=fully_async", *SPLIT),
    "agents": AGENTS,
    "agent workers": (*AGENTS, f"{ROLLOUT}.agent.num_workers=2"),
    "async agent workers": (*AGENTS, f"{ROLLOUT}.agent.num_workers=2", "trainer.async_mode=colocated"),
    "ray": (*GRPO, "trainer.n_gpus_per_node=2"),
    "ray agent workers": (*AGENTS, f"{ROLLOUT}.agent.num_workers=2", "trainer.n_gpus_per_node=2"),
    "ray fully_async": (
        *GRPO,
        "trainer.async_mode=fully_async",
        "trainer.controller=ray",
        "trainer.placement=split",
        "trainer.n_gpus_per_node=2",
    ),
}
"""Configurations of `lockstep train` by name. `torchrun` is `lockstep sft` on two ranks."""

WATCHDOG = (
    "trainer.watchdog.min_deadline_s=3",
    "trainer.watchdog.multiple=4",
    "trainer.watchdog.first_deadline_s=40",
    "trainer.on_hang=stop",
)


class HangLab(Lab):
    """url: of a server that never answers, if the case has one."""

    url = ""

    def __enter__(self) -> "HangLab":
        super().__enter__()
        files = self.folder / "files"
        rows = pd.read_parquet(write_rows(files / "talks.parquet", 16))
        rows.assign(interaction_kwargs=[{"name": "teacher"}] * 16).to_parquet(files / "talks.parquet")
        pairs = [{"question": f"{i % 9}+{i % 4}=", "answer": str(i % 9 + i % 4)} for i in range(20)]
        for name in ("train", "val"):
            (files / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        return self

    def train(
        self,
        config: str,
        folder: Path,
        plant: Plant,
        settings: tuple[str, ...] = (),
        disturb: Callable[[Running], None] = lambda run: None,
    ) -> Ended:
        """A run in `folder/run` with the plant. disturb: called once it is started."""
        folder.mkdir(parents=True, exist_ok=True)
        plant.write(folder)
        self._settings = settings
        self.run_variables = {FOLDER: str(folder)}
        if config == "torchrun":
            return self._torchrun(folder, disturb)
        return self.run(config, folder, disturb=disturb)

    def overrides(self, name: str, run_dir: Path) -> list[str]:
        return [
            *small_run(self.folder / "files"),
            f"custom_reward_function.path={USER}/reward.py",
            "reward_model.timeout_s=null",
            "trainer.val_before_train=false",
            "trainer.total_epochs=20",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=1",
            "trainer.test_freq=2",
            f"trainer.default_local_dir={run_dir}",
            *WATCHDOG,
            *CONFIGS[name],
            *self._settings,
        ]

    def _torchrun(self, folder: Path, disturb: Callable[[Running], None]) -> Ended:
        files = self.folder / "files"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += ["-m", "lockstep.trainer.fsdp_sft_trainer", f"model.path={files}/model"]
        command += [f"data.{name}_files={files}/{name}.jsonl" for name in ("train", "val")]
        command += ["data.train_batch_size=4", "data.max_length=64", "optim.lr=1e-3", "trainer.device=cpu"]
        command += ["trainer.save_freq=1", f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=20"]
        command += [f"trainer.default_local_dir={folder}/run", *WATCHDOG, *self._settings]
        (folder / "tmp").mkdir(exist_ok=True)
        variables = self.variables | self.run_variables | {"TMPDIR": str(folder / "tmp")}
        with open(folder / "stdout.txt", "w") as out, open(folder / "stderr.txt", "w") as err:
            process = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=err)
            disturb(Running(process.pid, folder, self))
            try:
                code: int | None = process.wait(timeout=240)
            except subprocess.TimeoutExpired:
                process.kill()
                code = None
        return Ended(code, (folder / "stderr.txt").read_text(), self._left_processes())


def pid_of(folder: Path, name: str) -> int:
    return int((folder / f"{name}.pid").read_text())
