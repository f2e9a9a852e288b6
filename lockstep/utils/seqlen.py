"""Spread sequences of unequal length evenly: over ranks, and over micro-batches under a token budget.

Everything is deterministic and works on lengths alone; a partition is a list of index lists, each sorted.
"""

import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Partitions = list[list[int]]
Number = TypeVar("Number", int, Tensor)

# The cost of a sequence of length s is about LINEAR * s + s^2: the linear layers' share against attention's, in the
# proportion of a 7B model (hidden size 4096: 6 * hidden).
LINEAR_COST = 24576

# how many numbers of micro-batches are tried between the least possible and what greedy packing needs
MAX_TRIES = 8

# in place of a rank's number of micro-batches, where one of its sequences is longer than the budget
DOES_NOT_FIT = -1


def calculate_workload(seqlen: Number) -> Number:
    """Relative cost of a forward over sequences of these lengths: linear layers plus quadratic attention."""
    return LINEAR_COST * seqlen + seqlen**2


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partitions:
    """`k_partitions` non-empty parts with near-equal sums, by largest differencing (Karmarkar and Karp 1982).

    With `equal_size` every part has as many items as the others, so the number of items must divide by `k_partitions`.
    """
    num_items = len(seqlen_list)
    if k_partitions < 1 or num_items < k_partitions:
        raise ValueError(f"cannot make {k_partitions} non-empty parts of {num_items} sequences")
    if equal_size and num_items % k_partitions:
        raise ValueError(f"cannot make {k_partitions} parts of equal size of {num_items} sequences")
    parts = _largest_differencing(seqlen_list, k_partitions, equal_size)
    _fill_empty(parts, seqlen_list)
    return [sorted(part) for part in parts]


def get_group_balanced_partitions(seqlen_list: Sequence[int], uid_list: Sequence[Any], k_partitions: int) -> Partitions:
    """Like `get_seqlen_balanced_partitions` by workload, with all sequences of one uid in one part.

    Every part gets equally many groups where their number divides by `k_partitions`.
    """
    members: dict[Any, list[int]] = {}
    for i, uid in enumerate(uid_list):
        members.setdefault(uid, []).append(i)
    groups = list(members.values())
    if len(groups) < k_partitions:
        raise ValueError(f"cannot make {k_partitions} non-empty parts of {len(groups)} groups")
    costs = [sum(calculate_workload(int(seqlen_list[i])) for i in group) for group in groups]
    parts = get_seqlen_balanced_partitions(costs, k_partitions, equal_size=len(groups) % k_partitions == 0)
    return [sorted(i for g in part for i in groups[g]) for part in parts]


