"""Model paths: local folders, checkpoints of a run, names on the Hub (from a server on the loopback interface) and URLs."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import fsspec
import pytest

from lockstep.models.tokenizer import hf_tokenizer
from lockstep.utils.checkpoint_folder import MANIFEST, FileEntry, Manifest
from lockstep.utils.files import sha256
from lockstep.utils.hub import has_weights, parse_name
from lockstep.utils.model_path import base_folder, local_model_folder, locate_model, newest_of_run
from tests.hub import COMMIT, contents_of, hub_server, use_hub, write_cache

KEY = "actor_rollout_ref.model.path"
CONFIG = {"config.json": b"{}", "tokenizer.json": b"[]"}
REPOSITORIES = {
    "org/model": CONFIG
    | {
        "model.safetensors": b"w" * 50,
        "pytorch_model.bin": b"w",
        "consolidated.safetensors": b"w",
        "onnx/x.json": b"o",
    },
    "org/pickled": CONFIG | {"pytorch_model.bin": b"p", "training_args.bin": b"t"},
    "org/adapter": CONFIG,
    "org/gated": CONFIG,
}


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_names() -> None:
    for text in ("Qwen/Qwen2.5-0.5B-Instruct", "a/b@main", "a/b@refs/pr/1", f"a/b@{COMMIT}"):
        name = parse_name(text)
        assert name is not None and str(name) == text
    for text in ("qwen", "./qwen", "../a/b", "/a/b", "a/b/c", "~/a", "a/b@", "a/", "a b/c", "a/../b", ".a/b", ""):
        assert parse_name(text) is None, text


def test_local_folders_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_in(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, tmp_path / "cache")
    assert local_model_folder("org/model", KEY) == Path("org/model")
    assert local_model_folder(folder, KEY) == local_model_folder(f"file://{folder}", KEY) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_model_folder("~/org/model", KEY) == folder
    for path in ("./nowhere", f"{tmp_path}/nowhere", "nowhere", ""):
        with pytest.raises(
            ValueError, match=rf"^{KEY}=.*: no such folder \(looked for .*\); give a local folder, org/name"
        ):
            local_model_folder(path, KEY)
    with pytest.raises(ValueError, match="is a file, not a model's folder"):
        local_model_folder(folder / "config.json", KEY)


def weights_in(folder: Path, config: str = "config.json") -> Path:
    folder.mkdir(parents=True)
    (folder / config).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 50)
    return folder


def sealed(step: Path, sequence: int) -> Path:
    """The checkpoint with a manifest, as a run writes it."""
    files = {
        str(path.relative_to(step)): FileEntry(path.stat().st_size, sha256(path))
        for path in step.rglob("*")
        if path.is_file()
    }
    manifest = Manifest(int(step.name.rpartition("_")[2]), sequence, 0.0, files)
    (step / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return step


def test_checkpoints(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_5"
    actor, critic = weights_in(step / "actor" / "huggingface"), weights_in(step / "critic" / "huggingface")
    for path in (step, f"{step}/", f"file://{step}", step / "actor", actor):
        assert local_model_folder(path, KEY) == actor
    assert local_model_folder(step, "critic.model.path") == local_model_folder(step / "critic", KEY) == critic
    (tmp_path / "latest").symlink_to(step)
    assert local_model_folder(tmp_path / "latest", KEY).resolve() == actor
    alone = weights_in(tmp_path / "run" / "global_step_6" / "actor" / "huggingface")
    assert (
        local_model_folder(tmp_path / "run" / "global_step_6", "critic.model.path") == alone
    )  # a run without a critic


def test_checkpoints_of_sft(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_5"
    exported = weights_in(step / "huggingface")
    assert local_model_folder(step, KEY) == local_model_folder(exported, "model.path") == exported
    assert local_model_folder(step, "critic.model.path") == exported
    with pytest.raises(ValueError, match=r"no such folder; global_step_5 has no parts: leave out actor$"):
        local_model_folder(step / "actor", KEY)


def test_adapters(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_5"
    adapter = weights_in(step / "actor" / "lora_adapter", "adapter_config.json")
    sealed(step, 1)
    assert local_model_folder(step, KEY) == local_model_folder(step.parent, KEY) == adapter
    assert local_model_folder(adapter, KEY) == adapter


def test_run_is_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    later, newest = (
        sealed(weights_in(run / f"global_step_{n}" / "huggingface").parent, s) for n, s in ((10, 1), (5, 2))
    )
    weights_in(run / "global_step_20" / "huggingface")  # no manifest: copied in part, or damaged
    assert newest_of_run(run) == newest != later
    assert local_model_folder(run, KEY) == newest / "huggingface"
    for folder in (later, newest):
        (folder / MANIFEST).unlink()
    names = "global_step_5, global_step_10, global_step_20"
    with pytest.raises(
        ValueError, match=rf"without a complete checkpoint \({names}: no valid manifest.json\); give one"
    ):
        local_model_folder(run, KEY)


def test_runs_and_steps_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert newest_of_run(run) is newest_of_run(tmp_path / "nowhere") is None
    (run / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"run: is a run's folder, but has no checkpoint yet \(trainer.save_freq\)$"):
        local_model_folder(run, KEY)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no such checkpoint; run has none$"):  # and not a name on the Hub
        local_model_folder("run/global_step_7", KEY)
    for step in (5, 10):
        weights_in(run / f"global_step_{step}" / "actor" / "huggingface")
    for path in ("run/global_step_7", "run/global_step_7/actor"):
        with pytest.raises(ValueError, match=f"{path}: no such checkpoint; run has global_step_5, global_step_10$"):
            local_model_folder(path, KEY)
    with pytest.raises(ValueError, match=r"no such folder; global_step_5 has actor$"):
        local_model_folder("run/global_step_5/critic", "critic.model.path")


def test_checkpoints_without_a_model(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_5"
    (step / "actor").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the checkpoint is damaged: .* has neither huggingface nor lora_adapter nor"):
        local_model_folder(step, KEY)
    (step / "actor" / "shards").mkdir()
    fix = rf"saved without hf_model .*; run `lockstep export {step}/actor -o FOLDER`, and give FOLDER$"
    for path in (step, step / "actor"):
        with pytest.raises(ValueError, match=fix):
            local_model_folder(path, KEY)
    model_in(step / "actor" / "huggingface")  # as verl saves it without hf_model
    (step / "actor" / "model_world_size_1_rank_0.pt").touch()
    with pytest.raises(ValueError, match=rf"of verl .*; run `lockstep convert {step}/actor -o FOLDER`$"):
        local_model_folder(step, KEY)


def test_damaged_checkpoint(tmp_path: Path) -> None:
    step = sealed(weights_in(tmp_path / "run" / "global_step_5" / "actor" / "huggingface").parents[1], 1)
    (step / "actor" / "huggingface" / "model.safetensors").write_bytes(b"w")
    for path in (step.parent, step, step / "actor"):
        with pytest.raises(ValueError, match=r"is damaged: .*model.safetensors has 1 bytes, but its manifest says 50$"):
            local_model_folder(path, KEY)


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    remote = fsspec.filesystem("memory")
    for name, content in CONFIG.items():
        remote.pipe(f"/m/{name}", content)
        remote.pipe(f"/run/global_step_5/critic/huggingface/{name}", content)
    try:
        assert contents_of(local_model_folder("memory://m", KEY)) == CONFIG
        for key, path in (("critic.model.path", ""), (KEY, "/critic")):
            assert contents_of(local_model_folder(f"memory://run/global_step_5{path}", key)) == CONFIG
        for name in ("model.safetensors", "onnx/config.json"):
            remote.pipe(f"/m/{name}", b"w")
        part = local_model_folder("memory://m", KEY, weights=False)
        assert contents_of(part) == CONFIG
        whole = local_model_folder("memory://m", KEY)
        assert set(contents_of(whole)) == {*CONFIG, "model.safetensors", "onnx/config.json"}
        assert local_model_folder("memory://m", KEY, weights=False) == whole  # no second copy
        remote.pipe("/w/model.safetensors", b"w")
        with pytest.raises(ValueError, match=rf"^{KEY}=memory://w: has no files \*\.json, \*\.model"):
            local_model_folder("memory://w", KEY, weights=False)
        with pytest.raises(ValueError, match=rf"^{KEY}=memory://nowhere: no such file or folder$"):
            local_model_folder("memory://nowhere", KEY)
    finally:
        remote.rm("/", recursive=True)


def test_only_needed_files_are_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(REPOSITORIES) as (url, sent):
        use_hub(monkeypatch, tmp_path, url)
        folder = local_model_folder("org/model", KEY, weights=False)
        assert contents_of(folder) == CONFIG
        assert local_model_folder("org/model", KEY) == folder
        assert set(contents_of(folder)) == {*CONFIG, "model.safetensors"}
        assert sorted(sent) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert set(contents_of(local_model_folder("org/pickled", KEY))) == {*CONFIG, "pytorch_model.bin"}
        with pytest.raises(ValueError, match=r"has no complete weights \(looked for \*\.safetensors and pytorch_model"):
            local_model_folder("org/adapter", KEY)
    for name in ("org/model", f"org/model@{COMMIT}", "org/pickled"):  # the server is gone, the cache is enough
        assert local_model_folder(name, KEY).name == COMMIT


def test_hub_problems_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(REPOSITORIES, gated=("org/gated",)) as (url, _):
        use_hub(monkeypatch, tmp_path, url)
        for name, message in {
            "org/gated": "the model is gated: accept its terms on its Hub page, then set HF_TOKEN or run `hf auth login`",
            "org/nothing": "no such folder, and the Hub has no model of this name; if it is private, set HF_TOKEN",
            "org/model@v2": "the Hub's model org/model has no revision v2",
        }.items():
            with pytest.raises(ValueError) as caught:
                local_model_folder(name, KEY)
            assert str(caught.value) == f"{KEY}={name}: {message}"
    fetch = rf"no such folder, and the Hub's model of this name is not in the cache {tmp_path} .*; run `hf download org/model` "
    with pytest.raises(ValueError, match=rf"{fetch}with network access$"):  # the server is gone
        local_model_folder("org/model", KEY)
    use_hub(monkeypatch, tmp_path, offline=True)
    with pytest.raises(
        ValueError, match=r"\(HF_HUB_OFFLINE=1\); run `hf download org/other --revision v1` with network"
    ):
        locate_model("org/other@v1", KEY)


def test_cache_with_a_missing_shard_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in(tmp_path / "model")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (model / shards["a"]).write_bytes(b"w")
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    folder = write_cache(tmp_path / "cache", "org/model", model)
    with pytest.raises(ValueError, match="has no complete weights"):
        local_model_folder("org/model", KEY)
    (folder / shards["b"]).write_bytes(b"w")
    assert local_model_folder("org/model", KEY) == folder


def test_partly_filled_cache_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(
        tmp_path / "cache", "org/model", model_in(tmp_path / "model")
    )  # as AutoConfig.from_pretrained leaves it
    with hub_server(REPOSITORIES) as (url, sent):
        use_hub(monkeypatch, tmp_path / "cache", url)
        assert contents_of(local_model_folder("org/model", KEY, weights=False)) == CONFIG
        assert sent == ["tokenizer.json"]
        assert "model.safetensors" in contents_of(local_model_folder("org/model", KEY))


def test_partly_filled_cache_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    config = write_cache(tmp_path / "cache", "org/config", model_in(tmp_path / "model"))
    assert local_model_folder("org/config", KEY, weights=False) == config  # enough for `lockstep plan`
    with pytest.raises(ValueError, match=r"holds no tokenizer .*, or run `hf download org/config` with network access"):
        hf_tokenizer("org/config", key=KEY)
    (tmp_path / "model" / "model.safetensors").touch()
    bare = write_cache(tmp_path / "cache", "org/bare", tmp_path / "model")
    assert local_model_folder("org/bare", KEY) == bare  # tokenizer_path may name another folder
    (tmp_path / "model" / "config.json").rename(tmp_path / "model" / "README.md")
    write_cache(tmp_path / "cache", "org/weights", tmp_path / "model")
    for weights in (True, False):
        lacks = "has no config.json and no tokenizer; run `hf download org/weights` with network access"
        with pytest.raises(ValueError, match=lacks):
            local_model_folder("org/weights", KEY, weights=weights)


def test_shards_without_their_index_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert not has_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert has_weights(tmp_path)


def test_processes_share_one_download(tmp_path: Path) -> None:
    script = (
        "import logging; logging.basicConfig(level=20)\n"
        "from lockstep.utils.model_path import local_model_folder\n"
        "print(local_model_folder('org/model', 'critic.model.path'))\n"
    )
    with hub_server(REPOSITORIES) as (url, sent):
        environment = os.environ | {
            "HF_ENDPOINT": url,
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "*",
        }
        command = {"args": [sys.executable, "-c", script], "env": environment, "text": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running = [subprocess.Popen(**command, **pipes) for _ in range(3)]
        outputs = [process.communicate(timeout=60) for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    assert len({printed for printed, _ in outputs}) == 1
    # one process may fetch the config, another the weights
    assert "model.safetensors" in sent and all(sent.count(file) == 1 for file in sent), sent


def test_base_of_an_adapter(tmp_path: Path) -> None:
    base = weights_in(tmp_path / "base")
    adapter = weights_in(tmp_path / "adapter", "adapter_config.json")
    assert base_folder(base, KEY) == base
    with pytest.raises(ValueError, match="does not name its base model"):
        base_folder(adapter, KEY)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert base_folder(adapter, KEY) == base
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match=rf"^base model of {KEY}=.*gone: no such folder"):
        base_folder(adapter, KEY)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read"):
        base_folder(adapter, KEY)
