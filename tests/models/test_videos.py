"""Videos among packed tokens: positions, the order of features, and what is shared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from lockstep.models.packing import PackedAttention, forward_rows
from lockstep.models.video_positions import continue_after_videos, fix_video_positions
from lockstep.models.vision import base_of, image_features, rope_positions
from lockstep.protocol.images import ImageInputs, content_ids
from lockstep.protocol.tokens import prompt_owners
from lockstep.utils.vision import SEEING, WATCHING
from tests.models import vision_families
from tests.models.video_families import (
    FAMILIES,
    OF_FRAMES,
    own_inputs_of,
    positions_of,
    prompt_of,
    rows_with_videos,
    videos_for,
)
from tests.models.vision_families import images_for, save_tiny_vision

CPU = torch.device("cpu")


def model_of(name: str, folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(save_tiny_vision(name, folder)).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_are_those_by_hand(name: str, tmp_path: Path) -> None:
    """Also if a video is long; transformers' own are the same where a video does not run ahead of its frames."""
    model = model_of(name, tmp_path)
    image = images_for(model, name, 1, [(2, 3)])
    for images in (
        videos_for(name, 1, (9, 1, 2)),
        image.then(videos_for(name, 2, (3, 2, 2), (5, 1, 1))),
        videos_for(name, 3, (4, 3, 1)).then(image),
    ):
        ids = [*prompt_of(name, [5, 6], images), 8, 9]
        found = rope_positions(model, ids, images)
        assert found is not None
        expected = positions_of(name, ids, images)
        assert torch.equal(found, expected)
        inputs = own_inputs_of(name, ids, images)
        del inputs["position_ids"], inputs["input_ids"]
        inputs = {key: value for key, value in inputs.items() if "pixel" not in key}
        theirs, _ = base_of(model).get_rope_index(torch.tensor([ids]), **inputs)
        assert torch.equal(theirs[:, 0], expected) == (name in OF_FRAMES)
        fix_video_positions(model)
        ours, delta = base_of(model).get_rope_index(torch.tensor([ids]), **inputs)
        assert torch.equal(ours[:, 0], expected)
        assert int(delta) == int(expected.max()) + 1 - len(ids) == int(expected[0, -1]) + 1 - len(ids)
        del base_of(model).get_rope_index


def test_positions_of_padded_rows(tmp_path: Path) -> None:
    model = model_of("qwen2_vl", tmp_path)
    fix_video_positions(model)
    long, short = videos_for("qwen2_vl", 1, (9, 1, 2)), videos_for("qwen2_vl", 2, (2, 1, 1))
    rows = [prompt_of("qwen2_vl", [5], long), prompt_of("qwen2_vl", [5, 6], short)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    kinds = 2 * (ids == 93).int()
    grids = torch.cat([long.tensors["video_grid_thw"], short.tensors["video_grid_thw"]])
    found, deltas = base_of(model).get_rope_index(
        ids, mm_token_type_ids=kinds, video_grid_thw=grids, attention_mask=(ids != 0).int()
    )
    for row, (tokens, video) in enumerate(zip(rows, (long, short))):
        expected = positions_of("qwen2_vl", tokens, video)
        assert torch.equal(found[:, row, width - len(tokens) :], expected)
        assert int(deltas[row]) == int(expected.max()) + 1 - len(tokens)


def test_positions_without_videos_are_kept() -> None:
    positions = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3], [0, 1, 1, 1]])
    assert continue_after_videos(positions, torch.tensor([0, 1, 1, 1])) is positions
    assert continue_after_videos(positions, torch.tensor([0, 2, 2, 2])) is positions  # nothing follows


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_features_are_in_the_order_of_placeholders(name: str, tmp_path: Path) -> None:
    """Of an image between two videos, and of the same ones in other prompts."""
    model = model_of(name, tmp_path)
    image, one, other = (
        images_for(model, name, 1, [(1, 2)]),
        videos_for(name, 1, (2, 1, 1)),
        videos_for(name, 2, (3, 1, 2)),
    )
    with torch.no_grad():
        alone = [image_features(model, [part]) for part in (one, image, other)]
        found = image_features(model, [one.then(image).then(other), image])
    expected = torch.cat([*(part.embeds for part in alone), alone[1].embeds])
    torch.testing.assert_close(found.embeds, expected, atol=1e-5, rtol=0)
    for i, layer in enumerate(found.deepstack):
        parts = torch.cat([*(part.deepstack[i] for part in alone), alone[1].deepstack[i]])
        torch.testing.assert_close(layer, parts, atol=1e-5, rtol=0)
    own = base_of(model).get_video_features(
        one.tensors["pixel_values_videos"], one.tensors["video_grid_thw"], return_dict=True
    )
    torch.testing.assert_close(alone[0].embeds, torch.cat(list(own.pooler_output)), atol=1e-6, rtol=0)


def test_equal_tokens_with_different_videos_share_nothing(tmp_path: Path) -> None:
    batch = rows_with_videos(model_of("qwen2_5_vl", tmp_path), "qwen2_5_vl")
    assert prompt_owners(batch) == [0, 0, 2, 3, 4, 5]
    packed = forward_rows(batch, CPU, "packed")
    assert isinstance(packed.context, PackedAttention) and packed.context.prefixes is not None
    assert [length > 0 for _, length in packed.context.prefixes] == [False, True, False, False, False, False]
    assert packed.images is not None and len(packed.images) == 4  # the first video once
    assert packed.placeholders == (90, 93)
    images = batch.get("multi_modal_inputs").tolist()
    ids = [
        batch["prompts"][row][batch["attention_mask"][row, : batch["prompts"].shape[1]].bool()].tolist()
        for row in (0, 2)
    ]
    assert ids[0] == ids[1]
    assert content_ids(ids[0], images[0]) != content_ids(ids[1], images[2])
    with pytest.raises(ValueError, match="6 placeholder tokens of images, but 7 features"):
        content_ids(ids[0], ImageInputs({}, 90, (7,), (bytes(16),), (), (True,), 93))


def test_state_of_videos() -> None:
    videos = videos_for("qwen2_5_vl", 1, (2, 1, 1))
    again = ImageInputs(**videos.to_state())
    assert again.kinds == (True,) and again.placeholders == (90, 93) and again.digests == videos.digests


def test_types_with_videos() -> None:
    assert WATCHING <= SEEING and sorted(WATCHING) == sorted(FAMILIES)
    for name in vision_families.FAMILIES:
        has = hasattr(AutoConfig.for_model(name, **vision_families.FAMILIES[name].config), "video_token_id")
        assert has or name not in WATCHING
