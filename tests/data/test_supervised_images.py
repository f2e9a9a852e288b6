"""Images in supervised and preference rows: tokens and tensors are the processor's, and batches keep them with their rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lockstep.config.data import SequenceDataConfig, SFTDataConfig
from lockstep.config.preference import PreferenceDataConfig, RMDataConfig
from lockstep.data.files import FileRow
from lockstep.data.fingerprint import changes, content_of
from lockstep.data.image_prompts import RowImages
from lockstep.data.images import ImageError
from lockstep.data.preference_dataset import PreferenceDataset
from lockstep.data.rows import write_rows
from lockstep.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, SupervisedRows
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.protocol.images import ImageInputs
from lockstep.protocol.tokens import images_of
from lockstep.trainer.supervised.batches import collate, collate_pairs, share_of, share_of_pairs
from tests.tiny_vision import save_tiny_vision_model, tiny_image

A, B = tiny_image(48, 32), tiny_image(64, 64, seed=1)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"), request.param)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def dataset_of(
    cls: type[SupervisedRows], model: Path, folder: Path, rows: list[dict[str, Any]], config: SequenceDataConfig
) -> Any:
    file = folder / "rows.jsonl"
    write_rows([{"prompt": "", **row} for row in rows], file)  # PIL images become data URIs
    tokenizer = hf_tokenizer(model)
    return cls(str(file), tokenizer, config, hf_processor(model, tokenizer, config))


def expected_inputs(dataset: Any, content: list[list[dict[str, Any]]], images: list[Any], answers: list[str]) -> Any:
    """What the processor makes of a whole conversation."""
    messages: list[dict[str, Any]] = []
    for parts, answer in zip(content, answers):
        messages += [{"role": "user", "content": parts}, said("assistant", answer)]
    processor = dataset.images.encoder.processor
    text = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], images=images, return_tensors="pt")


def test_conversations_with_images_in_several_turns(model: Path, tmp_path: Path) -> None:
    turns = [
        said("user", "<image>one?"),
        said("assistant", "yes"),
        said("user", "and <image>?"),
        said("assistant", "no"),
    ]
    rows = [{"messages": turns, "images": [A, B]}, {"messages": turns[1:2], "images": []}]
    rows[1]["messages"] = [said("user", "text?"), said("assistant", "yes")]
    config = SFTDataConfig(pad_mode="no_padding")
    dataset = dataset_of(MultiTurnSFTDataset, model, tmp_path, rows, config)
    image, text = {"type": "image"}, lambda words: {"type": "text", "text": words}
    content = [[image, text("one?")], [text("and "), image, text("?")]]
    expected = expected_inputs(dataset, content, [A, B], ["yes", "no"])
    sample = dataset[0]
    inputs = sample["multi_modal_inputs"]
    assert sample["input_ids"].tolist() == expected["input_ids"][0].tolist()
    assert all(torch.equal(value, expected[name]) for name, value in inputs.tensors.items())
    assert sum(inputs.num_tokens) == sample["input_ids"].tolist().count(inputs.token_id)
    assert not (sample["loss_mask"].bool() & (sample["input_ids"] == inputs.token_id)).any()
    trained = dataset.tokenizer.decode(sample["input_ids"][sample["loss_mask"].bool()])
    assert "yes" in trained and "no" in trained and "one" not in trained
    assert dataset[1]["multi_modal_inputs"] is None

    batch = collate([dataset[0], dataset[1], dataset[0]])
    for rank in range(2):
        share, _ = share_of(batch, rank, 2, balance=False)
        images = images_of(share)
        assert images is not None and len(images) == 2
        for ids, mask, own in zip(share["input_ids"], share["attention_mask"], images):
            num_tokens = int(((ids == inputs.token_id) & mask.bool()).sum())
            assert num_tokens == (sum(own.num_tokens) if own is not None else 0)
    assert images_of(collate([dataset[1]])) is None


def test_prompt_and_response(model: Path, tmp_path: Path) -> None:
    config = SFTDataConfig(pad_mode="no_padding")
    row = {"prompt": "<image>what?", "response": "yes", "images": [A]}
    sample = dataset_of(SFTDataset, model, tmp_path, [row], config)[0]
    assert isinstance(sample["multi_modal_inputs"], ImageInputs)
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, row 0, column 'images': the messages have 1 places .* are 0 images"
    ):
        dataset_of(SFTDataset, model, tmp_path, [row | {"images": []}], config)
    with pytest.raises(ValueError, match=r"would cut tokens of an image; raise data\.max_length"):
        dataset_of(SFTDataset, model, tmp_path, [row], SFTDataConfig(max_length=12, truncation="left"))
    answer = [said("user", "draw"), said("assistant", "<image>")]
    with pytest.raises(ValueError, match=r"row 0: an assistant message has an image"):
        dataset_of(MultiTurnSFTDataset, model, tmp_path, [{"messages": answer, "images": [A]}], config)
    tokenizer = hf_tokenizer(model)
    with pytest.raises(ValueError, match=r"row 0 has 'images', but the model reads no images"):
        SFTDataset(dataset_of(SFTDataset, model, tmp_path, [row], config).data_files[0], tokenizer, config)


def test_pairs_share_their_images(model: Path, tmp_path: Path) -> None:
    pair = {"prompt": "<image>what?", "chosen": "yes", "rejected": "no"}
    rows = [
        pair | {"images": [A], "by": 1.0},
        pair | {"images": ["gone.png"], "by": 2.0},
        pair | {"images": [B], "by": 3.0},
    ]
    config = RMDataConfig(margin_key="by", filter_bad_images=True)
    dataset = dataset_of(PreferenceDataset, model, tmp_path, rows, config)
    assert len(dataset) == 2 and [float(sample["margin"]) for sample in (dataset[0], dataset[1])] == [1, 3]
    sample = dataset[0]
    assert sample["chosen"]["multi_modal_inputs"] is sample["rejected"]["multi_modal_inputs"]
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1, column 'images': image 0 no such file: gone\.png"):
        dataset_of(PreferenceDataset, model, tmp_path, rows, PreferenceDataConfig())
    batch = collate_pairs([dataset[0], dataset[1], dataset[0]])
    shares = [share_of_pairs(batch, rank, 2, balance=False)[0] for rank in range(2)]
    images = [images_of(share) for share in shares]
    assert [[image is None for image in own or ()] for own in images] == [[False] * 4, [False] * 2 + [True] * 2]


def test_a_pair_whose_image_is_gone_for_one_side_is_dropped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"prompt": "<image>what?", "chosen": "yes", "rejected": "no"}
    rows = [pair | {"images": [image], "by": float(number)} for number, image in enumerate((A, B, A))]
    encode = RowImages.encode
    sides: list[str] = []

    def flaky(self: RowImages, row: FileRow, *arguments: Any) -> Any:
        if row.number == 1 and row.columns["side"] not in sides:
            sides.append(row.columns["side"])
            if row.columns["side"] == "rejected":
                raise ImageError("gone")
        return encode(self, row, *arguments)

    monkeypatch.setattr(RowImages, "encode", flaky)
    config = RMDataConfig(margin_key="by", filter_bad_images=True)
    dataset = dataset_of(PreferenceDataset, model, tmp_path, rows, config)
    assert [(row.number, row.columns["side"]) for row in dataset.rows] == [
        (number, side) for number in (0, 2) for side in ("chosen", "rejected")
    ]
    assert len(dataset) == 2 and [float(dataset[i]["margin"]) for i in range(2)] == [0, 2]


def test_answers_have_no_token_of_an_image(model: Path, tmp_path: Path) -> None:
    token = "<|image_pad|>" if "<|image_pad|>" in hf_tokenizer(model).get_vocab() else "<image>"
    row = {"prompt": "one?", "response": f"a{token}", "chosen": "yes", "rejected": f"a{token}"}
    for cls, config, name in (
        (SFTDataset, SFTDataConfig(max_length=256), "the response"),
        (PreferenceDataset, PreferenceDataConfig(max_length=256), "the rejected answer"),
    ):
        for more in ({}, {"prompt": "<image>one?", "images": [A]}):
            with pytest.raises(
                ValueError, match=rf"rows\.jsonl, row 0: {name} contains {re.escape(token)}, the model's own"
            ):
                dataset_of(cls, model, tmp_path, [row | more], config)


def test_videos_are_refused_by_name(tmp_path: Path) -> None:
    config = SFTDataConfig(max_length=256)
    model = save_tiny_vision_model(tmp_path / "model", "llava_next")
    for row in ({"prompt": "one?", "videos": ["a.mp4"]}, {"prompt": "<video>one?"}):
        with pytest.raises(ValueError, match=r"row 0 has videos.*, but models of type llava_next read no videos here"):
            dataset_of(SFTDataset, model, tmp_path, [row | {"response": "yes"}], config)


@pytest.mark.parametrize("cls", [SFTDataset, PreferenceDataset])
def test_a_changed_image_file_changes_the_fingerprint(cls: type[SupervisedRows], model: Path, tmp_path: Path) -> None:
    config = SFTDataConfig(max_length=256) if cls is SFTDataset else PreferenceDataConfig(max_length=256)
    row = {
        "prompt": "<image>one?",
        "response": "yes",
        "chosen": "yes",
        "rejected": "no",
        "images": [str(tmp_path / "a.png")],
    }
    found = []
    for image, name in ((A, "png"), (B, "png"), (B, "bmp")):
        image.save(tmp_path / "a.png", format=name)
        found.append(content_of(dataset_of(cls, model, tmp_path, [row], config)))
    assert changes(found[0], found[1]) == ["the content of images has changed"]
    assert changes(found[1], found[2]) == []  # the same pixels


def test_rows_of_python_objects_keep_their_images(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows([{"prompt": "<image>?", "images": [A, b"\x89PNG..."]}], file)
    images = json.loads(file.read_text())["images"]
    assert all(image.startswith("data:image/png;base64,") for image in images)
    with pytest.raises(ValueError, match="data, row 1: an image has mode F"):
        write_rows([{"prompt": "?"}, {"prompt": "<image>?", "images": [Image.new("F", (8, 8))]}], file)
