"""Reward functions."""

import random
import time

from tests.hangs.plants import hang_here, hang_there, is_now, note_pid


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    note_pid("reward")
    if is_now("reward"):
        hang_here()
    return float(sum(map(ord, solution_str)) % 3 == 0)


async def judge_with_care(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    if is_now("reward"):
        await hang_there()
    return float(sum(map(ord, solution_str)) % 3 == 0)


def take_your_time(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    """0.05 to 0.5 s."""
    time.sleep(0.05 * 10 ** random.random())
    return float(sum(map(ord, solution_str)) % 3 == 0)
