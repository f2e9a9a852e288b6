"""Where the other processes of a run reach its controller, and what this process is called in reports."""

import os
import socket

from lockstep.config.derived_defaults import PROGRAMS
from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.utils.heartbeat import CONTROLLER

LOOPBACK = "127.0.0.1"


def controller_address(config: PPOConfig | SupervisedConfig) -> tuple[str, str]:
    """Address and role of this process, the run's controller. The address is the loopback if all processes are on this machine."""
    if isinstance(config, SupervisedConfig):
        num_ranks = os.environ.get("WORLD_SIZE", "1")
        is_alone = os.environ.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks
        host = LOOPBACK if is_alone else _resolved(os.environ.get("MASTER_ADDR", LOOPBACK))
        return host, PROGRAMS[type(config)] if num_ranks != "1" else CONTROLLER
    if controller_of(config) == "local":
        return LOOPBACK, CONTROLLER
    from lockstep.single_controller.ray_backend.cluster import address_for_workers

    return address_for_workers(), CONTROLLER


def _resolved(name: str) -> str:
    """The address of a machine, IPv4 if it has one; OSError if the name is unknown."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(found[0][4][0])
