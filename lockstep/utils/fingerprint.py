"""A checksum of a tensor's bits that is the same on every device."""

from collections.abc import Iterable

import torch
from torch import Tensor

PERIOD = 65_521
"""Period of the weights in a fingerprint, in words of eight bytes."""


def fingerprint(tensor: Tensor) -> int:
    """A number that changes with any bit of the tensor (unless changes cancel out): words times odd weights, modulo 2^64."""
    return int(_weighted_sum(tensor))


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Of several tensors, with one wait for their devices."""
    sums = [_weighted_sum(tensor) for tensor in tensors]
    by_device = {device: torch.stack([s for s in sums if s.device == device]) for device in {s.device for s in sums}}
    values = {device: iter(stacked.tolist()) for device, stacked in by_device.items()}
    return [next(values[s.device]) for s in sums]


def _weighted_sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    num_words = flat.numel() // 8
    words, rest = flat[: num_words * 8].view(torch.int64), flat[num_words * 8 :].long()
    period = min(PERIOD, num_words)
    num_rows = num_words // PERIOD
    weights = 2 * torch.arange(period + len(rest), device=flat.device) + 1
    total = (words[num_rows * PERIOD :] * weights[: num_words % PERIOD]).sum() + (rest * weights[period:]).sum()
    if num_rows:
        total += (words[: num_rows * PERIOD].view(num_rows, PERIOD).sum(0) * weights[:PERIOD]).sum()
    return total
