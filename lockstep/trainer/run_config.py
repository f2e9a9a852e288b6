"""The config saved in a run's folder, and the check that a resumed run belongs to it."""

from pathlib import Path

import yaml

from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import get_in, to_plain

FILE = "config.yaml"
IDENTITY = ("algorithm.adv_estimator", "actor_rollout_ref.model.path", "critic.enable", "data.train_files")
"""Keys that identify an experiment."""


def write_run_config(run_dir: Path, config: PPOConfig) -> None:
    (run_dir / FILE).write_text(yaml.safe_dump(to_plain(config), sort_keys=False))


def check_same_experiment(run_dir: Path, config: PPOConfig) -> None:
    """ValueError if the folder's checkpoints belong to another experiment than `config`."""
    path = run_dir / FILE
    if not path.is_file():
        return
    saved, now = yaml.safe_load(path.read_text()), to_plain(config)
    changed = [
        f"{key} was {get_in(saved, key, None)} and is {get_in(now, key, None)}"
        for key in IDENTITY
        if get_in(saved, key, None) != get_in(now, key, None)
    ]
    if changed:
        raise ValueError(
            f"trainer.default_local_dir={run_dir} has checkpoints of another experiment: {'; '.join(changed)}. "
            "Set another trainer.default_local_dir; or trainer.resume_mode=disable to start from scratch; or "
            "trainer.resume_mode=resume_path with trainer.resume_from_path to continue from its weights"
        )
