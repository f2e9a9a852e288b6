"""`lockstep convert`: FSDP checkpoints of verl, with DTensors of one and two mesh dimensions, LoRA and critics."""

import json
import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import AutoModelForSequenceClassification

from lockstep import cli
from lockstep.config.model import HFModelConfig
from lockstep.models.loading import load_causal_lm
from tests.export.save_cases import verl_part
from tests.tiny import save_tiny_model
from tests.value_model import load_value_model

CPU = torch.device("cpu")


@contextmanager
def mesh_of_rank(rank: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """The mesh as this rank sees it, without other processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = torch.Size(shape).numel()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    finally:
        dist.destroy_process_group()


def write_shards(part: Path, weights: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
    """As FSDP saves them: split along the first dimension over the last one of the mesh, replicated over the others."""
    world_size = torch.Size(shape).numel()
    for rank in range(world_size):
        with mesh_of_rank(rank, shape) as mesh:
            placements: list[Placement] = [*[Replicate()] * (len(shape) - 1), Shard(0)]
            state = {}
            for name, tensor in weights.items():
                chunks = tensor.chunk(shape[-1])
                own = chunks[rank % shape[-1]] if rank % shape[-1] < len(chunks) else tensor[:0]
                state[name] = DTensor.from_local(
                    own.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            torch.save(state, part / f"model_world_size_{world_size}_rank_{rank}.pt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def part(model: Path, tmp_path: Path) -> Path:
    return verl_part(tmp_path / "verl" / "global_step_5" / "actor", model)


def convert(*words: object) -> int:
    return cli.main(["convert", *map(str, words)])


@pytest.mark.parametrize("shape", ((1,), (3,), (2, 2)))
def test_shards_become_a_folder_that_the_trainer_opens(
    shape: tuple[int, ...], model: Path, part: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(model / "model.safetensors")
    write_shards(part, weights, shape)
    (part.parents[1] / "latest_checkpointed_iteration.txt").write_text("5")
    assert convert(part.parents[1], "-o", tmp_path / "out", "--dtype", "bfloat16") == 0
    printed = capsys.readouterr().out
    assert "27 tensors are those of the checkpoint in bfloat16" in printed and "largest difference of 251" in printed
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights.items())
    opened = load_causal_lm(HFModelConfig(path=str(tmp_path / "out")), "m", torch.bfloat16, CPU)
    assert torch.equal(opened.get_output_embeddings().weight, weights["lm_head.weight"].bfloat16())


def test_tied_head_is_stored_once(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    part = verl_part(tmp_path / "actor", model)
    weights = load_file(model / "model.safetensors")
    write_shards(part, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, (2,))
    assert convert(part, "-o", tmp_path / "out") == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()


def test_plain_tensors_and_other_torch_versions(model: Path, part: Path, tmp_path: Path) -> None:
    """One rank has plain tensors; older versions name the classes differently and have no layout in the mesh."""
    weights = load_file(model / "model.safetensors")
    torch.save(weights, part / "model_world_size_1_rank_0.pt")
    assert convert(part, "-o", tmp_path / "plain") == 0
    (part / "model_world_size_1_rank_0.pt").unlink()
    write_shards(part, weights, (2,))
    for file in part.glob("*.pt"):
        rename_classes(
            file,
            {
                b"ctorch.distributed.tensor\nDTensor\n": b"ctorch.distributed._tensor.api\nDTensor\n",
                b"ctorch.distributed.tensor.placement_types\n": b"ctorch.distributed._tensor.placement_types\n",
                b"ctorch.distributed.tensor._dtensor_spec\n": b"ctorch.distributed._tensor.placement_types\n",
            },
        )
    assert convert(part, "-o", tmp_path / "older") == 0
    for name in ("plain", "older"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], weights[key]) for key in weights)


def rename_classes(file: Path, names: Mapping[bytes, bytes]) -> None:
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            if name.endswith("data.pkl"):
                for before, after in names.items():
                    assert before in content
                    content = content.replace(before, after)
            archive.writestr(name, content)


def test_critic(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = verl_part(tmp_path / "global_step_5" / "critic", model)
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    weights |= {"score.weight": torch.randn(1, 32), "score.bias": torch.tensor([0.25])}
    write_shards(part, weights, (2,))
    assert convert(part.parent, "--role", "critic", "-o", tmp_path / "out") == 0
    assert "score.bias=0.25 is left out" in capsys.readouterr().out
    _, score = load_value_model(HFModelConfig(path=str(tmp_path / "out")), "m", torch.float32, CPU, seed=0)
    assert torch.equal(score.weight, weights["score.weight"])
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1


def test_lora_is_merged_or_copied(model: Path, part: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    target = "model.layers.1.mlp.down_proj"
    a, b = torch.randn(4, 64), torch.randn(32, 4)
    state = {f"base_model.model.{name}": tensor for name, tensor in weights.items() if not name.startswith(target)}
    state |= {f"base_model.model.{target}.base_layer.weight": weights[f"{target}.weight"]}
    state |= {
        f"base_model.model.{target}.lora_A.default.weight": a,
        f"base_model.model.{target}.lora_B.default.weight": b,
    }
    write_shards(part, state, (2,))
    assert convert(part, "-o", tmp_path / "out") == 2  # nothing says how the adapter is scaled
    (part / "lora_adapter").mkdir()
    (part / "lora_adapter" / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    assert convert(part, "-o", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    torch.testing.assert_close(found[f"{target}.weight"], weights[f"{target}.weight"] + 2 * b @ a)
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])
    assert convert(part, "-o", tmp_path / "adapter", "--adapter") == 0
    assert [path.name for path in (tmp_path / "adapter").iterdir()] == ["adapter_config.json"]


def test_shards_that_do_not_fit_together(
    model: Path, part: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(model / "model.safetensors")
    write_shards(part, weights, (2,))
    shutil.copy(part / "model_world_size_2_rank_0.pt", part / "model_world_size_2_rank_1.pt")  # the first half, twice
    assert convert(part, "-o", tmp_path / "out") == 2
    assert "do not fit together: they have " in capsys.readouterr().err
    torch.save({"other": torch.ones(1)}, part / "model_world_size_2_rank_1.pt")
    assert convert(part, "-o", tmp_path / "out") == 2
    assert "ranks 0 and 1 have different tensors (" in capsys.readouterr().err


class Planted:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_pickles_are_data(model: Path, part: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = part / "model_world_size_1_rank_0.pt"
    for save in (torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))):
        save({"w": torch.ones(2), "x": Planted(tmp_path / "ran")}, file)
        assert convert(part, "-o", tmp_path / "out") == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {file} ") and printed.count("\n") == 1
        assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_bad_input_is_one_message(model: Path, part: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("-o", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "megatron" / "dist_ckpt").mkdir(parents=True)

    def refused(message: str, *words: object) -> None:
        assert convert(*words) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1 and message in printed, printed

    refused("no such file or folder", tmp_path / "nowhere", *out)
    refused("so it is not a checkpoint of verl", tmp_path / "empty", *out)
    refused("give one of global_step_5", part.parents[1], *out)
    refused("is a Megatron checkpoint", tmp_path / "megatron", *out)
    refused("use `lockstep export", part, *out)
    torch.save(load_file(model / "model.safetensors"), part / "model_world_size_2_rank_1.pt")
    refused("lacks model_world_size_2_rank_0.pt", part, *out)
    refused("-o FOLDER is needed", part)
    refused("exists; add --overwrite", part, "-o", model)
    refused("has no lora_adapter", part, "--adapter", *out)
    torch.save([1], part / "model_world_size_2_rank_0.pt")
    refused("does not hold tensors by name", part, *out)
    (part / "model_world_size_2_rank_0.pt").write_bytes(b"damaged")
    refused("model_world_size_2_rank_0.pt cannot be read", part, *out)
    shutil.copy(part / "model_world_size_2_rank_1.pt", part / "model_world_size_3_rank_0.pt")
    refused("but has of 2 and 3 ranks", part, *out)
    (part / "huggingface" / "config.json").unlink()
    refused("give the model that was trained by --model", part, *out)
