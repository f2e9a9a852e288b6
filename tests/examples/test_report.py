"""`benchmarks/report.py` and `report_tables.py`: runs, results and tables, with a fake benchmark."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """
import json, os, sys
sides = {"lockstep": {"step_s": 2.0, "peak_gb": 1.0}, "trl": {"step_s": 5.0}}
present = {name: figures for name, figures in sides.items() if name in os.environ["SIDES"]}
failures = {} if len(present) == 2 else {"trl": "Traceback\\nModuleNotFoundError: No module named 'trl'"}
json.dump({"results": present, "failures": failures}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
sys.exit(len(failures))
"""


@pytest.fixture(scope="module")
def report() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # as `python benchmarks/report.py` does
        return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "report.py")))


@pytest.fixture(scope="module")
def tables(report: SimpleNamespace) -> ModuleType:
    return sys.modules[report.write_tables.__module__]


@pytest.fixture
def fake_run(report: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    (tmp_path / "grpo_step.py").write_text(FAKE)
    return report.Run("fake", "cpu", f"PYTHONHASHSEED=0 {tmp_path}/grpo_step.py --steps 1")


PYTHONS = {"vllm": sys.executable, "trl": sys.executable}


def fake_table(tables: ModuleType) -> dict[str, object]:
    row = tables.Row("a step", "fake", "step_s", "trl")
    return {"fake": lambda results: [row.text(results, row.label)]}


def test_a_run_is_stored_and_becomes_a_row(
    report: SimpleNamespace,
    tables: ModuleType,
    fake_run: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cpu.json").write_text('{"other": {"figures": {"": {"lockstep": {"step_s": 1.0}}}}}')
    monkeypatch.setenv("SIDES", "lockstep trl")
    result = report.measure(fake_run, PYTHONS)
    assert result["missing"] == {}
    assert result["commit"] and result["machine"] and result["date"] and "torch" in result["versions"]
    report.Results(tmp_path / "results").store(fake_run, result)
    stored = json.loads((tmp_path / "results" / "cpu.json").read_text())
    assert set(stored) == {"other", "fake"} and stored["fake"]["figures"][""]["trl"]["step_s"] == 5.0

    text = "before\n<!-- report fake -->\nold\n<!-- end -->\nafter\n"
    page = tables.filled(text, report.Results(tmp_path / "results"), fake_table(tables))
    assert "old" not in page and page.startswith("before\n") and page.endswith("\nafter\n")
    assert "| a step | 2.00 s, 1.0 GB | TRL 5.00 s | 2.50x |" in page
    assert f"- fake: {result['machine']}, {result['date']}, commit {result['commit']}" in page
    assert "other" not in page
    assert page == tables.filled(page, report.Results(tmp_path / "results"), fake_table(tables))


def test_packages_that_the_caller_has_are_found(
    report: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path.py").write_text(
        "import json, os, sys\njson.dump({'path': os.environ['PYTHONPATH']}, open(sys.argv[2], 'w'))"
    )
    monkeypatch.setenv("PYTHONPATH", "/bundle")
    result = report.measure(report.Run("path", "cpu", f"{tmp_path}/path.py"), PYTHONS)
    assert result["figures"][""]["lockstep"]["path"] == f"{ROOT}:/bundle"


def test_a_row_says_that_its_peer_is_missing(
    report: SimpleNamespace,
    tables: ModuleType,
    fake_run: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIDES", "lockstep")
    results = report.Results(tmp_path)
    results.store(fake_run, report.measure(fake_run, PYTHONS))
    page = tables.filled("<!-- report fake --><!-- end -->", results, fake_table(tables))
    assert "| TRL not measured: ModuleNotFoundError: No module named 'trl' |  |" in page


def test_a_table_without_results_says_so(report: SimpleNamespace, tables: ModuleType, tmp_path: Path) -> None:
    for name in tables.TABLES:
        page = tables.filled(f"<!-- report {name} --><!-- end -->", report.Results(tmp_path))
        assert page == f"<!-- report {name} -->\n\nNot measured yet.\n\n<!-- end -->"


def test_a_failed_run_is_named(report: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    with pytest.raises(report.RunError, match=r"fails: .*fails.py --json .* wrote no results \(exit code 3\)"):
        report.measure(report.Run("fails", "cpu", f"{tmp_path}/fails.py"), PYTHONS)


def test_a_run_of_a_real_model_asks_for_it(report: SimpleNamespace) -> None:
    run = report.Run("learning", "cpu", "history_learning.py --model {model} --data {data}")
    with pytest.raises(report.RunError, match=r"learning: give --model and --data$"):
        report.measure(run, PYTHONS | {"model": "", "data": ""})
    with pytest.raises(report.RunError, match=r"learning: give --data$"):
        report.measure(run, PYTHONS | {"model": "folder", "data": ""})


def test_an_unknown_table_is_an_error(report: SimpleNamespace, tables: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no table rollouts; it has "):
        tables.filled("<!-- report rollouts --><!-- end -->", report.Results(tmp_path))


def test_the_pages_have_the_stored_results(report: SimpleNamespace, tables: ModuleType) -> None:
    """`python benchmarks/report.py --tables` would change nothing, every table is on a page and every result has a run."""
    results = report.Results()
    pages = [page.read_text() for page in tables.PAGES]
    assert [tables.filled(page, results) for page in pages] == pages
    assert all(any(f"<!-- report {name} -->" in page for page in pages) for name in tables.TABLES)
    assert set(results.found) <= {run.name for run in report.RUNS}


def test_results_of_the_scripts_become_figures(report: SimpleNamespace) -> None:
    row = {"case": "a x1", "engine": "embedded", "tokens_per_s": 10.0, "startup_s": 2.0}
    rollout = report.by_case({"results": [row, row | {"engine": "vllm"}, row | {"case": "b x1"}]})
    assert rollout["a x1"]["vllm"] == rollout["b x1"]["lockstep"] == {"tokens_per_s": 10.0, "start_s": 2.0}
    drafts = report.by_case({"results": [row | {"engine": "embedded-drafts", "acceptance": 0.8, "drift": None}]})
    assert drafts["a x1"]["embedded-drafts"] == {"tokens_per_s": 10.0, "start_s": 2.0, "acceptance": 0.8}
    launches = {
        "prefill": {"seconds": 1.0, "kernels": {"k": 1.0}},
        "decode": {"seconds": 2.0, "kernels": {}},
        "usual_s": 2.5,
    }
    phases = {"prefill": {"seconds": 1.0}, "decode": {"seconds": 2.0}, "usual": {"seconds": 2.5}}
    assert report.by_launch(launches) == {"": phases}
    assert report.by_epoch({"epochs": [{"faster": 1.0}, {"faster": 2.0}]})[""]["2"] == {"faster": 2.0}
    cycle = {"gb": 1.0, "seconds": {"start": [9.0], "train": [8.0, 1.0, 3.0]}, "used_gib": {"train": [1.0, 2.0, 3.0]}}
    phases = report.by_phase(cycle)[""]
    assert phases["train"] == {"seconds": 2.0, "second_gib": 2.0, "last_gib": 3.0}
    assert phases["start"] == {"seconds": 9.0} and phases["weights"] == {"gb": 1.0}
    failed = {"results": {"1.5b": {"lockstep": {"step_s": 9.0}, "trl": {"failed": "out of memory"}}}}
    assert report.by_run(failed) == {"1.5b": {"lockstep": {"step_s": 9.0}}}
    parts = {"products": {"ms": 2.0, "tflops": 500.0}, "copies": {"ms": 1.0, "tflops": None}}
    profile = report.by_class({"parts": parts, "ms": 4.0, "tflops": 300.0})[""]
    assert profile == parts | {"copies": {"ms": 1.0}, "step": {"ms": 4.0, "tflops": 300.0}}
    train = {"name": "lockstep", "tokens_per_s": 5.0, "ms": 1.0, "mfu": 0.5, "peak_gb": 2.0, "warmup_s": 1.0}
    assert report.by_name({"results": [train]}) == {"": {"lockstep": {"tokens_per_s": 5.0, "ms": 1.0, "peak_gb": 2.0}}}


def test_tables_of_engines_modes_and_histories(report: SimpleNamespace, tables: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path)
    sides = {"lockstep": {"tokens_per_s": 18000.0}, "vllm": {"tokens_per_s": 15000.0}}
    epoch = dict.fromkeys(("plain_s", "drafts_s", "faster", "acceptance", "drafted_share", "mean_length", "same"), 1.0)
    epoch |= {"plain_s": 3.0, "drafts_s": 2.0, "faster": 1.5, "reward": 0.25, "mean_length": 120.4}
    phase = {"seconds": 0.5, "steps": 2, "step_ms": 250.0, "kernel_ms": 100.0}
    phases = {"usual": {"seconds": 1.5}, "prefill": phase, "decode": phase}
    figures = {
        "rollout-7b": {"7b uniform x256": sides},
        "rollout-fp8": {"7b uniform x256": {"embedded-fp8": {"tokens_per_s": 24000.0, "drift": 0.1}}},
        "grpo-alone": {"": {"lockstep": {"step_s": 1.0}}},
        "grpo-exact": {"": {"lockstep": {"step_s": 1.25}}},
        "drafts": {"x4": {"none": {"speedup": 0.99, "acceptance": 0.0}, "1": {"speedup": 3.0, "acceptance": 0.9}}},
        "drafts-ragged": {"3b ragged x192": sides | {"embedded-drafts": {"tokens_per_s": 30000.0, "acceptance": 0.7}}},
        "drafts-ragged-vllm": {"3b ragged x192": sides},
        "drafts-learning-0.7": {"": {"2": epoch}},
        "phases-hybrid": {"": phases},
        "long-1.5b": {"1.5b": {"lockstep": {"peak_gb/gen": 50.0, "planned_gb/gen": 52.4}}},
        "profile-7b": {"": {"products": {"ms": 2.0, "tflops": 500.0}, "copies": {"ms": 1.0}}},
    }
    results.found = {name: {"figures": found} for name, found in figures.items()}
    names = ("fp8", "exact", "drafts", "ragged", "learning", "phases", "memory", "profile")
    rows = [row for name in names for row in tables.TABLES[name](results)]
    assert {
        "| weights | 24,000 tokens/s, log-probs differ by 0.100 | 15,000 tokens/s | 1.60x |",
        "| plain | 18,000 tokens/s | 15,000 tokens/s | 1.20x |",
        "| drafts, 0.9 of the history right | 30,000 tokens/s, 0.70 accepted | 15,000 tokens/s | 2.00x |",
        "| 0.7, 2 | 3.0 s | 2.0 s | 1.50x | 1.00 | 1.00 | 120 | 0.250 | 100.0% |",
        "| Gated DeltaNet hybrid, 1.5B, 128 requests | 1.50 s | 0.50 s | 0.20 s | 250.00 ms | 100.00 ms |",
        "| 0.5B | 1.00 s | 1.25 s | 1.25x |",
        "| 4 | 0.99x, 0.00 accepted | not measured | not measured | 3.00x, 0.90 accepted |",
        "| 1.5B, all parameters | 52.4 | 50.0 | not measured | not measured |",
        "| products | not measured |  | 2.0 ms | 500 TFLOP/s |",
        "| copies | not measured |  | 1.0 ms |  |",
    } <= set(rows)


def test_the_list_shows_every_run(report: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [run.name for run in report.RUNS]
    for run in report.RUNS:
        _, (script, *arguments) = run.words(folder="OUT", vllm="v", trl="t", model="m", data="d")
        assert script == "-m" or Path(script).is_file()
        assert ("OUT/summary.json" in arguments) == (run.name != "demo")
    (uncompiled,) = [run for run in report.RUNS if run.name == "uncompiled"]
    assert uncompiled.words(folder="OUT")[0] == {"TRITON_CACHE_DIR": "OUT/triton"}
