"""verl.utils.torch_functional"""

from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.losses import entropy_from_logits as entropy_from_logits
from lockstep.data.tensors import postprocess_data as postprocess_data
from lockstep.engines.train.lr_schedule import (
    get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup as get_wsd_schedule_with_warmup,
)
from lockstep.models.log_probs import token_log_probs
from lockstep.utils.masked import (
    get_response_mask as get_response_mask,
    masked_mean as masked_mean,
    masked_sum as masked_sum,
    masked_var as masked_var,
    masked_whiten as masked_whiten,
    pad_2d_list_to_length as pad_2d_list_to_length,
    pad_sequence_to_length as pad_sequence_to_length,
)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-prob of each label, (...), from logits (..., V). inplace_backward: memory setting of verl; not used here."""
    rows = token_log_probs(logits.flatten(0, -2), labels.flatten(), lambda hidden: hidden)["log_probs"]
    return rows.view(labels.shape)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    return logprobs_from_logits(logits, labels)


logprobs_from_logits_v2 = logprobs_from_logits_naive


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probs of the response tokens: logits at a position are of the token after it."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits`, `chunk_size` rows at a time."""
    return torch.cat([entropy_from_logits(rows) for rows in logits.split(chunk_size)])


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Sum of squared probabilities at each position: (..., V) to (...)."""
    return (2 * torch.log_softmax(logits, -1)).exp().sum(-1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """`x` clamped between two tensors."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list[Any]:
    """A TensorDict in parts of `batch_size` rows, which must divide."""
    if len(tensors) % batch_size:
        raise ValueError(f"{len(tensors)} rows do not divide into batches of {batch_size}")
    return list(tensors.split(batch_size))


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: Any = "error"
) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) of one text, (1, max_length)."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )
