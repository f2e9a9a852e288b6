import torch

from lockstep.utils.masked import get_response_mask, pad_2d_list_to_length, pad_sequence_to_length


def test_rows_are_padded_to_a_length() -> None:
    rows = torch.tensor([[1, 2, 3]])
    assert pad_sequence_to_length(rows, 5, 9).tolist() == [[1, 2, 3, 9, 9]]
    assert pad_sequence_to_length(rows, 5, 9, left_pad=True).tolist() == [[9, 9, 1, 2, 3]]
    assert pad_sequence_to_length(rows, 2, 9).tolist() == [[1, 2, 3]]


def test_lists_are_padded_to_the_longest() -> None:
    assert pad_2d_list_to_length([[1, 2], [3]], 0).tolist() == [[1, 2], [3, 0]]
    assert pad_2d_list_to_length([[1, 2], [3]], 0, max_length=3).tolist() == [[1, 2, 0], [3, 0, 0]]
    assert pad_2d_list_to_length([[1, 2, 3]], 0, max_length=2).tolist() == [[1, 2, 3]]


def test_response_ends_at_its_first_eos() -> None:
    responses = torch.tensor([[5, 2, 5, 2], [5, 5, 5, 5], [2, 1, 1, 1]])
    assert get_response_mask(responses).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert get_response_mask(responses, eos_token=[1, 5], dtype=torch.float32).tolist()[0] == [1, 0, 0, 0]
