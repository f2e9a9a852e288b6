"""Runs with rollout.name=tgi: a fake server with a real model, which the reload command loads again after every update."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lockstep.trainer.main_generation import main as generate
from lockstep.trainer.main_ppo import main
from lockstep.weight_sync import CANARY_METRIC
from tests.engines.rollout.fake_tgi import RELOAD, FakeTgi, fake_tgi, reload_command
from tests.tiny import save_tiny_model, small_run, write_rows
from tests.trainer.test_vllm import ASYNC, check_async, rows_of

ROLLOUT = "actor_rollout_ref.rollout"
PAGE = (Path(__file__).parents[2] / "docs" / "servers.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and reward of a small run."""
    folder = tmp_path_factory.mktemp("tgi")
    save_tiny_model(folder / "model", tie_word_embeddings=True)
    write_rows(folder / "train.parquet", 16)
    write_rows(folder / "val.parquet", 4)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
    )
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[FakeTgi]:
    with fake_tgi(folder / "model") as made:
        yield made


def run_of(folder: Path, run: Path, *more: str) -> list[str]:
    return [
        *small_run(folder),
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=3",
        f"{ROLLOUT}.temperature=0.8",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        f"trainer.rollout_data_dir={run}/rollouts",
        f"trainer.default_local_dir={run}",
        *more,
    ]


def by_tgi(server: FakeTgi, command: str | None = None, *more: str) -> list[str]:
    text = (command or reload_command()).replace("\\", "\\\\").replace('"', '\\"')
    return [
        f"{ROLLOUT}.name=tgi",
        f"{ROLLOUT}.server.urls=[{server.url}]",
        f'{ROLLOUT}.server.reload_command="{text}"',
        f"{ROLLOUT}.server.max_retries=1",
        f"{ROLLOUT}.server.retry_backoff_s=0.05",
        *more,
    ]


def samples_of(run: Path) -> list[Any]:
    return [
        json.loads(line)["output"]
        for step in (1, 2)
        for line in (run / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    ]


def test_a_run_equals_that_of_the_embedded_engine(folder: Path, tmp_path: Path, server: FakeTgi) -> None:
    """Samples, losses and gradients: the weights of every update reach the server."""
    assert main(run_of(folder, tmp_path / "embedded")) == 0
    assert main(run_of(folder, tmp_path / "tgi", *by_tgi(server))) == 0
    assert samples_of(tmp_path / "tgi") == samples_of(tmp_path / "embedded")
    expected, found = rows_of(tmp_path / "embedded"), rows_of(tmp_path / "tgi")
    assert len(found) == 2 and all(row[CANARY_METRIC] < 1e-3 for row in found)
    names = [name for name in expected[0] if name.startswith(("actor/", "critic/", "training/rollout"))]
    assert "actor/grad_norm" in names
    for one, other in zip(expected, found):
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=1e-4)
    weights = tmp_path / "tgi" / "rollout_weights"
    assert server.state.loaded[1:] == [str(weights / f"step_{version}") for version in range(3)]
    assert sorted(path.name for path in weights.iterdir()) == ["step_1", "step_2"]


@pytest.mark.slow
def test_a_failed_reload_stops_the_run_which_can_be_resumed(
    folder: Path, tmp_path: Path, server: FakeTgi, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails after the second update, and goes on from the checkpoint of the first step."""
    fails_at_2 = reload_command() + " {version}"
    fails_at_2 = fails_at_2.replace("url, folder = sys.argv[1:]", "url, folder, version = sys.argv[1:]")
    fails_at_2 = fails_at_2.replace("print(", "version == '2' and sys.exit('no free GPU'); print(")
    saved = ["trainer.save_freq=1"]
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server, fails_at_2), *saved)) == 1
    error = capsys.readouterr().err
    assert re.search(
        rf"{server.url}: {ROLLOUT}\.server\.reload_command failed: exited with code 1: .*no free GPU", error
    )
    assert "Traceback" not in error
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server), *saved)) == 0
    assert main(run_of(folder, tmp_path / "whole")) == 0
    assert samples_of(tmp_path / "run") == samples_of(tmp_path / "whole")


def test_the_canary_finds_a_command_that_loads_nothing(
    folder: Path, tmp_path: Path, server: FakeTgi, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the start are the server's anyway; those of the first update are not."""
    server.state.reload = "nothing"
    rate = "actor_rollout_ref.actor.optim.lr=0.05"
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server), rate)) == 1
    error = capsys.readouterr().err
    assert re.search(
        r"after update 1 the rollout's log-probs of the canary text differ .*: the server computes with other weights than those "
        rf"that {ROLLOUT}\.server\.reload_command=.* was told to load",
        error,
    )


