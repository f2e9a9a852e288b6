"""A tiny model and prompt files, and the command line of a run on them."""

from pathlib import Path

import pytest

from tests.tiny import save_tiny_model, small_run, write_rows


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
    return [
        *small_run(tiny_run_files),
        "trainer.total_epochs=2",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
