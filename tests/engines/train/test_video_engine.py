"""The training engine on rows with videos, images and text: log-probs and gradients are transformers', row by row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lockstep.engines.train.train_engine import MicroBatching
from lockstep.utils.distributed import current_rank
from tests.engines.train.ranks import Ranks
from tests.engines.train.test_vision_engine import (
    ALL,
    assert_same,
    gradients,
    open_engine,
    reference,
    weighted,
    weights_of,
)
from tests.models.architectures import torch_forms
from tests.models.video_families import FAMILIES, reference_log_probs, rows_with_videos, videos_for
from tests.models.vision_families import batch_of_rows, save_tiny_vision

IN_EVERY_RUN = ("qwen2_5_vl", "qwen3_vl")


def batch_for(folder: Path, name: str) -> TensorDict:
    batch = rows_with_videos(reference(folder), name)
    batch["weight"] = weights_of(batch)
    return batch


def expected_for(folder: Path, name: str, batch: TensorDict) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    model = reference(folder)
    with torch_forms(model):
        log_probs = reference_log_probs(model, name, batch)
    (log_probs * batch["weight"]).sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return log_probs.detach(), {n: grad.numpy() for n, grad in grads.items()}


def trained_on_ranks(folder: Path, batch: TensorDict, parts: list[list[int]]) -> Any:
    engine = open_engine(folder)
    engine.forward_backward(batch[parts[current_rank()]], weighted, MicroBatching(num_rows=2))
    return gradients(engine)


def trained_on_slices(folder: Path, batch: TensorDict) -> Any:
    engine = open_engine(folder, sp=2)
    engine.forward_backward(batch, weighted, MicroBatching(num_rows=3))
    return gradients(engine)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in FAMILIES]
)
def test_packed_rows_compute_as_transformers_row_by_row(name: str, tmp_path: Path) -> None:
    """In one micro-batch and in two."""
    folder = save_tiny_vision(name, tmp_path)
    batch = batch_for(folder, name)
    log_probs, expected = expected_for(folder, name, batch)
    assert not torch.allclose(log_probs[1], log_probs[2], atol=1e-3)  # same tokens, other video
    mask = batch["response_mask"].bool()
    for micro in (ALL, MicroBatching(num_rows=3)):
        engine = open_engine(folder)
        got = engine.forward(batch, micro)["log_probs"]
        torch.testing.assert_close(got[mask], log_probs[mask], atol=1e-5, rtol=0)
        engine.forward_backward(batch, weighted, micro)
        assert_same(gradients(engine), expected)


@pytest.mark.slow
def test_ranks_of_which_one_has_videos(ranks: Ranks, tmp_path: Path) -> None:
    folder = save_tiny_vision("qwen2_5_vl", tmp_path)
    batch = batch_for(folder, "qwen2_5_vl")
    parts = [[0, 2, 3], [4, 5, 5]]
    _, expected = expected_for(folder, "qwen2_5_vl", batch[[row for part in parts for row in part]])
    for found in ranks.run(2, trained_on_ranks, folder, batch, parts):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_ranks_that_share_the_tokens_of_videos(name: str, ranks: Ranks, tmp_path: Path) -> None:
    folder = save_tiny_vision(name, tmp_path)
    batch = batch_for(folder, name)
    _, expected = expected_for(folder, name, batch)
    for found in ranks.run(2, trained_on_slices, folder, batch):
        assert_same(found, expected)


def test_videos_for_another_family_are_refused(tmp_path: Path) -> None:
    engine = open_engine(save_tiny_vision("llava", tmp_path))
    videos = videos_for("qwen2_vl", 1, (2, 1, 1))
    batch = batch_of_rows([[5, 93, 93]], [[6]], [videos])
    with pytest.raises(ValueError, match="the batch has videos: models of type llava read no videos here"):
        engine.forward(batch, ALL)
