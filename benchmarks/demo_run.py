"""A run on the model and the sums of `lockstep demo`, on a CPU."""

from pathlib import Path

from lockstep.demo import reward
from lockstep.demo.model import make_model_folder
from lockstep.demo.task import split_problems, write_rows


def make_files(folder: Path) -> list[str]:
    """Write a model and data; return the overrides of a run on them."""
    make_model_folder(folder / "model", seed=0)
    problems, _ = split_problems(seed=0)
    write_rows(folder / "train.parquet", problems, "train")
    return [
        f"data.train_files={folder}/train.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        f"custom_reward_function.path={reward.__file__}",
        "trainer.device=cpu",
    ]
