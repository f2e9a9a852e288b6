"""Vision models by their config.json: those whose images are read, those that are used for text, and those that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from lockstep.utils.model_path import base_folder, local_model_folder
from lockstep.utils.vision import SEEING, TEXT_PARTS, reads_images, vision_problem
from tests.hub import hub_server, use_hub

BLIP = {"model_type": "blip", "architectures": ["BlipForConditionalGeneration"], "vision_config": {}}


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_types_with_a_language_model_of_their_own_are_those_of_transformers() -> None:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    both = known & set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert both | {"phi4_multimodal"} == set(TEXT_PARTS)


@pytest.mark.parametrize("model_type", ["blip", "mistral3", "chameleon"])
def test_other_vision_types_are_refused(model_type: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    assert "is a vision model" in vision_problem(tmp_path)
    assert not reads_images(tmp_path)


@pytest.mark.parametrize("model_type", sorted(SEEING))
def test_images_of_these_types_are_read(model_type: str, tmp_path: Path) -> None:
    settings = {"vision_config": {}} if model_type == "gemma4" else {}  # which has no tower unless its config says so
    CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    assert vision_problem(tmp_path) == "" and reads_images(tmp_path)
    assert model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3_text", "llama4_text", "qwen3_5", "qwen2", "llama", "t5"])
def test_text_models_are_not(model_type: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    assert vision_problem(tmp_path) == ""
    assert reads_images(tmp_path) == (model_type in SEEING)


def test_custom_code_and_broken_configs_are_judged_elsewhere(tmp_path: Path) -> None:
    custom = BLIP | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    assert vision_problem(folder_of(tmp_path / "custom", custom)) == ""
    assert vision_problem(folder_of(tmp_path / "list", [])) == ""  # type: ignore[arg-type]
    assert vision_problem(tmp_path / "none") == ""


def test_path_and_key_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "blip", BLIP)
    message = r"model\.path=\S+ ?:? is a vision model \(BlipForConditionalGeneration: config.json has vision_config\)"
    with pytest.raises(ValueError, match=message):
        local_model_folder(folder, "model.path")
    with pytest.raises(ValueError, match=message):
        base_folder(folder, "model.path")
    assert local_model_folder(folder, "model.tokenizer_path", weights=False) == folder


def test_weights_of_a_vision_model_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": json.dumps(BLIP).encode(), "tokenizer.json": b"{}", "model.safetensors": b"w"}
    with hub_server({"org/blip": files}) as (url, sent):
        use_hub(monkeypatch, tmp_path / "cache", url)
        with pytest.raises(ValueError, match=r"model\.path=org/blip: is a vision model"):
            local_model_folder("org/blip", "model.path")
        assert "config.json" in sent and "model.safetensors" not in sent
