"""Images among packed tokens: what is shared, what is not, and which positions tokens get."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from lockstep.config.ppo import PPOConfig
from lockstep.models.packing import PackedAttention, forward_rows
from lockstep.models.vision import (
    PACKED_IMAGES,
    TEXT_ONLY,
    ImageFeatures,
    check_images,
    image_features,
    rope_positions,
)
from lockstep.protocol import DataProto, Ragged, object_array
from lockstep.protocol.images import ImageInputs
from lockstep.protocol.tokens import images_of, prompt_owners, with_images
from lockstep.trainer.ppo.mini_batches import MiniBatches, lay_out
from lockstep.trainer.ppo.sampling import with_scores
from lockstep.trainer.ppo.worker_calls import forward_passes
from lockstep.utils.audit import Audits
from lockstep.utils.vision import SEEING
from lockstep.workers.updates import mini_batches
from tests.models.vision_families import FAMILIES, IMAGE, batch_of_rows, images_for

CPU = torch.device("cpu")


def picture(number: int, *num_tokens: int) -> ImageInputs:
    digests = tuple(bytes([number, place, 1]) + bytes(13) for place in range(len(num_tokens)))
    return ImageInputs({"pixel_values": torch.full((1, 2), float(number))}, IMAGE, num_tokens, digests)


def rows() -> tuple[list[list[int]], list[list[int]], list[ImageInputs | None]]:
    """Rows 0, 1 and 3 have one prompt and picture, row 2 the same tokens with another picture, row 4 no picture."""
    one, same, other = picture(1, 2), picture(1, 2), picture(2, 2)
    prompt = [5, IMAGE, IMAGE, 6]
    prompts = [prompt, prompt, prompt, prompt, [5, 7, 6]]
    return prompts, [[8, 9], [9], [9], [8, 8, 8], [9]], [one, one, other, same, None]


def batch_without_padding() -> DataProto:
    prompts, responses, images = rows()
    tensors = {
        "prompts": Ragged.of_rows(prompts, 6, 0, torch.int64, torch.int32, left=True),
        "responses": Ragged.of_rows(responses, 4, 0, torch.int64, torch.int32),
        "response_mask": Ragged.of_rows([[1] * len(r) for r in responses], 4, 0, torch.int64, torch.bool),
    }
    return DataProto.from_dict(tensors, {"multi_modal_inputs": object_array(images), "uid": object_array("abcde")})


def test_equal_tokens_with_different_images_share_nothing() -> None:
    packed = forward_rows(batch_of_rows(*rows()), CPU, "packed")
    assert isinstance(packed.context, PackedAttention) and packed.context.prefixes is not None
    assert [length for _, length in packed.context.prefixes] == [0, 4, 0, 4, 0]
    assert packed.images is not None and [image.digests[0][0] for image in packed.images] == [1, 2]
    assert packed.features is not None and packed.features.tolist() == [0, 1, 2, 3]
    padded = forward_rows(batch_of_rows(*rows()), CPU, "padded")
    assert padded.features is not None and padded.features.tolist() == [0, 1, 0, 1, 2, 3, 0, 1]


def test_owners_of_prompts_are_told_by_images() -> None:
    assert prompt_owners(batch_of_rows(*rows())) == [0, 0, 2, 0, 4]
    data = batch_without_padding()
    assert prompt_owners(with_images(data)) == [0, 0, 2, 0, 4]
    assert prompt_owners(data.tensors) == [0, 0, 0, 0, 4]  # the tokens alone


def test_images_follow_their_rows_into_mini_batches() -> None:
    """Three rows on two ranks: padding rows have no images, and every row of a mini-batch has its own."""
    data = batch_without_padding()
    laid_out = lay_out(data, MiniBatches(size=3, seed=1), 2, balance=True)
    found = []
    for part in laid_out.chunk(2):
        for batch, _ in mini_batches(part):
            images = images_of(batch)
            assert images is not None
            tokens, mask = batch["input_ids"], batch["attention_mask"]
            for row, image in enumerate(images):
                ids = tokens[row][mask[row].bool()].tolist()
                assert ids.count(IMAGE) == (0 if image is None else 2)
                if len(ids) > 1:
                    found.append((ids, None if image is None else image.digests))
    prompts, responses, images = rows()
    expected = [(p + r, None if i is None else i.digests) for p, r, i in zip(prompts, responses, images)]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_text_alone_is_no_batch_with_images() -> None:
    """A model that reads images trains on text as any other: Gemma 3 on packed tokens, with any engine, critic and reward model."""
    data = batch_without_padding()
    data.non_tensor_batch["multi_modal_inputs"][:] = None
    (part,) = lay_out(data, MiniBatches(size=5), 1, balance=True).chunk(1)
    assert [images_of(batch) for batch, _ in mini_batches(part)] == [None]
    data.meta_info["metrics"] = {}
    asked: list[DataProto] = []

    class Group:
        def mesh(self, name: str) -> Any:
            return SimpleNamespace(dp_size=1)

        def compute_rm_score(self, rows: DataProto) -> Any:
            asked.append(rows)
            return SimpleNamespace(get=lambda: DataProto())

        compute_values = compute_rm_score

    forward_passes(data, {"values": Group()}, PPOConfig(), {}, Audits({}))
    no_rewards = {"reward_tensor": torch.zeros(5, 4), "reward_extra_info": {}}
    with_scores(data, Group(), lambda batch, return_dict: no_rewards, nullcontext())  # type: ignore[arg-type]
    assert [images_of(with_images(rows)) for rows in asked] == [None, None]
    assert "multi_modal_inputs" in data.non_tensor_batch


def test_a_padding_row_may_start_with_a_placeholder() -> None:
    """It is reduced to its first token and has no images."""
    batch = batch_of_rows([[IMAGE, IMAGE, 6], [IMAGE]], [[8], []], [picture(1, 2), None])
    packed = forward_rows(batch, CPU, "packed")
    assert packed.input_ids.tolist() == [[IMAGE, IMAGE, 6, 8, 0]]
    assert packed.features is not None and packed.features.tolist() == [0, 1]


def test_images_in_a_response_belong_to_the_row() -> None:
    """Rows that share a prompt with an image, each with another one in a tool's result."""
    first, second = picture(1, 1).then(picture(2, 2)), picture(1, 1).then(picture(3, 1))
    prompt = [5, IMAGE, 6]
    batch = batch_of_rows([prompt, prompt], [[8, IMAGE, IMAGE, 9], [8, IMAGE, 9]], [first, second])
    batch["response_mask"] = batch["response_mask"] * (batch["responses"] != IMAGE)
    packed = forward_rows(batch, CPU, "packed")
    assert packed.input_ids.tolist() == [[5, IMAGE, 6, 8, IMAGE, IMAGE, 9, 8, IMAGE, 9]]
    assert packed.features is not None and packed.features.tolist() == [0, 1, 2, 4]


