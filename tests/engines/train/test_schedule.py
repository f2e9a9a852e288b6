"""Learning-rate schedules as `build_schedule` makes them."""

import pytest
import torch

from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train.lr_schedule import build_schedule


@pytest.mark.parametrize("floor", [{"min_lr_ratio": 0.1}, {"min_lr": 0.2}], ids=["ratio", "rate"])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_rate_stays_at_its_floor_after_the_end(name: str, floor: dict[str, float]) -> None:
    config = FSDPOptimizerConfig(lr=2.0, lr_scheduler_type=name, total_training_steps=10, lr_warmup_steps=2, **floor)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    schedule = build_schedule(optimizer, config)
    rates = []
    for _ in range(25):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[2] == 2.0 and rates[2:11] == sorted(rates[2:11], reverse=True)
    assert rates[10:] == pytest.approx([0.2] * 15)