def token_budget_partitions(
    lengths: Sequence[int], max_tokens: int, min_parts: int = 1, costs: Sequence[int] | None = None
) -> Partitions:
    """Few parts, but `min_parts` at least, each of at most `max_tokens` tokens and all of near-equal cost.

    `costs` are the workloads of the lengths unless they are given; the costliest part comes first, so that a budget
    too large for the memory fails at once. Where balanced parts do not fit the budget in the number that greedy
    packing needs, the greedy ones are taken.
    """
    if not len(lengths):
        return []
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if lengths[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {lengths[longest]} tokens, more than the budget of {max_tokens} tokens for one "
            "micro-batch: raise *_max_token_len_per_gpu to the longest prompt plus response"
        )
    costs = [calculate_workload(int(length)) for length in lengths] if costs is None else costs
    greedy = _first_fit_decreasing(lengths, max_tokens)
    num_large = sum(2 * length > max_tokens for length in lengths)
    fewest = max(-(-sum(lengths) // max_tokens), num_large, min(min_parts, len(lengths)), 1)
    for num_parts in _counts_to_try(fewest, len(greedy), len(lengths)):
        parts = get_seqlen_balanced_partitions(costs, num_parts, equal_size=False)
        if any(_total(lengths, part) > max_tokens for part in parts):
            if num_parts != len(greedy):
                continue
            parts = greedy
        return sorted(parts, key=lambda part: (-_total(costs, part), part))
    raise AssertionError("one sequence in each part fits the budget")


def agreed_partitions(
    lengths: Sequence[int],
    max_tokens: int,
    group: "dist.ProcessGroup | None" = None,
    min_parts: int = 1,
    divisor: int = 1,
    costs: Sequence[int] | None = None,
) -> Partitions:
    """`token_budget_partitions` of as many parts on every rank of `group`, their number a multiple of `divisor`.

    Ranks whose forwards and backwards meet in collectives must run equally many. Collective over `group`: where a sequence
    is longer than the budget, all its ranks raise.
    """
    try:
        parts = token_budget_partitions(lengths, max_tokens, min_parts, costs)
    except ValueError:
        _least_and_most(DOES_NOT_FIT, group)
        raise
    while True:
        least, most = _least_and_most(len(parts), group)
        if least == DOES_NOT_FIT:
            raise ValueError(
                f"a sequence on another rank is longer than the budget of {max_tokens} tokens for one micro-batch: raise "
                "*_max_token_len_per_gpu to the longest prompt plus response"
            )
        wanted = -(-most // divisor) * divisor
        if least == wanted:
            return parts
        if wanted > len(lengths):
            raise ValueError(f"cannot make {wanted} micro-batches of {len(lengths)} rows or groups of rows")
        parts = token_budget_partitions(lengths, max_tokens, wanted, costs)


def agreed_runs(
    own: Sequence[int],
    prompts: Sequence[int],
    owners: Sequence[int],
    max_tokens: int,
    group: "dist.ProcessGroup | None" = None,
    group_size: int = 1,
    *,
    aligned: bool = False,
    longer_alone: bool = False,
) -> Partitions:
    """Rows in parts of at most `max_tokens`, as many on every rank; rows that share a prompt lie together, and it counts once.

    own, prompts: tokens of each row's response, and of its prompt.
    owners:       the first row with the same prompt.
    group_size:   rows that follow each other in groups of this size stay together.
    aligned:      a part computes each of its rows up to the longest; rows of similar length lie together.
    longer_alone: a row or group that is longer than the budget is its own part; otherwise all ranks raise.
    Collective over `group`, whose ranks have equally many rows.
    """
    units = [list(range(i, i + group_size)) for i in range(0, len(own), group_size)]

    def cost(run: Partitions) -> int:
        rows = list(itertools.chain.from_iterable(run))
        if aligned:
            return len(rows) * max(own[i] + prompts[i] for i in rows)
        return sum(own[i] for i in rows) + sum({owners[i]: prompts[i] for i in rows}.values())

    units.sort(key=lambda rows: (cost([rows]) if aligned else owners[rows[0]], rows[0]))
    longest, row = max((cost([unit]), unit[0]) for unit in units)
    if not longer_alone and _least_and_most(DOES_NOT_FIT if longest > max_tokens else 1, group)[0] == DOES_NOT_FIT:
        which = f"sequence {row} has" if group_size == 1 else f"sequences {row} to {row + group_size - 1} have"
        where = f"{which} {longest} tokens," if longest > max_tokens else "a sequence on another rank has"
        raise ValueError(
            f"{where} more than the budget of {max_tokens} tokens for one micro-batch: raise *_max_token_len_per_gpu to the "
            "longest prompt plus response"
        )
    runs = _filled(units, max_tokens, cost)
    _, wanted = _least_and_most(len(runs), group)
    even = _filled(units, min(max(-(-cost(units) // wanted), longest), max_tokens), cost)
    runs = even if len(even) <= wanted else runs
    while len(runs) < wanted:
        largest = max((run for run in runs if len(run) > 1), key=cost)
        place = runs.index(largest)
        half = len(largest) // 2
        runs[place : place + 1] = [largest[:half], largest[half:]]
    return [list(itertools.chain.from_iterable(run)) for run in runs]


def _filled(units: Partitions, budget: int, cost: Callable[[Partitions], int]) -> list[Partitions]:
    """Runs of units that follow each other, each as long as the budget allows."""
    runs: list[Partitions] = []
    for unit in units:
        if runs and cost([*runs[-1], unit]) <= budget:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: "dist.ProcessGroup | None" = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], Partitions]:
    """Cut a TensorDict into micro-batches of at most `max_token_len` tokens: (micro-batches, their rows).

    Tokens are counted by `attention_mask`. `get_reverse_idx` of the joined rows restores the order of the outputs.

    dp_group:                with `same_micro_num_in_dp`, every rank makes as many as the rank that needs most
    num_batches_divided_by:  their number becomes a multiple of it
    min_num_micro_batch:     at least so many (but no more than rows)
    use_dynamic_bsz_balance: costliest first; false keeps the order of their first rows
    force_group_size:        rows that follow each other in groups of this size stay together
    """
    seqlens = [int(n) for n in batch["attention_mask"].sum(dim=-1)]
    if len(seqlens) % force_group_size:
        raise ValueError(f"{len(seqlens)} rows do not divide into groups of {force_group_size}")
    units = [list(range(i, i + force_group_size)) for i in range(0, len(seqlens), force_group_size)]
    lengths = [_total(seqlens, unit) for unit in units]
    costs = [sum(calculate_workload(seqlens[i]) for i in unit) for unit in units]
    group = dp_group if same_micro_num_in_dp else None
    parts = agreed_partitions(
        lengths, max_token_len, group, min_num_micro_batch or 1, num_batches_divided_by or 1, costs
    )
    if not use_dynamic_bsz_balance:
        parts = sorted(parts)
    rows = [[i for u in part for i in units[u]] for part in parts]
    return [batch[torch.tensor(part)] for part in rows], rows


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The permutation that undoes `idx_map`: result[idx_map[i]] = i."""
    reverse = [0] * len(idx_map)
    for i, target in enumerate(idx_map):
        reverse[target] = i
    return reverse


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: Partitions, prefix: str) -> dict[str, float]:
    """Tokens per rank before balancing (rows dealt out in order) and after it, as metrics under `prefix`."""
    num_ranks = len(partitions)
    share = -(-len(seqlen_list) // num_ranks)
    before = [sum(seqlen_list[start : start + share]) for start in range(0, len(seqlen_list), share)]
    after = [_total(seqlen_list, part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / num_ranks,
    }


def _total(amounts: Sequence[int], part: Sequence[int]) -> int:
    return sum(amounts[i] for i in part)


def _largest_differencing(costs: Sequence[int], k: int, equal_size: bool) -> Partitions:
    """Merge the two partial solutions of widest spread, largest part onto smallest, until one is left.

    A solution is its non-empty parts as (sum, items), largest first; up to k of them, the others are empty.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    step = k if equal_size else 1
    solutions = [[(costs[i], [i]) for i in order[start : start + step]] for start in range(0, len(order), step)]
    heap = [(-_spread(solution, k), tie, solution) for tie, solution in enumerate(solutions)]
    heapq.heapify(heap)
    ties = itertools.count(len(heap))
    while len(heap) > 1:
        wide, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # of k places, `other` fills the last ones from the back: its first parts stand beside empty places of `wide`
        alone = k - len(other)
        beside = max(0, k - len(wide))
        merged = wide[:alone] + other[:beside]
        merged += [(a + b, i + j) for (a, i), (b, j) in zip(wide[alone:], reversed(other[beside:]))]
        merged.sort(key=operator.itemgetter(0), reverse=True)
        heapq.heappush(heap, (-_spread(merged, k), next(ties), merged))
    parts = [items for _, items in heap[0][2]]
    return parts + [[] for _ in range(k - len(parts))]


def _spread(solution: list[tuple[int, list[int]]], k: int) -> int:
    """Largest less smallest sum of the k parts."""
    return solution[0][0] - (solution[-1][0] if len(solution) == k else 0)


def _fill_empty(parts: Partitions, costs: Sequence[int]) -> None:
    """Give every empty part the cheapest item of the fullest: costs of 0 can leave parts empty."""
    for part in parts:
        if not part:
            fullest = max(parts, key=len)
            cheapest = min(fullest, key=lambda i: (costs[i], i))
            fullest.remove(cheapest)
            part.append(cheapest)


def _counts_to_try(fewest: int, greedy: int, most: int) -> Iterator[int]:
    """Numbers of parts from `fewest` up: a few on the way to `greedy`, which is sure to fit, else all up to `most`."""
    if fewest > greedy:
        yield from range(fewest, most + 1)
        return
    stride = -(-max(greedy - fewest, 1) // MAX_TRIES)
    yield from range(fewest, greedy, stride)
    yield greedy


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> Partitions:
    """Greedy packing, longest first, each into the first part with room."""
    parts: Partitions = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        home = next((p for p, free in enumerate(room) if free >= lengths[i]), None)
        if home is None:
            home = len(parts)
            parts.append([])
            room.append(max_tokens)
        parts[home].append(i)
        room[home] -= lengths[i]
    return [sorted(part) for part in parts]


def _least_and_most(count: int, group: "dist.ProcessGroup | None") -> tuple[int, int]:
    """The smallest and the largest `count` of all ranks, the same on each of them. Collective."""
    if group is None:
        return count, count
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    extremes = torch.tensor([-count, count], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    least, most = extremes.tolist()
    return -least, most
