"""Images of a sequence: equal placeholders with different pictures are different contents."""

import pickle

import pytest
import torch

from lockstep.protocol.images import ImageInputs, content_ids


def image(name: bytes, num_tokens: int) -> ImageInputs:
    pixels = torch.full((num_tokens * 4, 3), float(name[0]))
    return ImageInputs({"pixel_values": pixels}, 9, (num_tokens,), (name * 16,), (name,))


def test_placeholders_are_told_apart_by_content() -> None:
    ids = [1, 9, 9, 2, 9, 3]
    one, other = (image(name, 2).then(image(b"c", 1)) for name in (b"a", b"b"))
    assert content_ids(ids, None) == ids
    first, second = content_ids(ids, one), content_ids(ids, other)
    assert [a == b for a, b in zip(first, second)] == [True, False, False, True, True, True]
    assert first[1] == first[2] < 0 and first[4] < 0 and [first[i] for i in (0, 3, 5)] == [1, 2, 3]


@pytest.mark.parametrize("ids", [[1, 9], [1, 9, 9, 9]])
def test_placeholders_that_do_not_fit_the_images_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"{ids.count(9)} placeholder tokens of images, but 2 features"):
        content_ids(ids, image(b"a", 2))


def test_images_that_follow_are_appended() -> None:
    both = image(b"a", 2).then(image(b"b", 1)).then(None)
    assert both.tensors["pixel_values"].shape == (12, 3) and both.num_tokens == (2, 1) and both.files == (b"a", b"b")


def test_images_with_fewer_tiles_are_padded() -> None:
    """A tool's image has other tiles than that of the prompt (SmolVLM, Idefics 3, LLaVA-Next)."""
    few, many = (ImageInputs({"pixel_values": torch.ones(1, n, 3, 2)}, 9, (n,), (b"a" * 16,)) for n in (1, 4))
    pixels = few.then(many).tensors["pixel_values"]
    assert pixels.shape == (2, 4, 3, 2) and pixels[0].sum() == 6 and pixels[1].all()
    assert torch.equal(pixels.flip(0), many.then(few).tensors["pixel_values"])


def test_samples_of_a_prompt_send_its_images_once() -> None:
    shared = image(b"a", 1000)
    assert len(pickle.dumps([shared] * 8)) < 2 * len(pickle.dumps([shared]))
