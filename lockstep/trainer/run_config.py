"""The configuration that a run leaves in its folder, and what it tells about the next run there."""

from pathlib import Path

import yaml

from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import get_in, to_plain

FILE = "config.yaml"
IDENTITY = ("algorithm.adv_estimator", "actor_rollout_ref.model.path", "critic.enable", "data.train_files")
"""Keys whose change makes another experiment of a run."""


def write_run_config(run_dir: Path, config: PPOConfig) -> None:
    (run_dir / FILE).write_text(yaml.safe_dump(to_plain(config), sort_keys=False))


def refuse_another_run(run_dir: Path, config: PPOConfig) -> None:
    """ValueError where the folder's checkpoints belong to another experiment than `config` describes."""
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
            f"trainer.default_local_dir={run_dir} holds the checkpoints of another experiment: {'; '.join(changed)}. "
            "Set another trainer.default_local_dir; or trainer.resume_mode=disable to start anew here; or "
            "trainer.resume_mode=resume_path with trainer.resume_from_path to go on from its weights on purpose"
        )
