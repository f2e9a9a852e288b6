"""Benchmarks of the controller, at a small scale: they run, and what they compare is equal."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.demo.model import make_model_folder
from lockstep.engines.rollout.embedded.draft_controller import DraftController
from tests.tiny import save_tiny_model, write_rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.slow
def test_no_conversation_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Many conversations at once through the embedded engine; tools that hang, raise or return bytes cost only their own."""
    main = runpy.run_path(str(BENCHMARKS / "conversations.py"))["main"]
    assert main(["--conversations", "200"]) == 0
    found = dict(re.findall(r"(\w+) ([\d.e+]+)", capsys.readouterr().out.splitlines()[-1]))
    assert (found["conversations"], found["lost"], found["wrong"]) == ("200", "0", "0")
    assert float(found["sampled_tokens"]) > 200 * 5


def test_requests_of_both_modes_give_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model_folder(tmp_path, seed=1)
    arguments = f"--model {tmp_path} --prompts 2 --samples 2 --new-tokens 4 --reward-ms 1 --rounds 1"
    monkeypatch.setattr("sys.argv", ["async_rollout.py", *arguments.split()])
    assert runpy.run_path(str(BENCHMARKS / "async_rollout.py"))["main"]() == 0
    modes = (rf"{mode} +[\d.]+ s: generation .*\n" for mode in ("sync", "by prompt", "async"))
    assert re.search(r"4 responses of .*\n" + "".join(modes), capsys.readouterr().out)


def test_longest_first_takes_less_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--prompts 16 --samples 4 --max-num-seqs 8 --max-tokens 256 --median 30 --noise 0.2 --rounds 2"
    monkeypatch.setattr("sys.argv", ["admission_order.py", *sizes.split()])
    assert runpy.run_path(str(BENCHMARKS / "admission_order.py"))["main"]() == 0
    found = dict(re.findall(r"^(first in|history|known) +([\d.]+) s", capsys.readouterr().out, re.MULTILINE))
    assert float(found["history"]) < float(found["first in"]) and float(found["known"]) < float(found["first in"])


def test_drafts_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "history_drafts.py"))["main"]
    sizes = ["--sequences", "2", "--right", "1", "--new-tokens", "12", "--prompt-tokens", "5", "--repeats", "1"]
    assert main(["--shape", "tiny", *sizes, "--device", "cpu"]) == 0
    assert re.search(r"2 sequences  plain [\d.]+ s  none [\d.]+x .*  1 [\d.]+x .* same 1.00", capsys.readouterr().out)


