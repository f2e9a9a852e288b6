"""Loading by shards: the same bits as transformers' `from_pretrained` on any number of ranks, in the memory of a shard."""

import json
import logging
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from lockstep import cli
from lockstep.models import export
from lockstep.models.known_models import install_decoder_layers
from tests.engines.train.ranks import Ranks
from tests.export.save_cases import save_as_verl, save_parts, verl_part, write_run
from tests.models import load_cases
from tests.models.architectures import MODEL_TYPES, SKIPPED, save_tiny_model
from tests.models.load_cases import LAYER_BYTES, NUM_LAYERS
from tests.tiny import save_tiny_model as save_model, tiny_tokenizer

WORLDS = (1, 2, 4)


def on_ranks(ranks: Ranks, world: int, function: Any, *args: Any) -> list[Any]:
    return ranks.run(world, function, *args) if world > 1 else [function(*args)]


def plain_values(cls: Any, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    model = cls.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    return {name: load_cases.as_numpy(tensor) for name, tensor in tensors}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, (dtype, tensor) in expected.items():
        assert found[name][0] == dtype, name
        np.testing.assert_array_equal(found[name][1], tensor, err_msg=name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("model_type", "dtype", "changes"),
    [
        ("qwen2", torch.float32, {"tie_word_embeddings": True}),
        ("llama", torch.bfloat16, {"tie_word_embeddings": False}),
        ("gemma3_text", torch.float32, {}),
        ("gpt2", torch.float32, {}),
        ("phi3", torch.float32, {}),
        ("qwen3_moe", torch.float32, {}),
        ("deepseek_v3", torch.bfloat16, {}),
    ],
    ids=str,
)
def test_a_policy_has_the_bits_of_from_pretrained(
    model_type: str, dtype: torch.dtype, changes: dict[str, Any], world: int, tmp_path: Path, ranks: Ranks
) -> None:
    save_tiny_model(model_type, tmp_path, **changes)
    expected = plain_values(AutoModelForCausalLM, tmp_path, dtype)
    for found in on_ranks(ranks, world, load_cases.values, tmp_path, "policy", dtype):
        assert_same(found, expected)


@pytest.mark.parametrize("world", WORLDS)
def test_value_and_reward_heads_are_loaded_with_their_bodies(world: int, tmp_path: Path, ranks: Ranks) -> None:
    save_tiny_model("qwen2", tmp_path / "policy", tie_word_embeddings=True)
    critics = on_ranks(ranks, world, load_cases.values, tmp_path / "policy", "value", torch.float32)
    policy = plain_values(AutoModelForCausalLM, tmp_path / "policy", torch.float32)
    body = {name: value for name, value in policy.items() if name.startswith("model.")}
    for critic in critics:
        head = critic.pop("score.weight")
        assert head[1].shape == (1, 32) and np.abs(head[1]).sum() > 0
        assert_same(critic, body)
    scored = AutoModelForSequenceClassification.from_pretrained(tmp_path / "policy", num_labels=1)
    scored.save_pretrained(tmp_path / "scorer")
    expected = plain_values(AutoModelForSequenceClassification, tmp_path / "scorer", torch.bfloat16)
    for kind in ("reward", "value"):  # a critic may start from a reward model, which has no language-model head
        for found in on_ranks(ranks, world, load_cases.values, tmp_path / "scorer", kind, torch.bfloat16):
            assert_same(found, expected)


@pytest.mark.parametrize("world", (1, 2))
def test_pickled_weights_and_missing_tensors_are_loaded_by_rank_0(world: int, tmp_path: Path, ranks: Ranks) -> None:
    save_tiny_model("llama", tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    expected = plain_values(AutoModelForCausalLM, tmp_path, torch.float32)
    for found in on_ranks(ranks, world, load_cases.values, tmp_path, "policy", torch.float32):
        assert_same(found, expected)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    (tmp_path / "pytorch_model.bin").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    first, *others = on_ranks(ranks, world, load_cases.values, tmp_path, "policy", torch.float32)
    for other in others:
        assert_same(other, first)  # the missing tensor is drawn once
    drawn, before = (found.pop("model.layers.1.mlp.up_proj.weight")[1] for found in (first, expected))
    assert drawn.std() > 0 and not np.array_equal(drawn, before)
    assert_same(first, expected)


def test_embeddings_that_a_folder_has_twice_are_tied_if_they_are_equal(
    tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model("qwen2", tmp_path, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    for change, tied in ((0.0, True), (1.0, False)):
        save_file(
            weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + change},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
        expected = plain_values(AutoModelForCausalLM, tmp_path, torch.float32)
        assert_same(load_cases.values(tmp_path, "policy", torch.float32), expected)
        assert_same(ranks.run(2, load_cases.values, tmp_path, "policy", torch.float32)[1], expected)
        model = load_cases.opened(tmp_path, "policy", torch.float32).transformer
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        assert ("they are not tied" in caplog.text) != tied


def test_tensors_that_the_model_does_not_use_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.0.rotary_emb.inv_freq": torch.ones(2), "vision.weight": torch.ones(2)}
    save_file(weights | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_cases.values(tmp_path, "policy", torch.float32)
    assert "tensors that Qwen2ForCausalLM does not use: vision.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_head_of_a_critic_is_not_named_as_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for num_labels, is_named in ((1, False), (2, True)):  # a head of two labels is not loaded
        head = torch.ones(num_labels, weights["model.norm.weight"].shape[0])
        save_file(weights | {"score.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        caplog.clear()
        load_cases.values(tmp_path, "value", torch.float32)
        assert ("does not use: score.weight" in caplog.text) == is_named
    caplog.clear()
    load_cases.values(tmp_path, "policy", torch.float32)
    assert "does not use: score.weight" in caplog.text


class Planted:
    def __reduce__(self) -> Any:
        return logging.warning, ("this must not run",)


def test_a_folder_that_rank_0_cannot_load_is_refused_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    save_tiny_model("qwen2", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    for message in ranks.run(2, load_cases.refusal, tmp_path):
        assert message.startswith(f"m.path={str(tmp_path)!r} cannot be loaded")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Planted()))
    for message in ranks.run(2, load_cases.refusal, tmp_path):
        assert "m.path=" in message and "cannot be loaded" in message


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    load_cases.write_large_model(folder)
    return folder


def test_a_rank_takes_the_memory_of_its_shard_and_at_most_one_layer_more(large: Path, ranks: Ranks) -> None:
    """Beyond it, the former way takes the whole model: so the measure would see it."""
    for shard, peak in ranks.run(4, load_cases.memory_of_loading, large, "by shards"):
        assert shard > NUM_LAYERS * LAYER_BYTES // 4
        assert shard * 0.9 < peak < shard + LAYER_BYTES
    for shard, peak in ranks.run(4, load_cases.memory_of_loading, large, "whole"):
        assert peak > shard + (NUM_LAYERS - 2) * LAYER_BYTES


def test_an_export_takes_the_memory_of_one_file(large: Path, tmp_path: Path, ranks: Ranks) -> None:
    first, *others = ranks.run(4, load_cases.memory_of_saving, large, tmp_path / "out", LAYER_BYTES // 2)
    assert first < 3 * LAYER_BYTES < NUM_LAYERS * LAYER_BYTES
    assert max(others) < 2.5 * LAYER_BYTES  # two, and what the allocator keeps
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) == NUM_LAYERS + 2  # the embedding, the layers, norm and head
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert {key for key, name in index.items() if name == file.name} == set(tensors.keys())
    assert_same(
        plain_values(AutoModelForCausalLM, tmp_path / "out", torch.float32),
        plain_values(AutoModelForCausalLM, large, torch.float32),
    )


@pytest.mark.parametrize("file_bytes", (1, 10**9))
def test_experts_are_exported_in_the_format_of_their_folder(
    file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", file_bytes)
    save_tiny_model("qwen3_moe", tmp_path / "model")
    model = load_cases.opened(tmp_path / "model", "policy", torch.float32)
    (tmp_path / "out").mkdir()
    for stale in ("model.safetensors", "model-00001-of-00099.safetensors"):
        (tmp_path / "out" / stale).write_bytes(b"of an earlier save")
    export.save_policy(model.transformer, load_cases.whole(model), tiny_tokenizer(), tmp_path / "out")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    install_decoder_layers(again)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (file_bytes == 1)


MIXTURES = sorted(
    model_type
    for model_type in set(MODEL_TYPES) - SKIPPED.keys()
    if any(isinstance(c, WeightConverter) for c in get_checkpoint_conversion_mapping(model_type) or ())
)
"""Types whose parameters are not those of their files, as experts are fused."""


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=() if model_type in ("mixtral", "nemotron_h", "hrm_text") else pytest.mark.slow)
        for model_type in MIXTURES
    ],
)
def test_weights_are_sent_as_they_are_saved(model_type: str, tmp_path: Path) -> None:
    """Names, shapes and bits of `save_pretrained`, which vLLM loads; shapes are announced by empty tensors."""
    save_tiny_model(model_type, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    model = load_cases.opened(tmp_path, "policy", torch.float32)
    saved = set(model.transformer.state_dict())
    buffers = [(name, buffer) for name, buffer in model.transformer.named_buffers() if name in saved]
    parameters = [*load_cases.whole(model), *buffers]
    sent = dict(export.as_saved(model.transformer, parameters))
    assert sent.keys() == expected.keys() != dict(parameters).keys()
    assert all(torch.equal(sent[name], expected[name]) for name in expected)
    empty = [(name, torch.empty(tensor.shape, device="meta")) for name, tensor in parameters]
    shapes = [(name, tensor.shape) for name, tensor in export.as_saved(model.transformer, empty)]
    assert shapes == [(name, tensor.shape) for name, tensor in sent.items()]


def test_shards_of_two_ranks_are_exported(ranks: Ranks, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    write_run(tmp_path / "run", str(model), model, lambda *args: ranks.run(2, save_parts, *args))
    assert len(list((tmp_path / "run").rglob("*.distcp"))) == 4
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--check", "tensors"]) == 0
    assert_same_files(tmp_path / "out", model)


def test_shards_of_verl_are_converted(ranks: Ranks, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    part = verl_part(tmp_path / "global_step_3" / "actor", model)
    ranks.run(2, save_as_verl, part, model)
    assert cli.main(["convert", str(part.parent), "-o", str(tmp_path / "out")]) == 0
    assert_same_files(tmp_path / "out", model)


def assert_same_files(got: Path, expected: Path) -> None:
    found, weights = (load_file(folder / "model.safetensors") for folder in (got, expected))
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
