"""The plan of a run (docs/plan.md): whether it fits, before a model is loaded; sizes that are not set; what was planned, if it runs
out of memory."""

import logging
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.observability.run_folder import PLAN
from lockstep.plan.advice import advice, summary
from lockstep.plan.estimate import GB, Plan, plan_of
from lockstep.plan.hardware import Device, find_device, known_gpu, this_gpu
from lockstep.plan.token_budgets import C, describe_budgets, unset_keys, with_token_budgets
from lockstep.utils.files import atomic_write_json

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.95
"""Share of the device's memory, for the longest sequences that the config allows."""
REFUSE_ABOVE = 1.05
"""The same for what a phase needs however short the sequences are."""


UNKNOWN_GPU = Device("an unknown GPU", 24e9, math.nan, math.nan)


def check_memory(config: PPOConfig | SupervisedConfig) -> None:
    """Log the plan's last line; ValueError if the run cannot fit. Nothing is checked on CPU."""
    if not config.trainer.check_memory or (isinstance(config, PPOConfig) and config.trainer.val_only):
        return
    plan = planned(config)
    if plan is None:
        return
    device = plan.job.device
    fixed = max(plan.phases, key=lambda phase: phase.fixed)
    if fixed.fixed > REFUSE_ABOVE * device.memory:
        parts = sorted(((size, part) for part, size in fixed.parts.items()), reverse=True)[:3]
        raise ValueError(
            f"does not fit on {device.name}: {fixed.name} needs {fixed.fixed / GB:.1f} of {device.memory / GB:.1f} GB even for "
            f"short sequences ({', '.join(f'{part} {size / GB:.1f}' for size, part in parts)}). {advice(plan)}; "
            "`lockstep plan` shows all phases; trainer.check_memory=false runs it anyway"
        )
    if plan.needed > WARN_ABOVE * device.memory:
        logger.warning("plan for the longest sequences: %s", summary(plan))
    else:
        logger.info("plan: %s", summary(plan))


def planned(config: PPOConfig | SupervisedConfig, device: Device | None = None) -> Plan | None:
    """For this machine's GPU; None without one, or if the run cannot be planned, which is logged. device: overrides the GPU."""
    if device is None:
        device = None if config.trainer.device == "cpu" else this_gpu()
    if device is None:
        return None
    try:
        machines = torchrun_processes()
        return plan_of(with_token_budgets(config, device, machines), device, machines=machines)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # an estimate must not stop a run
        logger.info("memory is not planned: %s", error)
        return None


def write_plan(config: PPOConfig | SupervisedConfig, folder: Path) -> None:
    """Write the plan of a run that begins, if there is one, for pages that show what was measured beside it."""
    plan = None
    if config.trainer.check_memory:
        plan = planned(config, find_device("cpu") if config.trainer.device == "cpu" else None)
    try:
        (folder / PLAN).unlink(missing_ok=True)  # one of an earlier start is not this run's
        if plan is not None:
            atomic_write_json(folder / PLAN, plan_as_json(plan))
    except (OSError, ValueError) as error:  # ValueError: a number that is not finite
        reason = getattr(error, "strerror", None) or error
        logger.warning("%s cannot be written (%s); the run goes on without it", folder / PLAN, reason)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """`plan.json`; GB are 1e9 bytes. docs/run_folder.md has the meaning of each key."""
    device = plan.job.device
    memory: dict[str, float] = {}
    for phase in plan.phases:
        memory[phase.name] = max(memory.get(phase.name, 0.0), round(phase.peak / GB, 3))
    return {
        "gpu": device.name,
        "gpu_memory_gb": round(device.memory / GB, 3),
        "memory_gb": memory,
        "seconds": {name: round(seconds, 3) for name, seconds in plan.times.items() if math.isfinite(seconds)},
        "step_seconds": round(plan.step_s, 3) if math.isfinite(plan.step_s) else None,
    }


def with_chosen_sizes(config: C, device_type: str) -> C:
    """The config with tokens per micro-batch for the workers' device, if they are not set; logs them. Ray must be connected."""
    if not unset_keys(config):
        return config
    device = find_device("cpu") if device_type == "cpu" else _workers_gpu(config)
    chosen = with_token_budgets(config, device, torchrun_processes())
    if line := describe_budgets(config, chosen, device):
        logger.info(line)
    return chosen


def _workers_gpu(config: PPOConfig | SupervisedConfig) -> Device:
    """The one with the least memory, if the machines of a cluster differ."""
    gpus: list[Device | None] = []
    if isinstance(config, PPOConfig) and controller_of(config) == "ray":
        from lockstep.single_controller.ray_backend.cluster import on_gpu_machines

        gpus = on_gpu_machines(partial(this_gpu, "0"))
    found = [gpu for gpu in gpus or [this_gpu()] if gpu is not None]
    if not found:  # drivers without NVML
        import torch

        if not torch.cuda.is_available():  # on the controller's machine
            return UNKNOWN_GPU
        properties = torch.cuda.get_device_properties(0)
        found = [known_gpu(properties.name, properties.total_memory)]
    return min(found, key=lambda gpu: gpu.memory)


def torchrun_processes() -> list[int]:
    """On each machine."""
    total = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", total))
    return [local] * (total // local)
