"""`benchmarks/simulated_cluster.py`: a step of the real trainer on stand-in workers."""

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_bytes_do_not_grow_with_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="its serialisation")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    main = runpy.run_path(str(BENCHMARKS / "simulated_cluster.py"))["main"]
    rows = "--prompts 64 --samples 4 --prompt 64 --response 512 --mean-response 200 --updates 2"
    assert main([*["--ranks", "8", "64", "--json"], str(tmp_path / "out.json"), *rows.split()]) == 0
    small, large = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (small["calls"], large["calls"]) == (4 * 8, 4 * 64)  # generate, two passes, one update
    numbers = 4 * small["tokens"]
    assert small["sent_gb"] * 1e9 > 3 * numbers and small["received_gb"] * 1e9 > 3 * numbers
    for key in ("sent_gb", "received_gb"):
        assert large[key] < 1.25 * small[key]  # ranks that share rows get and return them once
    assert small["step_s"] > small["controller_s"] > 0
