"""A tiny model and prompt files, and the command line of a run on them."""

from pathlib import Path

import pytest

from tests.tiny import save_tiny_model, write_rows


@pytest.fixture(scope="session")
def tiny_run_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/, train.parquet, val.parquet and reward.py (a score that varies with the text)."""
    folder = tmp_path_factory.mktemp("files")
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 16)
    write_rows(folder / "val.parquet", 4)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
    )
    return folder


@pytest.fixture
def overrides(tiny_run_files: Path, tmp_path: Path) -> list[str]:
    """A small run in `tmp_path/run`."""
    files = tiny_run_files
    return [
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"custom_reward_function.path={files}/reward.py",
        "trainer.logger=console",
        "trainer.device=cpu",
        "trainer.total_epochs=2",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
