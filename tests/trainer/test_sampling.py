"""Group ids, and which groups `algorithm.filter_groups` keeps."""

from typing import Any

import pytest
import torch

from lockstep.config.algorithm import FilterGroupsConfig
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto, object_array
from lockstep.trainer.ppo.sampling import EXTRA_KEYS, GroupFilter, _uid

N = 2


def test__uids_are_unique_within_a_step() -> None:
    assert len({_uid(draw, number) for draw in (0, 1, 2, 300) for number in (0, 1, 17, 5000)}) == 16


def group_filter(*changes: str) -> GroupFilter:
    settings = ("algorithm.filter_groups.enable=true", "data.train_batch_size=4", *changes)
    return GroupFilter(load_config(PPOConfig, list(settings), run_checks=False))


def scored(scores: list[float], **extra: list[Any]) -> DataProto:
    """N samples for each prompt."""
    uids = [str(row // N) for row in range(len(scores))]
    columns = {"uid": uids, **extra}
    return DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor(scores)[:, None]},
        non_tensors={name: object_array(values) for name, values in columns.items()},
        meta_info={EXTRA_KEYS: sorted(extra)},
    )


@pytest.mark.parametrize("metric", ["null", "acc"])
def test_a_group_is_judged_alike_alone_and_in_its_batch(metric: str) -> None:
    rule = group_filter(f"algorithm.filter_groups.metric={metric}")
    batch = scored([0.0, 1.0, 2.0, 2.0, 3.0, 4.0], acc=[0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    assert rule.rows(batch) == [0, 1, 4, 5]
    assert [rule.keeps(batch[first : first + N]) for first in (0, 2, 4)] == [True, False, True]


def test_a_group_whose_scoring_failed_is_not_kept() -> None:
    failed = scored([0.0, 0.0], reward_failed=[1.0, 1.0])  # without the column `acc`
    assert not group_filter("algorithm.filter_groups.metric=acc").keeps(failed)
    assert group_filter("algorithm.filter_groups.metric=acc").keeps(failed[:1])
    assert group_filter("algorithm.filter_groups.enable=false").keeps(failed)


def test_number_of_batches_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    assert FilterGroupsConfig().max_num_gen_batches == 0
    for number in range(9):
        group_filter().check(number, 1)
    group_filter().check_dropped(1000)
    assert [record.args for record in caplog.records] == [(8, 1, 4)]
    limited = group_filter("algorithm.filter_groups.max_num_gen_batches=2")
    limited.check(1, 3)
    limited.check_dropped(7)
    with pytest.raises(
        ValueError, match="max_num_gen_batches=2: only 3 of 4 prompts have samples with different scores"
    ):
        limited.check(2, 3)
    with pytest.raises(ValueError, match="max_num_gen_batches=2: the samples of 8 prompts had equal scores"):
        limited.check_dropped(8)
