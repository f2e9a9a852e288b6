"""The images and videos of one sequence: what the model's processor made of them, and what tells them apart.

A placeholder token stands for each feature of an image that the model reads. Equal tokens with different images are different
sequences: prompts are compared and shared by their `content_ids`, not by token ids. Videos are images of another kind: they have
their own placeholder token and tensors, and share the order of the placeholders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IMAGES = "multi_modal_inputs"
"""The column of a batch with the images of each row, or None."""
SECONDS = "second_per_grid_ts"
"""The tensor with the seconds between two temporal patches of each video (Qwen2.5-VL)."""


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """Samples of one prompt refer to the same object, so that a batch has it once.

    tensors:        what the processor returns besides token ids (pixel_values, image_grid_thw, …; of videos pixel_values_videos,
                    video_grid_thw, …), of all images in the order of their placeholders; each is concatenated over images along
                    the first dimension. Images that came at different times may have another number of tiles: missing ones are
                    zero, as in the processor's own batches.
    token_id:       the placeholder token of images.
    num_tokens:     placeholder tokens of each image in the sequence. Those of a video may have text between its frames.
    digests:        of the pixels that the processor was given of each image, 16 bytes; of a video, of its frames and their times.
    files:          each image as it was given (PNG, JPEG, …), for engines that prepare images by themselves, and for dumps; of a
                    video, a picture of its frames.
    are_videos:     whether each of them is a video; empty if none is.
    video_token_id: the placeholder token of videos; None if there are none.
    """

    tensors: dict[str, Tensor]
    token_id: int
    num_tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    files: tuple[bytes, ...] = field(default=(), repr=False)
    are_videos: tuple[bool, ...] = ()
    video_token_id: int | None = None

    @property
    def has_videos(self) -> bool:
        return any(self.are_videos)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """`are_videos`, also if none is."""
        return self.are_videos or (False,) * len(self.num_tokens)

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The placeholder tokens."""
        return (self.token_id,) if self.video_token_id is None else (self.token_id, self.video_token_id)

    def tensors_of(self, videos: bool) -> dict[str, Tensor]:
        """The tensors of its videos, or those of its images."""
        return {name: value for name, value in self.tensors.items() if is_of_videos(name) == videos}

    def num_tokens_of(self, videos: bool) -> int:
        """The placeholder tokens of its videos, or those of its images."""
        return sum(number for number, is_video in zip(self.num_tokens, self.kinds) if is_video == videos)

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as arrays: as tensors, each would take a file descriptor between a loader process and the trainer."""
        arrays = {
            name: value.numpy() if value.device.type == "cpu" and value.dtype != torch.bfloat16 else value
            for name, value in self.tensors.items()
        }
        return {**self.__dict__, "tensors": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {
            name: torch.from_numpy(value if value.flags.writeable else value.copy())
            if isinstance(value, np.ndarray)
            else value
            for name, value in state["tensors"].items()
        }
        self.__dict__.update(state | {"tensors": tensors})

    def then(self, later: "ImageInputs | None") -> "ImageInputs":
        """With the images that follow in the same sequence."""
        if later is None:
            return self
        both = self.tensors.keys() & later.tensors.keys()
        joined = {name: _padded_cat(self.tensors[name], later.tensors[name]) for name in both}
        return ImageInputs(
            self.tensors | later.tensors | joined,
            self.token_id,
            self.num_tokens + later.num_tokens,
            self.digests + later.digests,
            self.files + later.files,
            self.kinds + later.kinds if self.has_videos or later.has_videos else (),
            self.video_token_id if later.video_token_id is None else later.video_token_id,
        )

    def to_state(self) -> dict[str, Any]:
        """As plain data for `utils.state_file`; the arguments that make it again."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


def is_of_videos(name: str) -> bool:
    """Whether a tensor of processors belongs to videos."""
    return "video" in name or name == SECONDS


def is_placeholder(ids: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Which of the token ids are placeholders. tokens: those of the images."""
    found: np.ndarray = np.isin(ids, tokens)
    return found


def _padded_cat(one: Tensor, other: Tensor) -> Tensor:
    """One after the other along the first dimension; all other dimensions are padded at their end."""
    sizes = [max(pair) for pair in zip(one.shape[1:], other.shape[1:])]

    def padded(value: Tensor) -> Tensor:
        missing = [size - own for size, own in zip(sizes, value.shape[1:])]
        return F.pad(value, [number for after in reversed(missing) for number in (0, after)]) if any(missing) else value

    return torch.cat([padded(one), padded(other)])


def column_state(column: np.ndarray) -> dict[str, Any]:
    """A column of `ImageInputs | None` as plain data, in which rows of one object have it once."""
    distinct = {id(images): images for images in column if images is not None}
    places = {key: place for place, key in enumerate(distinct)}
    rows = [None if images is None else places[id(images)] for images in column]
    return {"rows": rows, "images": [images.to_state() for images in distinct.values()]}


def column_of_state(state: dict[str, Any]) -> np.ndarray:
    """The inverse of `column_state`."""
    distinct = [ImageInputs(**arguments) for arguments in state["images"]]
    column = np.empty(len(state["rows"]), dtype=object)
    column[:] = [None if place is None else distinct[place] for place in state["rows"]]
    return column


def content_ids(token_ids: Sequence[int], images: ImageInputs | None) -> list[int]:
    """The token ids with a negative number made of the image's digest instead of each of its placeholders.

    ValueError if there are not as many placeholders as features.
    """
    ids = np.array(token_ids, dtype=np.int64)
    if images is not None and len(ids):
        check_placeholders(int(is_placeholder(ids, images.placeholders).sum()), images)
    found: list[int] = with_content(ids, images).tolist()
    return found


def check_placeholders(num_tokens: int, images: ImageInputs | None) -> None:
    """ValueError if a sequence with `num_tokens` placeholders does not have as many features."""
    expected = 0 if images is None else sum(images.num_tokens)
    if num_tokens != expected:
        raise ValueError(
            f"{num_tokens} placeholder tokens of images, but {expected} features in the images of the sequence"
        )


def with_content(ids: np.ndarray, images: ImageInputs | None) -> np.ndarray:
    """`content_ids` of the first tokens of a sequence."""
    if images is None:
        return ids
    is_image = is_placeholder(ids, images.placeholders)
    numbers = np.array([-1 - int.from_bytes(digest[:7], "little") for digest in images.digests], dtype=np.int64)
    out = ids.astype(np.int64)
    out[is_image] = np.repeat(numbers, images.num_tokens)[: int(is_image.sum())]
    return out
