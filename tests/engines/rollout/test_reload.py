"""Servers that get new weights by a folder and a command: what is written, what is run, and what goes wrong."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig, ServerConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.server.engine import ServerEngine
from lockstep.engines.rollout.server.http import ServerError
from lockstep.models import export
from lockstep.utils.fingerprint import fingerprint
from tests.engines.rollout.fake_server import fake_servers
from tests.engines.rollout.fake_tgi import FakeTgi, fake_tgi, reload_command
from tests.tiny import save_tiny_model, tiny_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture
def server(folder: Path) -> Iterator[FakeTgi]:
    with fake_tgi(folder) as made:
        yield made


def engine_of(urls: list[str], folder: Path, root: Path, command: str, **settings: Any) -> ServerEngine:
    server = ServerConfig(
        urls=urls,
        **{
            "kind": "tgi",
            "retry_backoff_s": 0.05,
            "max_retries": 1,
            "reload_timeout_s": 30.0,
            "weights_owner": "/runs/a",
        }
        | settings,
        weights_folder=str(root),
        reload_command=command,
    )
    config = RolloutConfig(name="server", prompt_length=32, response_length=16, server=server)
    engine = ServerEngine(config, [EOS], 0)
    engine.load(HFModelConfig(path=str(folder)), "m", torch.float32, torch.device("cpu"))
    return engine


def changed_model(folder: Path, version: int) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def update(engine: ServerEngine, model: PreTrainedModel, version: int) -> dict[str, int]:
    """Send all weights in two buckets; returns their fingerprints."""
    weights = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    engine.begin_update()
    engine.update_weights(iter(weights[:5]))
    engine.update_weights(iter(weights[5:]))
    engine.finish_update(version)
    return {name: fingerprint(tensor) for name, tensor in weights}


def one_request() -> GenerationRequest:
    return GenerationRequest(tiny_tokenizer()("1+1=")["input_ids"], SamplingParams(max_tokens=8, temperature=0.0))


def script(text: str) -> str:
    """A command that runs Python with the URL, the folder and the version as its arguments."""
    return shlex.join([sys.executable, "-c", f"import sys, time; {text}", "{url}", "{folder}", "{version}"])


@pytest.mark.parametrize("form", ["load", "restart"])
def test_new_weights_are_written_and_loaded(
    form: str, server: FakeTgi, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 10_000)
    server.state.reload = form
    root = tmp_path / "run" / "rollout_weights"
    engine = engine_of([server.url], folder, root, reload_command())
    assert engine.takes_weights() and not root.exists()
    for version in (1, 2, 3):
        model = changed_model(folder, version)
        sent = update(engine, model, version)
        assert engine.fingerprints(list(sent)) == sent
        assert set(engine.unread_weights(list(sent)).values()) == {f"{server.url} is reloaded by a command"}
        written = root / f"step_{version}"
        assert server.state.loaded[-1] == str(written)
        (completion,) = engine.generate([one_request()])
        assert completion.policy_version == version
        ids = torch.tensor([one_request().prompt_ids + completion.token_ids])
        logits = model(ids).logits[0, -len(completion.token_ids) - 1 : -1]
        assert completion.token_ids == logits.argmax(-1).tolist()
    assert sorted(path.name for path in root.iterdir()) == ["step_2", "step_3"]
    assert len(list(written.glob("model-*-of-*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(written)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert again.config.tie_word_embeddings and again.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(written).chat_template == tiny_tokenizer().chat_template
    assert (written / f"reload-{server.url[7:].replace(':', '_')}.log").read_text() == f"loading {written}\n"


def test_an_interrupted_update_is_written_again(server: FakeTgi, folder: Path, tmp_path: Path) -> None:
    engine = engine_of([server.url], folder, tmp_path, reload_command())
    engine.begin_update()
    engine.update_weights(iter([("model.norm.weight", torch.zeros(32))]))
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]
    resumed = engine_of([server.url], folder, tmp_path, reload_command())
    for _ in range(2):
        update(resumed, changed_model(folder, 1), 1)
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_only_folders_of_the_run_are_removed(
    server: FakeTgi, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file, a model of somebody else, a copy and a link stay; newer or older than the run's own."""
    others = ["step_1000/model.safetensors", "step_2000/model.safetensors", "step_7.log", "steps/x", "step_1_best/x"]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    engine = engine_of([server.url], folder, tmp_path, reload_command())
    update(engine, changed_model(folder, 1), 1)
    assert "Lockstep did not write step_1000, step_2000; the run stops if" in caplog.text
    marker = tmp_path / "step_1" / "lockstep_run.txt"
    assert marker.read_text() == "/runs/a\n"
    (tmp_path / "step_1_best" / marker.name).write_text(marker.read_text())
    (tmp_path / "step_99").symlink_to(tmp_path / "step_1_best")
    for version in (2, 3):
        update(engine, changed_model(folder, version), version)
    assert all((tmp_path / name).read_text() == "precious" for name in others)
    kept = {name.split("/")[0] for name in others} | {"step_99", "step_2", "step_3"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    with pytest.raises(
        ServerError, match=r"weights_folder=.*: step_1000 is there, and this run did not write it .*; set"
    ):
        update(engine, changed_model(folder, 4), 1000)
    assert (tmp_path / others[0]).read_text() == "precious"


def test_folders_of_another_run_are_refused(server: FakeTgi, folder: Path, tmp_path: Path) -> None:
    first = engine_of([server.url], folder, tmp_path, reload_command())
    second = engine_of([server.url], folder, tmp_path, reload_command(), weights_owner="/runs/b")
    first.begin_update()
    for name in ("partial", "step_1"):
        message = rf"weights_folder={tmp_path}: the run in /runs/a wrote {name} there, this run is in /runs/b; set .*_folder to"
        with pytest.raises(ServerError, match=message):
            second.begin_update()
        assert [path.name for path in tmp_path.iterdir()] == [name]
        if name == "partial":
            update(first, changed_model(folder, 1), 1)
    update(engine_of([server.url], folder, tmp_path, reload_command()), changed_model(folder, 2), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def test_a_partial_folder_of_nobody_is_kept(server: FakeTgi, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "notes.txt").write_text("precious")
    with pytest.raises(ServerError, match=r"weights_folder=.*: partial is there, and .* to an empty folder, or move"):
        engine_of([server.url], folder, tmp_path, reload_command()).begin_update()
    assert (tmp_path / "partial" / "notes.txt").read_text() == "precious"


def test_placeholders_and_the_shell(server: FakeTgi, folder: Path, tmp_path: Path) -> None:
    """No shell reads the command, unless it is one."""
    out = tmp_path / "out"
    plain = script(f"open({str(out)!r}, 'w').write(repr(sys.argv[1:]))") + " '{folder}/x;y' '$HOME'"
    update(engine_of([server.url], folder, tmp_path / "a b", plain), changed_model(folder, 1), 7)
    place = str(tmp_path / "a b" / "step_7")
    assert out.read_text() == repr([server.url, place, "7", f"{place}/x;y", "$HOME"])
    shell = f"bash -c 'echo $(( {{version}} + 1 )) {{folder}} > {out}'"
    update(engine_of([server.url], folder, tmp_path / "c", shell), changed_model(folder, 1), 7)
    assert out.read_text() == f"8 {tmp_path / 'c' / 'step_7'}\n"


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        (
            script("[print(i) for i in range(9)]; sys.exit('no GPU')"),
            {},
            r"reload_command failed: exited with code 1: .* '?{url}'? .*; its last output: 5 \| 6 \| 7 \| 8 \| no GPU \(.*\.log\)$",
        ),
        (script("print('starting', flush=True); time.sleep(60)"), {"reload_timeout_s": 5.0}, "hang"),
        (
            "no_such_program {folder}",
            {},
            r"reload_command cannot be started \(No such file or directory\): no_such_program",
        ),
    ],
    ids=["fails", "hangs", "missing"],
)
def test_a_command_that_does_not_work(
    command: str, settings: dict[str, Any], message: str, server: FakeTgi, folder: Path, tmp_path: Path
) -> None:
    if message == "hang":
        message = r"reload_command did not end within .*timeout_s=5 and was killed: has not ended: .*; its last output: starting"
    engine = engine_of([server.url], folder, tmp_path, command, **settings)
    with pytest.raises(ServerError, match=f"^{server.url}: .*{message.replace('{url}', server.url)}"):
        update(engine, changed_model(folder, 1), 1)
    assert server.state.loaded == [str(folder)]
    server_again = engine_of([server.url], folder, tmp_path, reload_command())
    update(server_again, changed_model(folder, 1), 1)
    assert server.state.loaded[-1] == str(tmp_path / "step_1")


