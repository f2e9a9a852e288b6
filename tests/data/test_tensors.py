"""Truncation, padding and positions on hand-written cases."""

import pytest
import torch

from lockstep.data.tensors import compute_position_id_with_mask, pad_prompts, postprocess_data, truncate_ids


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5]), ("error", None)]
)
def test_truncate_ids(truncation: str, kept: list[int] | None) -> None:
    ids = [1, 2, 3, 4, 5]
    assert truncate_ids(ids, 5, truncation) == ids  # type: ignore[arg-type]
    if kept is None:
        with pytest.raises(ValueError, match="5 tokens, but at most 3"):
            truncate_ids(ids, 3, "error")
    else:
        assert truncate_ids(ids, 3, truncation) == kept  # type: ignore[arg-type]


def test_unknown_truncation() -> None:
    with pytest.raises(ValueError, match="must be error, left, right or middle"):
        truncate_ids([1, 2], 1, "centre")  # type: ignore[arg-type]


def test_postprocess_pads_on_either_side() -> None:
    ids, mask = torch.tensor([[5, 6]]), torch.tensor([[1, 1]])
    left = postprocess_data(ids, mask, 4, pad_token_id=9)
    right = postprocess_data(ids, mask, 4, pad_token_id=9, left_pad=False)
    assert left[0].tolist() == [[9, 9, 5, 6]] and left[1].tolist() == [[0, 0, 1, 1]]
    assert right[0].tolist() == [[5, 6, 9, 9]] and right[1].tolist() == [[1, 1, 0, 0]]


def test_postprocess_truncates_ids_and_mask() -> None:
    ids, mask = torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1, 1]])
    cut_ids, cut_mask = postprocess_data(ids, mask, 3, pad_token_id=9, truncation="middle")
    assert cut_ids.tolist() == [[9, 3, 4]] and cut_mask.tolist() == [[0, 1, 1]]
    with pytest.raises(ValueError, match="at most 3"):
        postprocess_data(ids, mask, 3, pad_token_id=9)


def test_positions_start_at_the_first_attended_token() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_pad_prompts() -> None:
    ids, mask = pad_prompts([[4, 5], [], [1, 2, 3]], length=3, pad_token_id=0)
    assert ids.tolist() == [[0, 4, 5], [0, 0, 0], [1, 2, 3]] and ids.dtype == torch.int64
    assert mask.tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match=r"prompt 0 has 4 tokens, more than data\.max_prompt_length=3"):
        pad_prompts([[1, 2, 3, 4]], length=3, pad_token_id=0)
