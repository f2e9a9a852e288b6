import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from lockstep.utils.seqlen import (
    agreed_runs,
    calculate_workload,
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rearrange_micro_batches,
    token_budget_partitions,
)


def lognormal_lengths(num: int, seed: int, longest: int = 4000) -> list[int]:
    rng = random.Random(seed)
    return [min(longest, max(1, int(rng.lognormvariate(5.5, 1.0)))) for _ in range(num)]


def makespan(lengths: list[int], parts: list[list[int]]) -> int:
    return max(sum(lengths[i] for i in part) for part in parts)


def assert_partition(parts: list[list[int]], num: int) -> None:
    assert sorted(i for part in parts for i in part) == list(range(num))
    assert all(parts)


def test_two_way_split_by_hand() -> None:
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], k_partitions=2, equal_size=False)
    assert_partition(parts, 5)
    # differencing gives 16 to 14, the best there is 15 to 15
    assert makespan([8, 7, 6, 5, 4], parts) == 16


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_near_the_optimum_of_all_splits(seed: int, equal_size: bool) -> None:
    lengths = lognormal_lengths(8, seed)
    best = min(
        makespan(lengths, [[i for i in range(8) if bits[i] == side] for side in (0, 1)])
        for bits in itertools.product((0, 1), repeat=8)
        if not equal_size or sum(bits) == 4
    )
    parts = get_seqlen_balanced_partitions(lengths, 2, equal_size)
    assert_partition(parts, 8)
    assert not equal_size or {len(part) for part in parts} == {4}
    # the method's proven worst case on two parts
    assert makespan(lengths, parts) <= 7 / 6 * best


def test_large_balanced_partition_is_even_and_deterministic() -> None:
    lengths = lognormal_lengths(512, seed=0)
    parts = get_seqlen_balanced_partitions(lengths, 8, equal_size=True)
    assert_partition(parts, 512)
    assert {len(part) for part in parts} == {64}
    assert makespan(lengths, parts) <= 1.01 * sum(lengths) / 8
    assert parts == get_seqlen_balanced_partitions(lengths, 8, equal_size=True)


