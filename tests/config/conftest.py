"""A model folder and prompt files that the checks accept."""

from pathlib import Path

import pytest

from lockstep.config.compose import log_once


@pytest.fixture(autouse=True)
def fresh_notices() -> None:
    log_once.cache_clear()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Paths by name: model, train, val."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("train", "val"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    return {"model": str(model), "train": str(tmp_path / "train.parquet"), "val": str(tmp_path / "val.parquet")}


@pytest.fixture
def minimal(files: dict[str, str]) -> list[str]:
    """The overrides that every run needs."""
    return [f"data.train_files={files['train']}", f"actor_rollout_ref.model.path={files['model']}"]