def test_features_are_cut_and_joined() -> None:
    features = ImageFeatures(torch.arange(8.0).view(4, 2), (torch.arange(4.0)[:, None],))
    again = ImageFeatures.cat([features.slice(0, 1), features.slice(1, 4)])
    assert torch.equal(again.embeds, features.embeds) and torch.equal(again.deepstack[0], features.deepstack[0])


@pytest.mark.parametrize("name", ["llava_next", "idefics3"])
def test_images_of_a_later_turn_have_the_same_features(name: str) -> None:
    """The second turn's have more tiles."""
    with torch.device("cpu"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **FAMILIES[name].config))
    first, later = images_for(model, name, 1, [(1, 2)]), images_for(model, name, 2, [(2, 1), (2, 3)])
    pixels = later.tensors["pixel_values"]
    later.tensors["pixel_values"] = torch.nn.functional.pad(pixels, (0,) * (2 * pixels.ndim - 3) + (2,))
    if "pixel_attention_mask" in later.tensors:
        mask = later.tensors["pixel_attention_mask"]
        later.tensors["pixel_attention_mask"] = torch.nn.functional.pad(mask, (0, 0, 0, 0, 0, 2))
    with torch.no_grad():
        together = image_features(model, [first.then(later)]).embeds
        expected = torch.cat([image_features(model, [images]).embeds for images in (first, later)])
    assert len(expected) == sum(first.num_tokens + later.num_tokens)
    torch.testing.assert_close(together, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_image_of_the_check_fits_the_model(name: str) -> None:
    """As many placeholders as the model has features; positions as long as the row, equal and consecutive after the image."""
    with torch.device("cpu"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **FAMILIES[name].config))
    images = check_images(model.config, seed=1)
    if images is None:
        assert name in ("gemma3", "gemma4", "paligemma")
        return
    out = model.base_model.get_image_features(**images.tensors, return_dict=True).pooler_output
    parts = [out] if isinstance(out, torch.Tensor) else out
    assert sum(part.numel() for part in parts) == images.num_tokens[0] * parts[0].shape[-1]
    row = [4, *[IMAGE] * images.num_tokens[0], 5, 6, 7]
    positions = rope_positions(model, row, images)
    if name.startswith("qwen"):
        assert positions is not None and positions.shape == (3, len(row))
        assert np.diff(positions[:, -3:].numpy()).tolist() == [[1, 1]] * 3 and len(set(positions[:, -1].tolist())) == 1
        text = rope_positions(model, [4, 5], None)
        assert text is not None and text.tolist() == [[0, 1]] * 3
    else:
        assert positions is None


def test_every_vision_type_is_in_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page[page.index("## Vision-language models") : page.index("## All types")]
    assert SEEING >= PACKED_IMAGES
    rows = {line.split("|")[2].strip(): line for line in table.splitlines() if line.startswith("| ")}
    packed = {name: "packed" in line for types, line in rows.items() for name in types.split(", ")}
    assert {name for name in packed if name in SEEING} == SEEING
    assert {name for name, is_packed in packed.items() if is_packed} == PACKED_IMAGES
    assert set(TEXT_ONLY) <= packed.keys()
