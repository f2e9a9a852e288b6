"""A checkpoint is data: a pickle planted in any of its files is not run when the run resumes, and the error names the file."""

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from lockstep.engines.train.shard_reader import METADATA, ShardReader
from lockstep.models.loading import load_causal_lm
from lockstep.protocol import DataProto, object_array
from lockstep.trainer.main_ppo import main
from lockstep.utils.checkpoint_folder import MANIFEST
from lockstep.utils.files import sha256
from lockstep.utils.state_file import load_state

READ_ON_RESUME = (
    "manifest.json",
    "data.json",
    "trainer_state.json",
    "rollout/rank_0.json",
    "rollout/rank_0.safetensors",
    "reward_probe.json",
    "reward_probe.safetensors",
    "actor/extra_rank_0.json",
    "actor/extra_rank_0.safetensors",
    "actor/shards/.metadata",
    "actor/shards/__0_0.distcp",
    "critic/extra_rank_0.json",
    "critic/extra_rank_0.safetensors",
    "critic/shards/.metadata",
    "critic/shards/__0_0.distcp",
)


class Planted:
    """Creates the canary file when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.canary), "w"))


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the planted pickle was run"


@pytest.fixture(scope="module")
def saved_run(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The command of a PPO run, and its folder with the checkpoint of step 1."""
    files, run = tiny_run_files, tmp_path_factory.mktemp("saved") / "run"
    command = [
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/val.parquet",
        "trainer.val_before_train=false",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"custom_reward_function.path={files}/reward.py",
        "algorithm.adv_estimator=gae",
        "trainer.logger=console",
        "trainer.device=cpu",
        "trainer.total_epochs=1",
    ]
    assert main([*command, f"trainer.default_local_dir={run}", "trainer.total_training_steps=1"]) == 0
    return command, run


