"""Runs with rollout.name=server: with a real vLLM server on loopback (`make test-vllm`), and what users read if a server fails."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lockstep.trainer.main_generation import main as generate
from lockstep.trainer.main_ppo import main
from lockstep.weight_sync import CANARY_METRIC
from tests.engines.rollout.fake_server import fake_servers
from tests.tiny import save_tiny_model, small_run, write_rows
from tests.trainer.test_vllm import ASYNC, check_async, check_rows, rows_of
from tests.vllm_server import vllm_server

ROOT = Path(__file__).parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
PAGE = (ROOT / "docs" / "servers.md").read_text()
STEPS = 8
"""Two epochs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and reward of a small run; vLLM's CPU kernels know the size of the heads."""
    folder = tmp_path_factory.mktemp("server")
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    save_tiny_model(folder / "model", tie_word_embeddings=True, **heads)
    write_rows(folder / "train.parquet", 16)
    write_rows(folder / "val.parquet", 4)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
    )
    return folder


def run_of(folder: Path, url: str, run: Path, *more: str) -> list[str]:
    return [
        *small_run(folder),
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=3",
        f"{ROLLOUT}.name=server",
        f"{ROLLOUT}.server.urls=[{url}]",
        f"{ROLLOUT}.temperature=0.8",
        "trainer.total_epochs=5",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={run}",
        *more,
    ]


def documented(name: str, folder: Path, run: Path, url: str) -> list[str]:
    """The arguments of the page's command `lockstep {name}` for this folder and server."""
    blocks = [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)]
    (command,) = [found for block in blocks for found in re.findall(rf"^lockstep {name} (.*)$", block, re.M)]
    values = {"$DATA": str(folder), "$MODEL": f"{folder}/model", "$RUN": str(run), "http://127.0.0.1:8000": url}
    for placeholder, value in values.items():
        command = command.replace(placeholder, value)
    return command.split()


def test_generation_by_an_openai_server(folder: Path, tmp_path: Path) -> None:
    small = ["data.max_prompt_length=40", "data.max_response_length=6", "trainer.device=cpu"]
    with fake_servers("openai") as (server,):
        assert generate([*documented("generate", folder, tmp_path, server.url), *small]) == 0
        assert len(server.state.generated) == 32
    lengths = pq.read_table(tmp_path / "responses.parquet")["response_lengths"].to_pylist()
    assert len(lengths) == 16 and all(1 <= n <= 6 for row in lengths for n in row)


def test_training_with_a_server_that_takes_no_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_servers("openai") as (server,):
        assert main(run_of(folder, server.url, tmp_path / "run")) == 1
        assert re.search(
            rf"{server.url} has no endpoints for weight updates; set {ROLLOUT}\.server\.kind=vllm or sglang",
            capsys.readouterr().err,
        )


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_the_canary_finds_a_server_with_another_model(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the weights cannot be sent because nothing is trained."""
    rate = "actor_rollout_ref.actor.optim.lr=0"
    with fake_servers(kind) as (server,):
        assert main(run_of(folder, server.url, tmp_path / "run", *([rate] if kind == "openai" else []))) == 1
    assert "log-probs of the canary text differ from the trainer's" in capsys.readouterr().err


def test_a_server_that_dies_stops_the_run_with_its_cause(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_servers("vllm") as (server,):
        server.state.faults.append("die")
        patience = [f"{ROLLOUT}.server.max_retries=1", f"{ROLLOUT}.server.retry_backoff_s=0.05"]
        assert main(run_of(folder, server.url, tmp_path / "run", *patience)) == 1
    error = capsys.readouterr().err
    assert re.search(rf"{server.url}: .*gave up after 2 attempts \({ROLLOUT}\.server\.max_retries\)", error)
    assert "Traceback" not in error


def test_an_unreachable_server(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_servers("vllm") as (server,):
        pass
    assert main(run_of(folder, server.url, tmp_path / "run", f"{ROLLOUT}.server.max_retries=0")) == 1
    error = capsys.readouterr().err
    assert re.search(
        rf"{server.url}: cannot connect .*gave up after 1 attempts.*; the run did not start$", error.strip()
    )


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real vLLM server with random weights."""
    with vllm_server(folder / "model", tmp_path_factory.mktemp("log") / "vllm.log") as url:
        yield url


@pytest.mark.vllm
@needs_vllm
def test_trains_with_a_vllm_server(folder: Path, served: str, tmp_path: Path) -> None:
    steps = [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=4", "trainer.save_freq=-1"]
    assert main(run_of(folder, served, tmp_path / "run", *steps)) == 0
    rows = rows_of(tmp_path / "run")
    check_rows(rows, STEPS)
    assert any(name.startswith("val-") for name in rows[3])


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("mode", ASYNC)
def test_asynchronous_training_with_a_vllm_server(folder: Path, served: str, tmp_path: Path, mode: str) -> None:
    assert main(run_of(folder, served, tmp_path / "run", *ASYNC[mode])) == 0
    check_async(tmp_path / "run")


@pytest.mark.vllm
@needs_vllm
def test_the_documented_command(folder: Path, served: str, tmp_path: Path) -> None:
    """With weights that are broadcast."""
    small = [f"{ROLLOUT}.server.weight_transfer=distributed"]
    small += ["data.max_prompt_length=40", "data.max_response_length=6", "trainer.device=cpu"]
    assert main([*documented("ppo", folder, tmp_path, served), *small]) == 0
    assert [row[CANARY_METRIC] < 1e-3 for row in rows_of(tmp_path / "server")] == [True, True]


@pytest.mark.vllm
@needs_vllm
def test_a_vllm_server_that_loses_its_weights_stops_the_run(
    folder: Path, served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers carry the version of its weights."""
    from lockstep.engines.rollout.server.engine import ServerEngine

    add = ServerEngine.add

    def relabel(self: ServerEngine, request_id: int, request: Any) -> None:
        if self.policy_version == 2:
            self._loop.run(self._pool.servers[0].post("/update_weight_version", {"new_version": "default"}))
        add(self, request_id, request)

    monkeypatch.setattr(ServerEngine, "add", relabel)
    assert main(run_of(folder, served, tmp_path / "run", "trainer.total_training_steps=4")) == 1
    assert f"no server has the weights of the last update any more ({ROLLOUT}.server.urls: {served})" in (
        capsys.readouterr().err
    )
    assert len(rows_of(tmp_path / "run")) == 2
