"""A number for the bits of a tensor: tells whether weights arrived as they were sent, or are those of an earlier run."""

import torch
import torch.nn.functional as F
from torch import Tensor

PERIOD = 65_521
"""Period of the weights in a fingerprint, in words of two bytes."""


def fingerprint(flat: Tensor) -> int:
    """A number that changes with any bit of the bytes (unless changes cancel out); the same on every device."""
    words = flat[: flat.numel() // 2 * 2].view(torch.int16)
    weights = torch.arange(1, PERIOD + 1, device=flat.device)
    total = flat[words.numel() * 2 :].long().sum()
    for part in words.split(64 * PERIOD):  # as int64 they take four times the memory
        rows = F.pad(part, (0, -part.numel() % PERIOD)).view(-1, PERIOD)
        total = total + (rows.long().sum(0) * weights).sum()
    return int(total)