@pytest.fixture
def checkpoint(saved_run: tuple[list[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(saved_run[1], tmp_path / "run")
    return tmp_path / "run/global_step_1"


def resume(saved_run: tuple[list[str], Path], checkpoint: Path) -> int:
    return main([*saved_run[0], f"trainer.default_local_dir={checkpoint.parent}", "trainer.total_training_steps=2"])


def seal(checkpoint: Path) -> None:
    """Rewrite the manifest, as an attacker would."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for name in [name for name in manifest["files"] if not (checkpoint / name).exists()]:
        del manifest["files"][name]
    for path in (path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST):
        entry = {"size": path.stat().st_size, "sha256": sha256(path)}
        manifest["files"][str(path.relative_to(checkpoint))] = entry
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_the_list_of_files_is_complete(checkpoint: Path) -> None:
    found = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert {name for name in found if "/huggingface/" not in name} == {*READ_ON_RESUME, "config.yaml"}


@pytest.mark.parametrize("name", READ_ON_RESUME)
def test_planted_pickle_is_not_run_and_its_file_is_named(
    name: str, saved_run: tuple[list[str], Path], checkpoint: Path, canary: Path, capsys: Any
) -> None:
    (checkpoint / name).write_bytes(pickle.dumps(Planted(canary)))
    if name != MANIFEST:
        seal(checkpoint)
    assert resume(saved_run, checkpoint) == 2
    assert str(checkpoint / name) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data", "actor/extra_rank_0"])
def test_old_state_file_with_a_planted_pickle_is_refused(
    name: str, saved_run: tuple[list[str], Path], checkpoint: Path, canary: Path, capsys: Any
) -> None:
    (checkpoint / f"{name}.json").unlink()
    torch.save({"epoch": 0, "rng": Planted(canary)}, checkpoint / f"{name}.pt")
    seal(checkpoint)
    assert resume(saved_run, checkpoint) == 2
    assert f"{checkpoint / name}.pt is not loaded" in capsys.readouterr().err


def test_planted_config_is_a_warning(
    saved_run: tuple[list[str], Path], checkpoint: Path, canary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "config.yaml").write_text(f"a: !!python/object/apply:pathlib.Path.touch [{canary}]")
    seal(checkpoint)
    assert resume(saved_run, checkpoint) == 0
    assert f"{checkpoint}/config.yaml cannot be read" in caplog.text


def edit_metadata(shards: Path, name: str, planted: bytes, as_bytes: bool) -> None:
    """Make the entry `name` a pickle at the end of the shard file; as_bytes: declare that it is not a tensor."""
    with open(shards / METADATA, "rb") as file:
        metadata: Metadata = pickle.load(file)
    ((index, info),) = [(index, info) for index, info in metadata.storage_data.items() if index.fqn == name]
    info.offset, info.length = (shards / info.relative_path).stat().st_size, len(planted)
    if as_bytes:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = metadata.storage_data.pop(index)
    with open(shards / info.relative_path, "ab") as file:
        file.write(planted)
    with open(shards / METADATA, "wb") as file:
        pickle.dump(metadata, file)


@pytest.mark.parametrize("part", ["model.", "optimizer.state."])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_planted_entry_of_a_shard(
    part: str, as_bytes: bool, saved_run: tuple[list[str], Path], checkpoint: Path, canary: Path, capsys: Any
) -> None:
    shards = checkpoint / "actor/shards"
    torch.save(Planted(canary), checkpoint / "planted")
    name = next(name for name in ShardReader(shards).read_metadata().state_dict_metadata if name.startswith(part))
    edit_metadata(shards, name, (checkpoint / "planted").read_bytes(), as_bytes)
    seal(checkpoint)
    assert resume(saved_run, checkpoint) == 2
    assert f"{shards}/__0_0.distcp is not a shard" in capsys.readouterr().err


def test_shards_outside_the_folder_are_refused(checkpoint: Path) -> None:
    shards = checkpoint / "actor/shards"
    with open(shards / METADATA, "rb") as file:
        metadata: Metadata = pickle.load(file)
    next(iter(metadata.storage_data.values())).relative_path = "../../data.json"
    with open(shards / METADATA, "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(ValueError, match=r"\.metadata .*a file outside its folder"):
        ShardReader(shards).read_metadata()


@pytest.mark.parametrize(
    "name", [b"pathlib\nPosixPath", b"torch\nSize", b"torch.distributed.checkpoint.metadata\nMetadata"]
)
def test_metadata_cannot_change_a_class(name: bytes, tmp_path: Path) -> None:
    """The BUILD opcode would set `_str` on the class itself, for every path of the process."""
    state = b"N}\x8c\x04_str\x8c\x05/evils\x86"  # (None, {"_str": "/evil"})
    (tmp_path / ".metadata").write_bytes(b"\x80\x04c" + name + b"\n" + state + b"b.")
    with pytest.raises(ValueError, match="it sets the state of"):
        ShardReader(tmp_path).read_metadata()
    assert not hasattr(Metadata, "_str") and str(Path("/good")) == "/good"


def test_model_folder_with_pickled_weights_is_not_run(tiny_run_files: Path, tmp_path: Path, canary: Path) -> None:
    from lockstep.config.model import HFModelConfig

    folder = tmp_path / "model"
    shutil.copytree(tiny_run_files / "model", folder)
    (folder / "model.safetensors").rename(tmp_path / "kept")
    torch.save({"lm_head.weight": Planted(canary)}, folder / "pytorch_model.bin")
    config = HFModelConfig(path=str(folder))
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model\.path=.*cannot be loaded"):
        load_causal_lm(config, "actor_rollout_ref.model", torch.float32, torch.device("cpu"))
    (tmp_path / "kept").rename(folder / "model.safetensors")  # preferred
    load_causal_lm(config, "actor_rollout_ref.model", torch.float32, torch.device("cpu"))


def test_adapter_with_pickled_weights_is_not_run(tiny_run_files: Path, tmp_path: Path, canary: Path) -> None:
    from peft import LoraConfig

    from lockstep.config.model import HFModelConfig

    folder = tmp_path / "adapter"
    LoraConfig(r=4, base_model_name_or_path=str(tiny_run_files / "model")).save_pretrained(str(folder))
    torch.save({"base_model.model.lm_head.lora_A.weight": Planted(canary)}, folder / "adapter_model.bin")
    config = HFModelConfig(path=str(folder))
    with pytest.raises(ValueError, match=r"model\.path=.*: its adapter_model\.bin holds more than tensors"):
        load_causal_lm(config, "model", torch.float32, torch.device("cpu"))
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.path=.*: its weights cannot be read"):
        load_causal_lm(config, "model", torch.float32, torch.device("cpu"))


def test_model_folder_with_code_needs_trust_remote_code(tiny_run_files: Path, tmp_path: Path, canary: Path) -> None:
    from lockstep.config.model import HFModelConfig

    folder = tmp_path / "model"
    shutil.copytree(tiny_run_files / "model", folder)
    (folder / "code.py").write_text(f"open({str(canary)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "unknown"}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_causal_lm(HFModelConfig(path=str(folder)), "actor_rollout_ref.model", torch.float32, torch.device("cpu"))


def test_batch_file_with_a_planted_pickle_is_refused(tmp_path: Path, canary: Path) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps(Planted(canary)))
    with pytest.raises(ValueError, match="batch is not a DataProto"):
        DataProto.load_from_disk(tmp_path / "batch")
    data = DataProto.from_dict(non_tensors={"x": object_array([Planted(canary)])})
    with pytest.raises(ValueError, match=r"non_tensor_batch\.x\[0\] is a .*Planted, which cannot be saved; use dicts"):
        data.save_to_disk(tmp_path / "batch")


def test_checkpoint_of_an_earlier_version_resumes(saved_run: tuple[list[str], Path], checkpoint: Path) -> None:
    for stem in ("data", "actor/extra_rank_0", "critic/extra_rank_0"):
        state = load_state(checkpoint / stem)
        state.pop("content", None)
        for suffix in (".json", ".safetensors"):
            (checkpoint / f"{stem}{suffix}").unlink(missing_ok=True)
        torch.save(state, checkpoint / f"{stem}.pt")
    (checkpoint / "config.yaml").unlink()
    seal(checkpoint)
    assert resume(saved_run, checkpoint) == 0
    shutil.copytree(saved_run[1], (whole := checkpoint.parent.parent / "whole"))
    assert resume(saved_run, whole / "global_step_1") == 0
    first, second = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (checkpoint.parent, whole)
    )
    same = [k for k in first[-1] if not k.startswith(("time", "timing", "perf/"))]
    assert first[-1]["step"] == 2 and [first[-1][k] for k in same] == [second[-1][k] for k in same]
    assert isinstance(load_state(whole / "global_step_2/actor/extra_rank_0")["rng"]["numpy"][1], np.ndarray)
