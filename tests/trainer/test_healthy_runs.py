"""Audits find nothing in healthy runs; `python -m tests.healthy_runs` has one of every algorithm, engine and mode."""

from pathlib import Path

import pytest

from tests.healthy_runs import run_one, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "agents", "colocated", "sft"])
def test_no_audit_finds_anything(name: str, files: Path, tmp_path: Path) -> None:
    assert run_one(name, files, tmp_path / "run") is None