def test_zero_lengths_leave_no_part_empty() -> None:
    assert_partition(get_seqlen_balanced_partitions([0, 0, 0, 5], 3, equal_size=False), 4)


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="4 non-empty parts of 3 sequences"):
        get_seqlen_balanced_partitions([1, 2, 3], 4, equal_size=False)
    with pytest.raises(ValueError, match="2 parts of equal size of 3 sequences"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
    with pytest.raises(ValueError, match="3 non-empty parts of 2 groups"):
        get_group_balanced_partitions([1, 2, 3], ["a", "a", "b"], 3)


def test_groups_stay_together_in_any_order() -> None:
    lengths = lognormal_lengths(40, seed=1)
    uids = [f"u{i % 10}" for i in range(40)]
    parts = get_group_balanced_partitions(lengths, uids, 5)
    assert_partition(parts, 40)
    assert [len({uids[i] for i in part}) for part in parts] == [2] * 5
    assert_partition(get_group_balanced_partitions(lengths, uids, 3), 40)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("max_tokens", [4000, 4321, 9000, 10**6])
def test_token_budget_is_kept_with_few_parts(seed: int, max_tokens: int) -> None:
    lengths = lognormal_lengths(97, seed)
    parts = token_budget_partitions(lengths, max_tokens)
    assert_partition(parts, 97)
    assert makespan(lengths, parts) <= max_tokens
    assert len(parts) <= 11 / 9 * (-(-sum(lengths) // max_tokens)) + 1
    assert parts == token_budget_partitions(lengths, max_tokens)


def test_token_budget_where_only_pairs_that_fill_it_fit() -> None:
    lengths = [90, 10, 80, 20, 70, 30, 60, 40]
    parts = token_budget_partitions(lengths, 100)
    assert_partition(parts, 8)
    assert len(parts) == 4 and makespan(lengths, parts) == 100


def test_token_budget_with_a_least_number_of_parts_and_without_sequences() -> None:
    assert len(token_budget_partitions([5, 5, 5, 5], 100, min_parts=3)) == 3
    assert len(token_budget_partitions([5, 5], 100, min_parts=3)) == 2
    assert token_budget_partitions([], 100) == []


def test_a_sequence_longer_than_the_budget_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"sequence 1 has 12 tokens, more than the budget of 10.*max_token_len_per_gpu"
    ):
        token_budget_partitions([3, 12, 4], 10)


def batch_of(lengths: list[int]) -> TensorDict:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    return TensorDict({"row": torch.arange(len(lengths)), "attention_mask": mask}, batch_size=[len(lengths)])


def test_micro_batches_restore_the_order() -> None:
    lengths = lognormal_lengths(24, seed=3, longest=300)
    micro_batches, rows = rearrange_micro_batches(batch_of(lengths), max_token_len=600)
    assert [m["row"].tolist() for m in micro_batches] == rows
    assert all(int(m["attention_mask"].sum()) <= 600 for m in micro_batches)
    joined = torch.cat([m["row"] for m in micro_batches])
    assert joined[get_reverse_idx([i for part in rows for i in part])].tolist() == list(range(24))


def test_micro_batch_options() -> None:
    lengths = lognormal_lengths(24, seed=4, longest=300)
    assert len(rearrange_micro_batches(batch_of(lengths), 10**6, min_num_micro_batch=5)[1]) == 5
    assert len(rearrange_micro_batches(batch_of(lengths), 10**6, num_batches_divided_by=4)[1]) == 4
    _, rows = rearrange_micro_batches(batch_of(lengths), 1200, force_group_size=2)
    assert all(i + 1 in part for part in rows for i in part if i % 2 == 0)
    costs = [sum(calculate_workload(lengths[i]) for i in part) for part in rows]
    assert costs == sorted(costs, reverse=True)
    _, rows = rearrange_micro_batches(batch_of(lengths), 600, use_dynamic_bsz_balance=False)
    assert [part[0] for part in rows] == sorted(part[0] for part in rows)
    with pytest.raises(ValueError, match="cannot make 30 micro-batches of 24 rows"):
        rearrange_micro_batches(batch_of(lengths), 10**6, num_batches_divided_by=30)
    with pytest.raises(ValueError, match="24 rows do not divide into groups of 5"):
        rearrange_micro_batches(batch_of(lengths), 10**6, force_group_size=5)


def test_ranks_make_equally_many_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks as two threads, whose all-reduce meets at a barrier: a rank that left the loop alone would break it."""
    meet = threading.Barrier(2, timeout=20)
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        sent.append(tensor.clone())
        meet.wait()
        tensor.copy_(torch.stack(sent).amax(dim=0))
        if meet.wait() == 0:
            sent.clear()
        meet.wait()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    short, long = [10] * 16, [90, 60] * 8
    with ThreadPoolExecutor(2) as pool:
        made = list(
            pool.map(
                lambda lengths: rearrange_micro_batches(batch_of(lengths), 100, dp_group="ranks")[1], (short, long)
            )  # type: ignore[arg-type]
        )
    assert [len(rows) for rows in made] == [16, 16]
    for rows in made:
        assert_partition(rows, 16)


def test_unbalance_metrics_by_hand() -> None:
    metrics = log_seqlen_unbalance([10, 20, 1, 3], [[0, 3], [1, 2]], "global_seqlen")
    assert metrics == {
        "global_seqlen/min": 4,
        "global_seqlen/max": 30,
        "global_seqlen/minmax_diff": 26,
        "global_seqlen/balanced_min": 13,
        "global_seqlen/balanced_max": 21,
        "global_seqlen/mean": 17.0,
    }


def test_runs_keep_rows_of_one_prompt_together_and_count_it_once() -> None:
    own, prompts, owners = [4, 4, 4, 4, 5, 5], [10, 10, 10, 10, 2, 2], [0, 1, 0, 1, 4, 4]
    assert agreed_runs(own, prompts, owners, max_tokens=18) == [[0, 2], [1, 3], [4, 5]]
    assert agreed_runs(own, prompts, owners, max_tokens=100) == [[0, 2, 1, 3, 4, 5]]


@pytest.mark.parametrize("seed", range(5))
def test_runs_hold_every_row_once_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    owners = [i - i % 4 for i in range(64)]
    own, by_owner = [rng.randint(1, 300) for _ in owners], {i: rng.randint(1, 200) for i in owners}
    runs = agreed_runs(own, [by_owner[i] for i in owners], owners, max_tokens=1000)
    assert sorted(itertools.chain(*runs)) == list(range(64))
    for run in runs:
        assert sum(own[i] for i in run) + sum(by_owner[i] for i in {owners[i] for i in run}) <= 1000


def test_runs_keep_groups_of_rows_together() -> None:
    own, prompts, owners = [1, 9, 2, 3, 4, 4], [5, 5, 6, 6, 5, 5], [0, 0, 2, 2, 0, 0]
    assert agreed_runs(own, prompts, owners, max_tokens=15, group_size=2) == [[0, 1], [4, 5], [2, 3]]
    assert agreed_runs(own, prompts, owners, max_tokens=23, group_size=2) == [[0, 1, 4, 5], [2, 3]]
    with pytest.raises(ValueError, match="sequences 0 to 1 have 15 tokens, more than the budget of 14"):
        agreed_runs(own, prompts, owners, max_tokens=14, group_size=2)


def test_aligned_runs_count_their_padding() -> None:
    own, prompts = [1] * 32, [1] * 32
    own[7] = 199
    rows = list(range(32))
    assert agreed_runs(own, prompts, rows, max_tokens=400) == [rows]
    alone = [*rows[:7], *rows[8:]]
    assert agreed_runs(own, prompts, rows, max_tokens=400, aligned=True) == [alone, [7]]


@pytest.mark.parametrize("seed", range(3))
def test_aligned_runs_hold_every_row_once_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    own, prompts = ([rng.randint(1, 300) for _ in range(64)] for _ in range(2))
    for group_size in (1, 2):
        runs = agreed_runs(own, prompts, range(64), 2000, group_size=group_size, aligned=True)
        assert sorted(itertools.chain(*runs)) == list(range(64))
        for run in runs:
            assert len(run) * max(own[i] + prompts[i] for i in run) <= 2000
            assert all((i ^ 1) in run for i in run) or group_size == 1


def test_a_row_beyond_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 12 tokens, more than the budget of 9"):
        agreed_runs([1, 8], [4, 4], [0, 1], max_tokens=9)
