"""verl.utils.device"""

from typing import Any

import torch

from lockstep.utils.device import resolve_device

is_cuda_available: bool = torch.cuda.is_available()
is_npu_available = False


def get_device_name() -> str:
    """`cuda` if there is a GPU, else `cpu`."""
    return resolve_device("auto")


def get_torch_device() -> Any:
    """`torch.cuda` or `torch.cpu`."""
    return getattr(torch, get_device_name())


def get_device_id() -> int:
    """Index of the current GPU; 0 on CPU."""
    return torch.cuda.current_device() if is_cuda_available else 0


def get_nccl_backend() -> str:
    """Backend of collectives between devices."""
    return "nccl" if is_cuda_available else "gloo"


def set_expandable_segments(enable: bool) -> None:
    """Let torch's CUDA allocator grow its segments; no-op without a GPU. Memory shared between processes needs it off."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def get_visible_devices_keyword() -> str:
    return "CUDA_VISIBLE_DEVICES"


def get_resource_name() -> str:
    """Ray's name of the device."""
    return "GPU" if is_cuda_available else "CPU"


def auto_set_device(config: Any) -> None:
    """Set `trainer.device` of a DictConfig to the device of this machine, unless it is set."""
    if config.trainer.get("device") in (None, "auto"):
        config.trainer.device = get_device_name()