@pytest.mark.slow
def test_a_rollout_with_a_right_history_accepts_its_drafts(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    sizes = ["--requests", "2", "--prompt-tokens", "4-8", "--new-tokens", "24-48", "--repeats", "1", "--right", "1"]
    command = [sys.executable, str(BENCHMARKS / "rollout.py"), "--shape", "tiny", "--workload", "ragged", *sizes]
    engines = ["--engines", "embedded-drafts", "--device", "cpu"]
    subprocess.run([*command, *engines, "--json", str(found)], check=True)
    (row,) = json.loads(found.read_text())["results"]
    assert row["case"] == "tiny ragged x2" and row["same_tokens"] == 1 and row["acceptance"] > 0.9


def test_phases_of_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "rollout_profile.py"))["main"]
    sizes = ["--requests", "2", "--prompt-tokens", "8", "--new-tokens", "6"]
    main(["--shape", "tiny", *sizes, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    prefill, decode = found["prefill"], found["decode"]
    assert prefill["steps"] == 1 and decode["steps"] == 5  # the prefill samples the first of six tokens
    assert prefill["seconds"] > 0 and decode["step_ms"] * 5 == pytest.approx(1e3 * decode["seconds"])
    # tiny: 2 layers of 4 products each, and the head
    assert sum(decode["kernels"].get(f"aten::{name}", {"count": 0})["count"] for name in ("mm", "addmm")) == 9


def test_steps_with_drafts_are_a_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "is_open", lambda self, num_rows: True)
    monkeypatch.setattr(DraftController, "may_pay", lambda self, rows, num_rows: True)
    monkeypatch.setattr(DraftController, "lengths", lambda self, rows, available: list(available))
    monkeypatch.setattr(DraftController, "saved_seconds", lambda self, num_rows, num_sampled, seconds: 0.0)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "rollout_profile.py"))["main"]
    sizes = ["--requests", "2", "--prompt-tokens", "8", "--new-tokens", "40"]
    main(["--shape", "tiny", "--drafts", *sizes, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["drafts"]["steps"] < 39 and found["drafts"]["kernels"]


@pytest.mark.slow
def test_a_learning_run_with_drafts_has_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.parquet", 2)
    main = runpy.run_path(str(BENCHMARKS / "history_learning.py"))["main"]
    sizes = (
        "--prompts 2 --batch 2 --samples 2 --epochs 2 --new-tokens 16 --exact --device cpu data.max_prompt_length=40"
    )
    places = (
        f"--model {tmp_path}/model --data {tmp_path}/train.parquet --out {tmp_path}/out --json {tmp_path}/found.json"
    )
    main([*places.split(), *sizes.split()])
    first, second = json.loads((tmp_path / "found.json").read_text())["epochs"]
    assert first["same"] == second["same"] == 1 and first["plain_s"] > 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 2 |")


@pytest.mark.slow
def test_replay_leaves_no_gap_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(BENCHMARKS / "router_replay.py"))["main"]
    assert main(["--layers", "2", "--experts", "8", "--top-k", "2", "--prompts", "4", "--tokens", "8"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rollout ")]
    found = [dict(re.findall(r"(\w+) ([\w.+-]+)", line)) for line in lines]
    assert [(row["rollout"], row["trainer"]) for row in found] == [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
    ]
    assert float(found[0]["replayed"]) < 1e-5


@pytest.mark.slow
def test_the_dashboard_on_a_made_run(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason='needs plotly: pip install "lockstep-rl[dashboard]"')
    sizes = ["--steps", "20", "--prompts", "4", "--samples", "2"]
    files = ["--json", str(tmp_path / "seconds.json"), "--folder", str(tmp_path / "large_run")]
    # In its own process: Playwright starts no second browser in one whose tests share a browser already.
    subprocess.run([sys.executable, str(BENCHMARKS / "dashboard.py"), *sizes, *files], check=True)
    spent = json.loads((tmp_path / "seconds.json").read_text())
    assert {
        "start",
        "page, cold",
        "rollouts of a step",
        "prompt, indexed",
        "search, first answer",
        "export",
    } <= spent.keys()


def test_speeds_of_model_families(tmp_path: Path) -> None:
    """The script runs and replaces the rows of what it measured; docs/models.md has a row per family."""
    script = runpy.run_path(str(BENCHMARKS / "model_families.py"))
    page = (BENCHMARKS.parent / "docs" / "models.md").read_text()
    copy, results = tmp_path / "models.md", tmp_path / "results.json"
    copy.write_text(page.replace("| Mamba 2 | mamba2 |", "| stale | mamba2 |"))
    sizes = ["--rows", "2", "--new-tokens", "2", "--repeats", "1"]
    assert script["main"]([*sizes, "--types", "llama", "mamba2", "--json", str(results), "--table", str(copy)]) == 0
    assert [(found["family"], found["training"], found["rollout"]) for found in json.loads(results.read_text())] == [
        ("Llama", "ours", "embedded"),
        ("Mamba 2", "transformers", "embedded"),
    ]
    for text in (page, copy.read_text()):
        table = text.partition("<!-- families -->\n")[2].partition("<!-- end -->")[0]
        cells = [line.strip("| ").split(" | ") for line in table.splitlines()[3:-1]]
        assert [row[:2] for row in cells] == [[family, name] for name, family in script["FAMILIES"].items()]
        assert all(len(row) == 8 for row in cells)
    assert copy.read_text().partition("<!-- end -->")[2] == page.partition("<!-- end -->")[2]


def test_profile_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "train_profile.py"))
    found = tmp_path / "profile.json"
    script["main"](["--tokens", "64", "--length", "32", "--micro", "2", "--checkpointing", "--json", str(found)])
    summary = json.loads(found.read_text())
    assert summary["recomputed"] == 2 and summary["ms"] > 0
    assert {"products", "attention", "optimizer", script["REST"], script["GAPS"]} <= summary["parts"].keys()
    # tiny: 2 layers of q, k, v, o and three MLP weights; 4 passes, one of them a recomputation
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert summary["parts"]["products"]["flops"] == 2 * weights * 64 * 4

    backward = "autograd::engine::evaluate_function: _LinearLogProbBackward"
    assert script["class_of"](["nvjet_tst_128x256", "aten::mm", "_LinearLogProbBackward", backward]) == "log-prob head"
    assert script["class_of"](["nvjet_tst_128x256", "aten::mm", "_JointLinearBackward"]) == "products"
    assert script["class_of"](["void flash::flash_bwd_kernel", "aten::_flash_attention_backward"]) == "attention"
    assert script["class_of"](["_rms_norm_gradient", "_RmsNormBackward"]) == script["REST"]
    assert script["class_of"](["elementwise_kernel", "aten::copy_", "optimizer_step"]) == "optimizer"
    assert (
        script["class_of"](["elementwise_kernel", "aten::add_", "torch::autograd::AccumulateGrad"]) == "gradient sums"
    )


def test_kernels_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel belongs to the operations in which its thread launched it, once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "train_profile.py"))

    def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0, tid: int = 1) -> dict[str, Any]:
        args = {"correlation": correlation} if correlation else {}
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    trace = [
        event("user_annotation", "optimizer_step", 10, 50),
        event("gpu_user_annotation", "optimizer_step", 900, 50),
        event("cpu_op", "aten::mm", 0, 5),
        event("cuda_driver", "cuLaunchKernelEx", 1, 1, correlation=7),
        event("cpu_op", "aten::add_", 20, 5),
        event("cuda_runtime", "cudaLaunchKernel", 21, 1, correlation=8),
        event("cuda_runtime", "cudaLaunchKernel", 21, 1, correlation=9, tid=2),
        event("kernel", "nvjet", 100, 2000, correlation=7),
        event("kernel", "elementwise", 2200, 1000, correlation=8),
        event("kernel", "_forward", 3300, 500, correlation=9),
        event("gpu_memcpy", "Memcpy HtoD", 4000, 250, correlation=10),
    ]
    assert sorted(script["kernels_of"](trace)) == [
        (["Memcpy HtoD"], 0.25),
        (["_forward"], 0.5),
        (["elementwise", "aten::add_", "optimizer_step"], 1.0),
        (["nvjet", "aten::mm"], 2.0),
    ]


@pytest.mark.slow
def test_long_sequences(tmp_path: Path) -> None:
    """Responses have full length, the plan's memory is printed with the run's figures, and a peer that fails is a result."""
    found = tmp_path / "found.json"
    sizes = ["--prompts", "2", "--samples", "2", "--prompt-tokens", "16", "--new-tokens", "40", "--run", "tiny-lora"]
    peer = ["--peer", "trl", "--peer-python", str(tmp_path / "none")]
    command = [sys.executable, str(BENCHMARKS / "long_sequences.py"), *sizes, *peer, "--json", str(found)]
    done = subprocess.run([*command, "trainer.device=cpu"], check=True, stdout=subprocess.PIPE, text=True)
    sides = json.loads(found.read_text())["results"]["tiny-lora"]
    ours = sides["lockstep"]
    assert ours["length"] == 40 and 0 < ours["gen_s"] + ours["update_actor_s"] <= ours["step_s"]
    assert ours["planned_gb/gen"] > 0 and ours["planned_gb/update_actor"] > 0
    assert "No such file" in sides["trl"]["failed"] and "failed" in done.stdout
