"""Whether a run fits on this machine's GPU, before a model is loaded; what was planned, if it runs out of memory (docs/plan.md)."""

import logging
import os

from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.plan.estimate import GB, Plan, advice, plan_of, summary
from lockstep.plan.hardware import this_gpu

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.95
"""Share of the device's memory, for the longest sequences that the config allows."""
REFUSE_ABOVE = 1.05
"""The same for what a phase needs however short the sequences are."""


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
            f"short sequences ({', '.join(f'{part} {size / GB:.1f}' for size, part in parts)}); set {advice(plan, fixed)}; "
            "`lockstep plan` shows all phases; trainer.check_memory=false runs it anyway"
        )
    if plan.needed > WARN_ABOVE * device.memory:
        logger.warning("plan for the longest sequences: %s", summary(plan))
    else:
        logger.info("plan: %s", summary(plan))


def planned(config: PPOConfig | SupervisedConfig) -> Plan | None:
    """For this machine's GPU; None without one, or if the run cannot be planned, which is logged."""
    device = None if config.trainer.device == "cpu" else this_gpu()
    if device is None:
        return None
    try:
        return plan_of(config, device, machines=_processes())
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # an estimate must not stop a run
        logger.info("memory is not planned: %s", error)
        return None


def _processes() -> list[int]:
    """Of torchrun, on each machine."""
    total = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", total))
    return [local] * (total // local)