@pytest.mark.slow
def test_a_server_that_dies_in_a_reload(
    folder: Path, tmp_path: Path, server: FakeTgi, capsys: pytest.CaptureFixture[str]
) -> None:
    server.state.reload = "die"
    limit = f"{ROLLOUT}.server.reload_timeout_s=6"
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server, None, limit))) == 1
    assert re.search(rf"{server.url}: cannot connect .*; not ready .*reload_timeout_s=6 after", capsys.readouterr().err)
    server.start()


def test_a_server_with_another_tokenizer_stops_the_run(
    folder: Path, tmp_path: Path, server: FakeTgi, capsys: pytest.CaptureFixture[str]
) -> None:
    server.state.prefix = " "
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server))) == 1
    assert f"{server.url} tokenizes the prompt" in capsys.readouterr().err


def test_validation_and_generation_need_no_reload_command(folder: Path, tmp_path: Path, server: FakeTgi) -> None:
    name = [f"{ROLLOUT}.name=tgi", f"{ROLLOUT}.server.urls=[{server.url}]"]
    only = [f"data.val_files={folder}/val.parquet", "trainer.val_only=true", "trainer.logger=[console,file]"]
    assert main(run_of(folder, tmp_path / "run", *name, *only)) == 0
    assert server.state.loaded == [str(folder / "model")]
    small = ["data.max_prompt_length=40", "data.max_response_length=6", "trainer.device=cpu", "data.n_samples=2"]
    paths = [
        f"data.path={folder}/train.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        f"model.path={folder}/model",
    ]
    rollout = ["rollout.name=tgi", f"rollout.server.urls=[{server.url}]"]
    assert generate([*paths, *small, *rollout]) == 0
    lengths = pq.read_table(tmp_path / "out.parquet")["response_lengths"].to_pylist()
    assert len(lengths) == 16 and all(1 <= n <= 6 for row in lengths for n in row)


@pytest.mark.slow
def test_the_documented_command(folder: Path, tmp_path: Path, server: FakeTgi) -> None:
    (command,) = re.findall(r"^lockstep grpo (.*)$", PAGE.replace("\\\n", " "), flags=re.M)
    restart = tmp_path / "restart_tgi.sh"
    restart.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", RELOAD, server.url])} "$1"\n')
    restart.chmod(0o755)
    values = {
        "$DATA": str(folder),
        "$MODEL": f"{folder}/model",
        "$RUN": str(tmp_path),
        "./restart_tgi.sh": str(restart),
    }
    for placeholder, value in (values | {"http://127.0.0.1:8080": server.url}).items():
        command = command.replace(placeholder, value)
    small = ["data.max_prompt_length=40", "data.max_response_length=6", "trainer.device=cpu", "trainer.logger=console"]
    assert main(["algorithm=grpo", *shlex.split(command), *small]) == 0
    assert [row[CANARY_METRIC] < 1e-3 for row in rows_of(tmp_path / "tgi")] == [True, True]


@pytest.mark.slow
def test_asynchronous_training_with_reloads(folder: Path, tmp_path: Path, server: FakeTgi) -> None:
    server.state.reload = "restart"
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server), *ASYNC["one_step_off"])) == 0
    check_async(tmp_path / "run")


@pytest.mark.slow
def test_a_hanging_command_is_killed(
    folder: Path, tmp_path: Path, server: FakeTgi, capsys: pytest.CaptureFixture[str]
) -> None:
    hang = shlex.join([sys.executable, "-c", "import time; time.sleep(60)", "{folder}"])
    limit = f"{ROLLOUT}.server.reload_timeout_s=1"
    assert main(run_of(folder, tmp_path / "run", *by_tgi(server, hang, limit))) == 1
    assert f"{ROLLOUT}.server.reload_command did not end within" in capsys.readouterr().err
