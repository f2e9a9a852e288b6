"""Accelerators: memory, and what they reach in large bfloat16 products, copies and transfers."""

import ctypes
import math
import os
from dataclasses import dataclass, replace
from importlib.metadata import version


@dataclass(frozen=True)
class Device:
    """memory: bytes. flops, bandwidth: reached in large matrix products and copies, per second; nan if unknown. scores: attention
    scores per second, of one query, key and head; the softmax limits them, not the products. host_link, peer_link, network: bytes
    per second between host and device, between devices of one machine, and between machines, for each device. layer_overhead_s: of
    a decode step, per layer."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    scores: float = math.inf
    host_link: float = 50e9
    peer_link: float = 200e9
    network: float = 50e9
    layer_overhead_s: float = 45e-6

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def is_timed(self) -> bool:
        return not math.isnan(self.flops)


DEVICES = {
    device.name: device
    for device in (
        Device("H200", 150.1e9, 790e12, 4.3e12, 0.4e12),  # measured
        Device("B200", 191e9, 1800e12, 7.0e12, 0.45e12, peer_link=400e9),
        Device("H100", 85.0e9, 790e12, 3.0e12, 0.4e12),
        Device("A100-80G", 85.1e9, 250e12, 1.8e12, 0.25e12, host_link=24e9, network=25e9),
        Device("A100-40G", 42.4e9, 250e12, 1.4e12, 0.25e12, host_link=24e9, network=25e9),
        Device("L40S", 47.7e9, 290e12, 0.75e12, 0.58e12, host_link=24e9, peer_link=24e9, network=6e9),
        Device("RTX4090", 25.3e9, 130e12, 0.9e12, 0.53e12, host_link=24e9, peer_link=24e9, network=3e9),
    )
}
"""By name. All but the H200 are 80 % of the data sheets' dense bfloat16 rates and 90 % of their bandwidths; their scores are the
H200's in the ratio of multiprocessors times clock, as exponentials are. Networks are those of common machines: 400 Gbit/s for each
H100 or newer, 200 for each A100."""


def find_device(name: str | None) -> Device:
    """The named device, or this machine's. ValueError if the name is unknown."""
    if name is None:
        return _this_machine()
    by_lower_case = {known.lower(): device for known, device in DEVICES.items()}
    if name.lower() == "cpu":
        return _cpu()
    if name.lower() not in by_lower_case:
        raise ValueError(f"--device {name}: known devices are {', '.join(DEVICES)} and cpu")
    return by_lower_case[name.lower()]


def _this_machine() -> Device:
    found = this_gpu()
    return _cpu() if found is None else found


def this_gpu(number: str | None = None) -> Device | None:
    """This machine's first visible GPU, with its rates if they are known; None if there is none that torch can use.

    Asks the driver's library, which takes milliseconds. number: of a GPU that may be hidden.
    """
    visible = number or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if not visible or visible.startswith("-"):  # hidden
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver
        return None
    name, memory, handle = ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)(), ctypes.c_void_p()
    index = int(visible) if visible.isdigit() else 0
    calls = (
        lambda: nvml.nvmlInit_v2(),
        lambda: nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
        lambda: nvml.nvmlDeviceGetName(handle, name, len(name)),
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),  # total, free, used
    )
    if any(call() for call in calls) or version("torch").endswith("+cpu"):
        return None
    return known_gpu(name.value.decode(), memory[0])


def known_gpu(name: str, memory: float) -> Device:
    """A GPU by the driver's name; rates are nan if it is not in `DEVICES`."""
    like = [device for device in DEVICES.values() if device.name.split("-")[0].lower() in name.lower().replace(" ", "")]
    if not like:
        return Device(name, memory, math.nan, math.nan)
    return replace(min(like, key=lambda device: abs(device.memory - memory)), memory=memory)


def _cpu() -> Device:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", memory, 80e9 * cores, 8e9 * min(cores, 16), network=1e9, layer_overhead_s=100e-6)
