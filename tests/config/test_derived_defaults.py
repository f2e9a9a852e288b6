"""Defaults that depend on what the user set."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lockstep.config.derived_defaults import IF_SET, derived_defaults
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import keys
from lockstep.config.sft import SFTConfig


class Recorded(Mapping[str, Any]):
    """Settings that record which keys were tested for being set."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_by_name, self.tested = values, set[str]()

    def __getitem__(self, name: str) -> Any:
        return self.values_by_name[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values_by_name.get(name, default)

    def __contains__(self, name: object) -> bool:
        self.tested.add(str(name))
        return name in self.values_by_name

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("ask for single keys, which IF_SET lists")

    def __len__(self) -> int:
        return len(self.values_by_name)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.adv_estimator": "grpo"},
        {"trainer.async_mode": "colocated", "trainer.placement": "split", "data.micro_batch_size_per_gpu": 2},
        {"trainer.async_mode": "colocated", "algorithm.rollout_correction.bypass_mode": True},
    ],
)
def test_if_set_lists_every_key_that_is_tested_for_being_set_or_derived(values: dict[str, Any]) -> None:
    for cls in (PPOConfig, SFTConfig):
        recorded = Recorded(values)
        derived, _ = derived_defaults(cls, recorded)
        assert recorded.tested | derived.keys() <= set(IF_SET)
    assert set(IF_SET) <= keys(PPOConfig).keys() | keys(SFTConfig).keys()
    assert {name for name in keys(PPOConfig) if name.startswith("algorithm.kl_ctrl.")} <= set(IF_SET)
