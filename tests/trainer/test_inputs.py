"""Inputs of a run are fetched before torch is loaded, and are the same on all machines."""

import logging
from pathlib import Path

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run.inputs import fetch_inputs, fetch_on_workers, tokenizer_of
from tests.hub import COMMIT, contents_of, hub_server, use_hub, write_cache
from tests.tiny import write_rows

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w"}


class Group:
    def __init__(self, *fetched: tuple[str, str]) -> None:
        self.fetched = fetched

    def fetch_model(self) -> list[tuple[str, str]]:
        return list(self.fetched)


def test_inputs_are_fetched_and_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"data/train-00000-of-00001.parquet": write_rows(tmp_path / "a.parquet").read_bytes(), ".gitattributes": b""}
    overrides = ["actor_rollout_ref.model.path=org/model", "data.train_files=org/rows", "trainer.device=cpu"]
    with hub_server({"org/model": FILES, "datasets/org/rows": rows}) as (url, sent):
        use_hub(monkeypatch, tmp_path / "cache", url)
        fetch_inputs(load_config(PPOConfig, [*overrides, "trainer.n_gpus_per_node=2"]))
        assert "model.safetensors" not in sent  # the workers' machines fetch it
        assert "data/train-00000-of-00001.parquet" in sent
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lockstep.trainer.run.inputs"):
            fetch_inputs(load_config(PPOConfig, overrides))
        folder = tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT
        assert contents_of(folder) == FILES
        named = [record.getMessage() for record in caplog.records if record.name == "lockstep.trainer.run.inputs"]
        assert named == [
            f"actor_rollout_ref.model.path=org/model is read from {folder}"
        ]  # and the critic's is the same


def test_positions_of_a_fetched_model_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FILES | {"config.json": b'{"max_position_embeddings": 64}'}
    overrides = ["actor_rollout_ref.model.path=org/model", f"data.train_files={write_rows(tmp_path / 'a.parquet')}"]
    with hub_server({"org/model": files}) as (url, _):
        use_hub(monkeypatch, tmp_path / "cache", url)
        with pytest.raises(ValueError, match="but the model has 64 positions"):
            fetch_inputs(load_config(PPOConfig, [*overrides, "trainer.device=cpu"]))


def test_missing_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "a.parquet")
    with hub_server({}) as (url, _):
        use_hub(monkeypatch, tmp_path / "cache", url)
        assert main([f"data.train_files={rows}", "actor_rollout_ref.model.path=org/typo"]) == 2
    error = "error: actor_rollout_ref.model.path=org/typo: no such folder, and the Hub has no model of this name"
    assert capsys.readouterr().err.splitlines()[-1].startswith(error)


def test_machines_with_different_revisions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    for name, content in FILES.items():
        (tmp_path / "model" / name).write_bytes(content)
    write_cache(tmp_path / "cache", "org/model", tmp_path / "model")
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    config = load_config(PPOConfig, ["actor_rollout_ref.model.path=org/model"], run_checks=False)
    same, other = ("org/model", COMMIT), ("org/model", "b" * 40)
    fetch_on_workers(config, [Group(same, same), Group(("folder", "")), object()])
    refusal = rf"different revisions of org/model in their Hub caches \({COMMIT}, {'b' * 40}\); write org/model@REV"
    for groups in ([Group(same), Group(other)], [Group(other, other)]):  # the controller has COMMIT
        with pytest.raises(ValueError, match=refusal):
            fetch_on_workers(config, groups)


def test_key_of_the_tokenizer(tmp_path: Path) -> None:
    model = "actor_rollout_ref.model"
    for overrides, key in (
        ([f"{model}.path=m"], f"{model}.path"),
        ([f"{model}.path=m", f"{model}.tokenizer_path=t"], f"{model}.tokenizer_path"),
        ([f"{model}.tokenizer_path=t", "data.tokenizer=d"], "data.tokenizer"),
    ):
        config = load_config(PPOConfig, overrides, run_checks=False)
        assert tokenizer_of(config) == (key, overrides[-1].partition("=")[2])
