"""Accelerators: memory, and what they reach in large bfloat16 products, copies and transfers."""

import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """memory: bytes. flops, bandwidth: reached in large matrix products and copies, per second. host_link, peer_link: bytes per
    second between host and device, and between devices of one machine. layer_overhead_s: of a decode step, per layer."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    host_link: float = 50e9
    peer_link: float = 200e9
    layer_overhead_s: float = 45e-6

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


DEVICES = {
    device.name: device
    for device in (
        Device("H200", 150.1e9, 790e12, 4.3e12),  # measured
        Device("B200", 191e9, 1800e12, 7.0e12, peer_link=400e9),
        Device("H100", 85.0e9, 790e12, 3.0e12),
        Device("A100-80G", 85.1e9, 250e12, 1.8e12, host_link=24e9),
        Device("A100-40G", 42.4e9, 250e12, 1.4e12, host_link=24e9),
        Device("L40S", 47.7e9, 290e12, 0.75e12, host_link=24e9, peer_link=24e9),
        Device("RTX4090", 25.3e9, 130e12, 0.9e12, host_link=24e9, peer_link=24e9),
    )
}
"""By name. All but the H200 are 80 % of the data sheets' dense bfloat16 rates and 90 % of their bandwidths."""


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
    if shutil.which("nvidia-smi") is None:
        return _cpu()
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return _cpu()
    name, megabytes = (part.strip() for part in lines[0].rsplit(",", 1))
    memory = int(megabytes) * 2**20
    like = [device for device in DEVICES.values() if device.name.split("-")[0].lower() in name.lower().replace(" ", "")]
    if not like:
        raise ValueError(f"{name} is not among the known devices; give one with --device ({', '.join(DEVICES)})")
    return min(like, key=lambda device: abs(device.memory - memory))


def _cpu() -> Device:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", memory, 80e9 * cores, 8e9 * min(cores, 16), layer_overhead_s=100e-6)
