"""verl.workers.utils.padding: batches with padded rows, and without padding as nested tensors.

input_ids (B, T), prompts left-padded, responses right-padded ──left_right_2_no_padding──► nested (B, j)
model output (B, j) or (total tokens,) ──no_padding_2_padding──► (B, R): the values of the response tokens
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.verl.utils import tensordict_utils as tu

REQUIRED = ("input_ids", "attention_mask", "response_mask", "position_ids")


def left_right_2_no_padding(data: TensorDict) -> TensorDict:
    """Replace `input_ids` and `position_ids` by nested tensors, in place; `loss_mask` is the response mask.

    Adds `max_seq_len`, `max_response_len` and `indices` (places of the tokens in the padded batch) as values of the batch.
    """
    for name in REQUIRED:
        if name not in data.keys():  # noqa: SIM118 (a TensorDict is not a mapping)
            raise AssertionError(f"left_right_2_no_padding needs {', '.join(REQUIRED)}; {name} is missing")
    mask = data["attention_mask"].bool()
    ids: Tensor = tu.pop(data, "input_ids")
    positions, response_mask = data["position_ids"], data["response_mask"]
    tu.assign_non_tensor_data(data, "max_seq_len", ids.shape[1])
    tu.assign_non_tensor_data(data, "max_response_len", response_mask.shape[1])
    tu.assign_non_tensor_data(data, "indices", mask.flatten().nonzero().flatten())
    data["input_ids"] = _nested(ids, mask)
    data["position_ids"] = tu.nested_tensor_from_tensor_list([row[..., keep] for row, keep in zip(positions, mask)])
    data["loss_mask"] = response_mask
    routed = data.get("routed_experts", None)
    if routed is not None and not routed.is_nested:
        data["routed_experts"] = _nested(routed, mask)
    return data


def no_padding_2_padding(tensor: Tensor, data: TensorDict) -> Tensor:
    """The values that predict the response tokens, padded to (B, R, ...): a value at a place is of the token after it.

    tensor: nested, or (total tokens, ...) of a batch whose prompts and responses give the lengths.
    """
    values = tensor.values() if tensor.is_nested else tensor
    sequences, responses = _lengths(tensor, data)
    width = max(int(tu.get_non_tensor_data(data, "max_response_len", -1)), max(responses, default=0))
    out = values.new_zeros(len(responses), width, *values.shape[1:])
    end = 0
    for row, (length, response) in enumerate(zip(sequences, responses)):
        end += length
        shift = 1 if length > response else 0  # without a prompt there is nothing before the first token
        out[row, :response] = values[end - response - shift : end - shift]
    return out


def response_from_nested(tensor: Tensor, response_mask: Tensor) -> Tensor:
    """The values that predict the response tokens, nested. response_mask: nested, (B, response)."""
    lengths, ends = tu.offsets_of(response_mask).diff().tolist(), tu.offsets_of(tensor)[1:].tolist()
    rows = [tensor.values()[end - length - 1 : end - 1] for length, end in zip(lengths, ends)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def response_to_nested(tensor: Tensor, response_mask: Tensor) -> Tensor:
    """(B, R) values without padding, nested. response_mask: nested, (B, response)."""
    lengths = tu.offsets_of(response_mask).diff().tolist()
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(tensor, lengths)], layout=torch.jagged)


def build_attention_mask_from_nested(input_ids: Tensor, max_seq_len: int | None = None) -> Tensor:
    """(B, T) int32: 1 for the tokens of each row, which begin at the left."""
    lengths = tu.offsets_of(input_ids).diff()
    places = torch.arange(max_seq_len or int(lengths.max()), device=lengths.device)
    return (places < lengths[:, None]).int()


def _nested(padded: Tensor, mask: Tensor) -> Tensor:
    offsets = torch.cat((mask.new_zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)))
    return torch.nested.nested_tensor_from_jagged(padded[mask], offsets=offsets)


def _lengths(tensor: Tensor, data: TensorDict) -> tuple[list[int], list[int]]:
    """Tokens of each sequence, and of each response."""
    responses = data.get("responses", None)
    if responses is not None and responses.is_nested:
        response_lengths = tu.offsets_of(responses).diff().tolist()
    else:
        width = data["response_mask"].shape[1]
        attended = data.get("attention_mask", None)
        mask = data["response_mask"] if attended is None else attended[:, -width:]
        response_lengths = mask.sum(1).tolist()
    if tensor.is_nested:
        return tu.offsets_of(tensor).diff().tolist(), response_lengths
    prompts = data.get("prompts", None)
    if prompts is not None and prompts.is_nested:
        return [p + r for p, r in zip(tu.offsets_of(prompts).diff().tolist(), response_lengths)], response_lengths
    return data["attention_mask"].sum(1).tolist(), response_lengths
