"""Processors of vision-language models load without torchvision."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from lockstep.models.processor import load_processor
from tests.tiny import save_tiny_model
from tests.tiny_vision import FAMILIES, image_inputs, image_message, save_tiny_vision_model, tiny_image


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_reads_its_image(tmp_path: Path, model_type: str) -> None:
    save_tiny_vision_model(tmp_path, model_type)
    processor = load_processor(tmp_path)
    images = [tiny_image(48, 32), tiny_image(64, 64, seed=1)]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    inputs = image_inputs(processor, image_message("what?", 2), images)
    logits = model(**inputs).logits
    other = model(**image_inputs(processor, image_message("what?", 2), [tiny_image(48, 32, seed=2), images[1]])).logits
    assert logits.shape[:2] == inputs["input_ids"].shape
    assert logits.isfinite().all()
    assert (logits[0, -1] - other[0, -1]).abs().max() > 1e-4


def test_folder_in_the_hub_form(tmp_path: Path) -> None:
    """Qwen2.5-VL on the Hub has preprocessor_config.json with the image processor's settings."""
    save_tiny_vision_model(tmp_path)
    saved = tmp_path / "processor_config.json"
    settings = json.loads(saved.read_text())
    saved.unlink()
    old = settings["image_processor"] | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    inputs = image_inputs(load_processor(tmp_path), image_message("what?"), [tiny_image()])
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6]]


def test_folder_without_settings_of_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `images_only` saves it: its images are read also where torchvision is installed, and its videos refused by name."""
    save_tiny_vision_model(tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    settings.pop("video_processor", None)
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("lockstep.models.processor.why_no_video_processor", lambda model_type: "")
    processor = load_processor(tmp_path)
    assert image_inputs(processor, image_message("what?"), [tiny_image()])["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert "no settings of a video processor; copy video_preprocessor_config.json" in processor.no_videos


def test_text_models_have_none(tmp_path: Path) -> None:
    assert load_processor(save_tiny_model(tmp_path)) is None
