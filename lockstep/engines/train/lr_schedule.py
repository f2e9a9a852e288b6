"""Learning-rate schedules: a factor of the peak learning rate per training step.

Linear warm-up, then constant, cosine, linear or warm-up-stable-decay.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.config.model import FSDPOptimizerConfig


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    return LambdaLR(optimizer, _after_warmup(num_warmup_steps, lambda step: 1.0), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    constant_after_end: bool = False,
) -> LambdaLR:
    """Cosine from 1 to `min_lr_ratio`; the warm-up starts at `init_lr_ratio` (None: 0).

    constant_after_end: keep the last value if the run goes on after `num_training_steps`; otherwise the cosine rises again.
    """
    length = max(1, num_training_steps - num_warmup_steps)
    mean, swing = (1 + min_lr_ratio) / 2, (1 - min_lr_ratio) / 2

    def factor(step: int) -> float:
        step = min(step, max(num_training_steps, num_warmup_steps)) if constant_after_end else step
        wave = math.cos(2 * math.pi * num_cycles * (step - num_warmup_steps) / length)
        return max(min_lr_ratio, mean + swing * wave)

    return LambdaLR(optimizer, _after_warmup(num_warmup_steps, factor, init_lr_ratio or 0.0), last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0
) -> LambdaLR:
    length = max(1, num_training_steps - num_warmup_steps)

    def factor(step: int) -> float:
        left = max(0.0, (num_training_steps - step) / length)
        return min_lr_ratio + (1 - min_lr_ratio) * left

    return LambdaLR(optimizer, _after_warmup(num_warmup_steps, factor))


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm-up, then constant for `stable_ratio` of the remaining steps, then cosine decay to `min_lr_ratio`."""
    rest = max(0, num_training_steps - num_warmup_steps)
    num_stable = int(rest * stable_ratio)
    num_decay = rest - num_stable

    def factor(step: int) -> float:
        done = step - num_warmup_steps - num_stable
        if done < 0:
            return 1.0
        if done >= num_decay:
            return min_lr_ratio
        wave = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * done / max(1, num_decay)))
        return min_lr_ratio + (1 - min_lr_ratio) * max(0.0, wave)

    return LambdaLR(optimizer, _after_warmup(num_warmup_steps, factor), last_epoch)


def build_schedule(optimizer: Optimizer, config: FSDPOptimizerConfig) -> LambdaLR:
    """The schedule that the config names; `total_training_steps` must be resolved."""
    total, warmup = config.total_training_steps, config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    floor = max(config.min_lr_ratio, min(1.0, config.min_lr / config.lr) if config.lr else 0.0)
    if config.lr_scheduler_type == "cosine":
        cycles = config.num_cycles
        return get_cosine_schedule_with_warmup(optimizer, warmup, total, floor, cycles, constant_after_end=True)
    if config.lr_scheduler_type == "linear":
        return get_linear_schedule_with_warmup(optimizer, warmup, total, floor)
    return get_constant_schedule_with_warmup(optimizer, warmup)


def go_to_step(schedule: LambdaLR, step: int) -> None:
    """Set the position of a new schedule; the learning rates follow from the config's peak, not from the checkpoint's."""
    schedule.last_epoch, schedule._step_count = step, step + 1
    schedule._last_lr = [
        peak * factor(step) for peak, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, lr in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = lr


def _after_warmup(num_warmup_steps: int, factor: Callable[[int], float], start: float = 0.0) -> Callable[[int], float]:
    def warm(step: int) -> float:
        if step < num_warmup_steps:
            return start + (1.0 - start) * step / max(1.0, num_warmup_steps)
        return factor(step)

    return warm
