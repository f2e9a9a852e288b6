"""Learning-rate schedules as `build_schedule` makes them."""

import pytest
import torch

from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train.lr_schedule import build_schedule


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_rate_stays_at_its_floor_after_the_end(name: str) -> None:
    config = FSDPOptimizerConfig(
        lr=1.0, lr_scheduler_type=name, min_lr_ratio=0.1, total_training_steps=10, lr_warmup_steps=2
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = build_schedule(optimizer, config)
    rates = []
    for _ in range(25):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[2] == 1.0 and rates[2:11] == sorted(rates[2:11], reverse=True)
    assert rates[10:] == pytest.approx([0.1] * 15)
