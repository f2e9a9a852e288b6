"""Batches with videos for the tiny Qwen-VL models, and the positions of their tokens, computed by hand."""

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from tensordict import TensorDict

from lockstep.protocol.images import ImageInputs
from tests.models.vision_families import END, IMAGE, START, batch_of_rows, images_for

VIDEO = 93
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
OF_FRAMES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families that write each frame of a video on its own, after its time."""
SECONDS = (0.5, 2.0)
TOKENS_PER_SECOND = 4
"""Of Qwen2.5-VL's config."""


def videos_for(name: str, seed: int, *grids: tuple[int, int, int]) -> ImageInputs:
    """Random videos of (temporal patches, height and width in tokens)."""
    generator = torch.Generator().manual_seed(100 + seed)
    grid_thw = torch.tensor([[t, 2 * h, 2 * w] for t, h, w in grids])
    pixels = torch.randn(int(grid_thw.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)
    tensors = {"pixel_values_videos": pixels, "video_grid_thw": grid_thw}
    if name == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([SECONDS[i % 2] for i in range(len(grids))])
    digests = tuple(hashlib.blake2b(f"video {seed} {i}".encode(), digest_size=16).digest() for i in range(len(grids)))
    num_tokens = tuple(t * h * w for t, h, w in grids)
    return ImageInputs(tensors, IMAGE, num_tokens, digests, (), (True,) * len(grids), VIDEO)


def prompt_of(name: str, start: Sequence[int], images: ImageInputs | None) -> list[int]:
    """Tokens as the family's processor writes them."""
    ids = list(start)
    if images is None:
        return ids
    frames = iter(images.tensors.get("video_grid_thw", torch.empty(0, 3)).tolist())
    for is_video, num_tokens in zip(images.kinds, images.num_tokens):
        num_frames = next(frames)[0] if is_video else 1
        parts = num_frames if name in OF_FRAMES and is_video else 1
        for part in range(parts):
            time = [60 + part] if name in OF_FRAMES and is_video else []
            ids += [*time, START, *[VIDEO if is_video else IMAGE] * (num_tokens // parts), END]
        ids.append(7)
    return ids


def rows_with_videos(model: Any, name: str) -> TensorDict:
    """Six rows: a video, the same again with another response, another video under the same text, an image and a video in turn
    with another video, an image, and text alone."""
    generator = torch.Generator().manual_seed(1)
    first, other = videos_for(name, 1, (3, 1, 2)), videos_for(name, 2, (3, 1, 2))
    image = images_for(model, name, 1, [(1, 2)])
    mixed = videos_for(name, 3, (2, 2, 1)).then(image).then(videos_for(name, 4, (4, 1, 1)))
    images = [first, first, other, mixed, image, None]
    starts = [torch.randint(3, 60, (3,), generator=generator).tolist() for _ in images]
    starts[2] = starts[1] = starts[0]
    prompts = [prompt_of(name, start, image) for start, image in zip(starts, images)]
    responses = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (3, 5, 5, 4, 6, 2)]
    return batch_of_rows(prompts, responses, images)


def positions_of(name: str, ids: Sequence[int], images: ImageInputs | None) -> torch.Tensor:
    """(3, L) by hand: each group of placeholders starts at the next position; what follows starts after its largest one."""
    tensors = {} if images is None else images.tensors
    grids = {kind: iter(tensors.get(f"{kind}_grid_thw", torch.empty(0, 3)).tolist()) for kind in ("image", "video")}
    seconds = iter(tensors.get("second_per_grid_ts", torch.ones(9)).tolist())
    frames_left: list[list[int]] = []
    found: list[tuple[int, int, int]] = []
    following = 0
    for token, run in groupby(ids, key=lambda token: token if token in (IMAGE, VIDEO) else None):
        length = len(list(run))
        if token is None:
            found += [(following + i,) * 3 for i in range(length)]
            following += length
            continue
        pace = 1.0
        if token == IMAGE:
            frames, height, width = next(grids["image"])
        elif name in OF_FRAMES:
            if not frames_left:
                num, height, width = next(grids["video"])
                frames_left = [[1, height, width]] * num
            frames, height, width = frames_left.pop()
        else:
            frames, height, width = next(grids["video"])
            pace = TOKENS_PER_SECOND * next(seconds) if name == "qwen2_5_vl" else 1.0
        places = [
            (following + int(t * pace), following + y, following + x)
            for t in range(frames)
            for y in range(height // 2)
            for x in range(width // 2)
        ]
        assert len(places) == length
        found += places
        following = max(max(place) for place in places) + 1
    return torch.tensor(found).T


def own_inputs_of(name: str, ids: Sequence[int], images: ImageInputs | None) -> dict[str, torch.Tensor]:
    """What transformers' forward takes for a row, with its positions."""
    tokens = torch.tensor([list(ids)])
    inputs = {"input_ids": tokens, "position_ids": positions_of(name, ids, images)[:, None]}
    if images is not None:
        kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        inputs |= images.tensors | {"mm_token_type_ids": kinds}
    return inputs


def reference_log_probs(model: Any, name: str, batch: TensorDict) -> torch.Tensor:
    """(B, R) by transformers' own forward, row by row; differentiable."""
    width = batch["responses"].shape[1]
    rows = []
    for row, images in enumerate(batch.get("multi_modal_inputs").tolist()):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        logits = model(**own_inputs_of(name, ids, images), use_cache=False).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        num = int(batch["response_mask"][row].sum())
        rows.append(torch.nn.functional.pad(own[len(own) - num :], (0, width - num)))
    return torch.stack(rows)
