"""`lockstep replay` of a run with two workers: on two workers bit for bit, and in one process up to rounding."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.replay.runners import ReplayRunner
from lockstep.trainer.run import ray_runner
from tests.replays import command, replayed, write_files

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.shared_processes import OnSharedProcesses, SharedProcesses, group_class


@pytest.mark.slow
def test_workers(shared_processes: SharedProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, run = write_files(tmp_path), tmp_path / "run"
    settings = ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", "trainer.save_freq=2"]
    settings += [f"trainer.default_local_dir={run}", "trainer.test_freq=-1"]
    config = load_config(PPOConfig, [*command("grpo", files, run), *settings])
    assert OnSharedProcesses(shared_processes).run(config) == 0

    def on_shared(config: PPOConfig, make: Callable[[], ReplayRunner]) -> int:
        runner = make()
        build = runner.build

        def build_on_shared(config: PPOConfig) -> PPOTrainer:
            trainer = build(config)
            trainer.workers.group_class = group_class(shared_processes)
            return trainer

        monkeypatch.setattr(runner, "build", build_on_shared)
        return runner.run(config)

    monkeypatch.setattr(ray_runner, "run_on_ray", on_shared)
    code, out = replayed(run, 3)
    assert code == 0 and "differ" not in out, out
    code, out = replayed(run, 3, "--set", "actor_rollout_ref.actor.kl_loss_coef=0.3")
    assert code == 1 and "first difference: loss: loss of the actor, rank 0, update 1:" in out, out
    code, out = replayed(run, 3, "--local")
    assert code == 0 and "in one process instead of several" in out, out
    assert not shared_processes.lent