def test_a_server_that_does_not_return(server: FakeTgi, folder: Path, tmp_path: Path) -> None:
    server.state.reload = "die"
    engine = engine_of([server.url], folder, tmp_path, reload_command(), reload_timeout_s=6.0)
    message = rf"^{server.url}: cannot connect .*; not ready .*reload_timeout_s=6 after .*, which exited with code 0: .*loading"
    with pytest.raises(ServerError, match=message):
        update(engine, changed_model(folder, 1), 1)
    server.start()


@pytest.mark.slow
def test_one_of_two_servers_fails(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is left out until the next update."""
    with fake_tgi(folder) as good, fake_tgi(folder) as bad:
        bad.state.reload = "die"
        engine = engine_of([bad.url, good.url], folder, tmp_path, reload_command(), reload_timeout_s=5.0)
        update(engine, changed_model(folder, 1), 1)
        assert "the server is left out until the next weight update" in caplog.text
        assert len(engine.canaries(one_request())) == 1
        bad.start()
        bad.state.reload = "load"
        update(engine, changed_model(folder, 2), 2)
        assert bad.state.loaded[-1] == good.state.loaded[-1] == str(tmp_path / "step_2")
        assert len(engine.canaries(one_request())) == 2


def test_a_server_whose_kind_takes_weights_can_be_reloaded_too(folder: Path, tmp_path: Path) -> None:
    """None of its endpoints for updates is used, and its model may have another name afterwards."""
    for kind in ("vllm", "openai"):
        with fake_servers(kind, dev_mode=kind == "openai") as (server,):
            engine = engine_of([server.url], folder, tmp_path / kind, script("pass"), kind=kind)
            server.state.model = "renamed"
            update(engine, changed_model(folder, 1), 1)
            assert engine.generate([one_request()])[0].policy_version == 1
            assert server.state.generated[-1]["model"] == "renamed"
