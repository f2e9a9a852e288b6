"""The commands of docs/environments.md run, with the files that the page prints."""

import re
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.trainer.main_ppo import main
from tests.docs.test_commands import arguments
from tests.tiny import save_tiny_model, write_rows

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
SMALL = [
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=1",
    "trainer.device=cpu",
    "trainer.save_freq=-1",
    "trainer.val_before_train=false",
]


def block(language: str, name: str) -> str:
    (found,) = re.findall(rf"```{language}\n# {name}\n(.*?)```", PAGE, flags=re.S)
    return str(found)


def command_of(word: str) -> str:
    (found,) = [b for b in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S) if word in b]
    return str(found).replace("\\\n", " ")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    write_rows(tmp_path / "train.parquet", 4)
    return tmp_path


def train(word: str, folder: Path, *more: str) -> None:
    places = {"$DATA": str(folder), "Qwen/Qwen2.5-0.5B-Instruct": str(folder / "model")}
    run = [*arguments(command_of(word), places), *SMALL, f"trainer.default_local_dir={folder}/run", *more]
    assert main(run) == 0
    assert (folder / "run" / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("no_registrations")
def test_reasoning_gym(folder: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (make test-environments)")
    train("reasoning_gym:", folder, "data.max_response_length=8", "actor_rollout_ref.rollout.n=2")


@pytest.mark.usefixtures("no_registrations")
def test_own_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "guess.py").write_text(block("python", "guess.py"))
    (folder / "guess_rows.py").write_text(block("python", "guess_rows.py"))
    (folder / "guess_loops.yaml").write_text(block("yaml", "guess_loops.yaml"))
    capsys.readouterr()
    runpy.run_path(str(folder / "guess_rows.py"))
    (folder / "guess.jsonl").write_text(capsys.readouterr().out)
    train("guess.jsonl", folder, "data.max_prompt_length=200")
    assert '"environment_error_counts/mean": 0.0' in (folder / "run" / "metrics.jsonl").read_text()


@pytest.fixture
def echo_server() -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="openenv is not installed (make test-environments)")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class EchoAction(Action):
        message: str

    class EchoObservation(Observation):
        echoed_message: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> EchoObservation:
            return EchoObservation(echoed_message="Hello")

        def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: object) -> EchoObservation:
            return EchoObservation(echoed_message=action.message, reward=len(action.message) / 100, done=True)

        @property
        def state(self) -> State:
            return State()

    listener = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    listener.close()


@pytest.mark.usefixtures("no_registrations")
def test_openenv(folder: Path, echo_server: str) -> None:
    loops = block("yaml", "openenv_loops.yaml").replace("http://127.0.0.1:8000", echo_server)
    (folder / "openenv_loops.yaml").write_text(loops)
    train("openenv_loops.yaml", folder, "data.max_response_length=8")
    assert '"environment_error_counts/mean": 0.0' in (folder / "run" / "metrics.jsonl").read_text()


def test_the_taskset_of_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed (make test-environments)")
    from lockstep.data.verifiers_tasks import make_env

    (folder / "sums_v1.py").write_text(block("python", "sums_v1.py"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "sums_v1", raising=False)
    tasks = list(make_env({"taskset": {"id": "sums-v1"}, "agent": {"max_turns": 4}}).taskset)
    assert len(tasks) == 100 and (tasks[7].data.prompt, tasks[7].data.answer) == ("7+7=", "14")
