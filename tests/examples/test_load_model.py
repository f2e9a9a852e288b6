"""The dry run of docs/large_models.md prints the bytes per rank of a 32B shape."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def test_the_documented_dry_run_prints_bytes_per_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "large_models.md").read_text()
    (command,) = re.findall(r"```bash\n(python benchmarks/load_model.py .*)\n```", page)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    importlib.import_module("load_model").main(shlex.split(command)[2:])
    printed = capsys.readouterr().out
    assert "32,763,876,352 parameters, 131.1 GB" in printed
    shards = [int(number.replace(",", "")) for number in re.findall(r"│ \d +│ +([\d,]+) │", printed)]
    assert len(shards) == 8 and sum(shards) == 4 * 32_763_876_352
    assert max(shards) <= 16_400_000_000
    assert not dist.is_initialized()
