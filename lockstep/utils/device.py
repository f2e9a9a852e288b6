"""Where to compute."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; to CUDA without waiting for what runs there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def resolve_device(name: str) -> str:
    """`auto` is cuda where there is a GPU and cpu elsewhere; asking for a GPU that is not there is an error."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda: no CUDA device is visible here; set trainer.device=cpu or auto")
    return name
