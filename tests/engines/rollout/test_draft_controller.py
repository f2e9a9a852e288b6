"""What the controller chooses, given times and acceptance."""

import numpy as np
import pytest

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig
from lockstep.engines.rollout.embedded.draft_controller import (
    MAX_CAPTURE_S,
    PROBE_INTERVAL,
    USELESS_TOKENS,
    Acceptance,
    DraftController,
    LinearCost,
    SizeCost,
    graph_sizes,
)
from lockstep.engines.rollout.embedded.drafter import DraftCounts, Drafter


def controller(plain: float = 1.0, fixed: float = 1.0, per_token: float = 0.01, num_rows: int = 1) -> DraftController:
    """Plain steps take `plain` seconds for any number of rows, the last had `num_rows`; those with drafts `fixed` and
    `per_token` of each token. They may have any size."""
    made = DraftController(max_draft_tokens=16, sizes=range(1, 257))
    for size in (1, 8, 64, 200):
        made.measure_plain(size, plain)
    for num_tokens in (2, 16, 64, 256):
        made.note_step(num_tokens, fixed + per_token * num_tokens)
    made.measure_plain(num_rows, plain)
    return made


def rows(*rates: float) -> list[Acceptance]:
    """Acceptance that was measured often enough for the prior not to matter."""
    return [Acceptance(10_000 * rate, 10_000) for rate in rates]


def test_costs_are_a_line() -> None:
    cost = LinearCost()
    cost.measure(8, 2.0)
    assert cost.predict(8) == pytest.approx(2.0)
    assert 2.0 < cost.predict(16) < 3.0  # a guess
    for _ in range(50):
        for size in (4, 16, 64):
            cost.measure(size, 1.0 + 0.1 * size)
    np.testing.assert_allclose(cost.predict(np.array([1, 32, 100])), [1.1, 4.2, 11.0], rtol=0.02)
    cost.measure(16, 1000.0)  # the machine had something else to do
    assert cost.predict(16) < 1.2 * 2.6


def test_more_is_drafted_of_rows_that_are_right_more_often() -> None:
    lengths = controller().lengths(rows(0.98, 0.6, 0.05), [16, 16, 16])
    assert lengths[0] == 16 > lengths[1] > lengths[2]
    assert controller().lengths(rows(0.98, 0.98), [3, 0]) == [3, 0]


def test_the_choice_gives_the_most_tokens_per_second() -> None:
    """Against all pairs of lengths."""
    made = controller(fixed=1.2, per_token=0.05)
    rates = (0.9, 0.5)
    found = made.lengths(rows(*rates), [6, 6])

    def speed(lengths: tuple[int, int]) -> float:
        tokens = sum(1 + sum(rate**k for k in range(1, n + 1)) for rate, n in zip(rates, lengths))
        return tokens / (1.2 + 0.05 * (2 + sum(lengths)))

    best = max(((a, b) for a in range(7) for b in range(7)), key=speed)
    assert speed((found[0], found[1])) == pytest.approx(speed(best), rel=0.02)


def test_nothing_is_drafted_if_it_does_not_pay() -> None:
    slow = controller(fixed=1.0, per_token=1.0)
    assert slow.lengths(rows(0.9), [16]) == [0]
    assert not slow.may_pay(rows(0.9), 1)
    assert controller().may_pay(rows(0.9), 1)
    assert not controller().may_pay(rows(0.01), 1)
    assert not controller().may_pay(rows(0.9) * 8, 8)  # such plain steps were not measured lately
    assert controller(num_rows=8).may_pay(rows(0.9) * 8, 8)
    assert not controller(num_rows=256).may_pay(rows(0.9) * 256, 256)  # the step is full


def test_after_drafts_that_paid_the_next_search_is_not_estimated() -> None:
    made = controller()
    made.note_search(1, 1, pays=True)
    assert made.has_paid
    made.measure_plain(1, 1.0)
    assert not made.has_paid
    made.note_search(1, 1, pays=True)
    made.begin()
    assert not made.has_paid
    made.note_search(1, 1, pays=True, is_probe=True)  # of some rows, though it was not expected to pay
    assert not made.has_paid


def test_steps_of_another_size_and_full_ones_are_closed() -> None:
    made = controller(num_rows=8)
    assert [size for size in range(1, 20) if made.is_open(size)] == list(range(4, 13))
    assert not controller(num_rows=256).is_open(256)


def test_steps_on_cuda_may_have_more_tokens() -> None:
    for max_num_seqs, expected in ((16, 1024), (4096, 4096)):
        drafter = Drafter(HistoryDraftsConfig(enable=True), max_num_seqs)
        assert drafter.controller.max_tokens == max(64, max_num_seqs)
        drafter.use_cuda()
        assert drafter.controller.max_tokens == expected and len(drafter.controller.sizes) < 24


def test_a_step_never_has_more_tokens_than_allowed() -> None:
    lengths = controller(per_token=0.0).lengths(rows(*[0.98] * 100), [16] * 100)
    assert 100 + sum(lengths) <= 256 and max(lengths) <= 16


def test_searches_without_result_become_rare_and_probes_come() -> None:
    made = controller()
    waits = []
    for _ in range(6):
        made.note_search(4, 0, pays=False)
        waits.append(0)
        while not made.may_pay(rows(0.9), 1):
            made.measure_plain(1, 1.0)
            waits[-1] += 1
    assert waits == [1, 3, 7, 15, 16, 16]
    slow = controller(per_token=1.0)
    for _ in range(PROBE_INTERVAL - 1):  # there was one
        assert not slow.is_probe(1)
        slow.measure_plain(1, 1.0)
    assert slow.is_probe(1) and not slow.is_probe(slow.max_tokens)  # a probe must fit


def test_useless_drafts_are_noticed() -> None:
    made = controller()
    for _ in range(USELESS_TOKENS):
        assert not made.is_useless()
        made.note_accepted(1, num_accepted=0, num_failed=1)
    assert made.is_useless()
    assert not made.is_useless()
    for _ in range(USELESS_TOKENS):
        made.note_accepted(1, num_accepted=4, num_failed=0)
    assert not made.is_useless()
    assert made.prior > 0.9


def on_graphs(*measured: tuple[int, float], capture_s: float = 0.0) -> DraftController:
    """Plain steps of 8 rows take a second. measured: sizes of steps with drafts, and their seconds."""
    made = DraftController(max_draft_tokens=16, sizes=graph_sizes(256))
    made.measure_plain(8, 1.0)
    for _ in range(10):
        for size, seconds in measured:
            made.note_step(size, seconds)
    made.capture_s = capture_s
    return made


def test_graphs_have_two_sizes_per_power_of_two() -> None:
    assert graph_sizes(256) == (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert graph_sizes(200)[-3:] == (128, 192, 200)
    assert graph_sizes(8) == (8,) and graph_sizes(3) == (3,)


def test_each_size_has_its_own_cost() -> None:
    cost = SizeCost()
    for _ in range(30):
        for size, seconds in ((64, 1.0), (128, 3.0), (256, 3.0)):
            cost.measure(size, seconds)
    np.testing.assert_allclose(cost.predict(np.array([64, 128, 256])), [1.0, 3.0, 3.0], rtol=0.15)
    unmeasured = cost.predict(np.array([192]))
    np.testing.assert_allclose(unmeasured, cost.line.predict(np.array([192])))
    for _ in range(200):  # what 64 took was long ago
        cost.measure(256, 3.0)
    assert cost.predict(np.array([64]))[0] > 2.0


def test_a_step_is_filled_up_to_its_size() -> None:
    """With the likeliest drafts, for these cost nothing."""
    made = on_graphs((12, 1.0), (16, 1.0), (24, 1.05), (32, 3.0), (64, 6.0))
    lengths = made.lengths(rows(*[0.9] * 4, *[0.05] * 4), [5] * 8)
    assert sum(lengths) == 24 - 8
    assert min(lengths[:4]) >= 3 > max(lengths[4:])
    assert sum(made.lengths(rows(*[0.9] * 8), [1] * 8)) == 8
    assert sum(made.lengths(rows(*[0.9] * 8), [1] * 7 + [0])) == 7  # there are no more


def steps_until_capture(capture_s: float, num_rows: list[int]) -> int:
    """Steps of as many rows in turn, with graphs of 24 tokens alone at first, until one has another size."""
    made = on_graphs((24, 1.0), capture_s=capture_s)
    for number in range(1, 100):
        num = num_rows[number % len(num_rows)]
        num_tokens = num + sum(made.lengths(rows(*[0.9] * num), [16] * num))
        if num_tokens > 24:
            return number
        made.note_step(num_tokens, 1.0)
    raise AssertionError("nothing was captured")


def test_a_size_is_captured_once_it_would_have_gained_what_the_capture_takes() -> None:
    found = [steps_until_capture(capture_s, [8]) for capture_s in (0.0, 2.0, 4.0)]
    assert found[0] == 1 and 1 < found[1] < found[2] < 20


def test_a_size_gains_in_steps_for_which_another_is_the_best_too() -> None:
    """96 tokens are the best for 8 rows, 128 for 16: neither waits until it was the best often enough."""
    alone = [steps_until_capture(4.0, [num]) for num in (8, 16)]
    assert min(alone) <= steps_until_capture(4.0, [8, 16]) <= max(alone)


def test_nothing_is_captured_for_a_gain_that_differs_little() -> None:
    made = on_graphs((64, 1.0), (96, 1.2), (128, 1.4), capture_s=1.0)
    made._ready = {96}
    assert {sum(made.lengths(rows(*[0.9] * 8), [16] * 8)) for _ in range(20)} == {96 - 8}


def test_the_first_capture_is_waited_for_without_ceasing_to_search() -> None:
    made = on_graphs(capture_s=20.0)
    num_searches = 0
    while not made.has_paid:
        chosen = made.lengths(rows(*[0.9] * 8), [16] * 8)
        made.note_search(8, 8, pays=any(chosen))
        num_searches += 1
        if not made.has_paid:
            assert made.waits
            made.measure_plain(8, 1.0)
            assert made.is_open(8)
    assert 2 < num_searches < 6 and not made.waits
    assert any(on_graphs(capture_s=0.01).lengths(rows(*[0.9] * 8), [16] * 8))


def test_probes_and_failed_attempts_capture_nothing_more() -> None:
    made = on_graphs((24, 1.0), capture_s=6.0)
    for _ in range(PROBE_INTERVAL):
        made.measure_plain(8, 1.0)
    assert made.is_probe(8) and not made.is_probe(9)  # 24 and 25 tokens
    made.forget_graphs()
    assert made.is_probe(9)
    # a size that is due is due until it is computed
    made = on_graphs((24, 1.0), capture_s=2.0)
    chosen = [sum(made.lengths(rows(*[0.9] * 8), [16] * 8)) for _ in range(20)]
    assert chosen[0] == 16 < chosen[-1] and sorted(chosen) == chosen


def test_the_least_time_of_a_capture_counts() -> None:
    made = on_graphs()
    for seconds, expected in ((20.0, MAX_CAPTURE_S), (0.2, 0.2), (0.3, 0.2), (0.1, 0.1)):
        made.note_capture(seconds)
        assert made.capture_s == expected


def test_lower_sizes_are_captured_again() -> None:
    made = on_graphs((24, 1.0), (96, 1.0))
    made.lower_tokens(95)
    assert made.max_tokens == 64 and not made._ready
    made.lower_tokens(7)
    assert made.max_tokens == 0 and not made.is_open(1) and made.lengths(rows(0.9), [3]) == [0]


def curve(num_rows: int, rate: float, available: int) -> np.ndarray:
    """Of rows whose drafts are all as likely to be right."""
    numbers = np.arange(available + 1)
    gains = np.cumsum(rate**numbers) - 1
    return np.append(np.stack([numbers * num_rows, gains * num_rows], 1).reshape(-1), num_rows)


def test_the_size_is_the_best_for_what_the_decoder_expects() -> None:
    made = on_graphs((16, 1.1), (24, 1.2), (32, 1.3), (64, 4.0), capture_s=1e9)
    assert made.size_for(8, 4) == 0  # nothing is known
    made.note_curve(curve(8, 0.9, 16))
    assert made.size_for(8, 4) == 32
    made.note_curve(curve(8, 0.2, 16))
    assert made.size_for(8, 4) == 16
    made.note_curve(curve(8, 0.05, 16))
    assert made.size_for(8, 4) == 0
    made.note_curve(curve(16, 0.9, 16))  # before half of the rows ended
    assert made.size_for(8, 4) == 32
    made.note_curve(curve(8, 0.9, 1))  # there are no more
    assert made.size_for(8, 4) == 16
    assert made.size_for(made.max_tokens, 4) == 0
    made.note_curve(np.zeros(5))  # all rows had ended
    assert made.size_for(8, 4) == 0
    assert made.size_for(0, 4) == 0


def test_plain_steps_of_about_as_many_rows_must_be_known() -> None:
    """Short windows of plain steps find out."""
    made = on_graphs((16, 1.1), capture_s=1e9)
    made.note_curve(curve(8, 0.9, 16))
    assert made.size_for(8, 4) == 16 and not made.is_unsure
    assert made.size_for(3, 4) == 0 and made.is_unsure
    made.measure_plain(3, 1.0)
    assert made.size_for(3, 4) == 16 and not made.is_unsure
    assert made.size_for(made.max_tokens, 4) == 0 and not made.is_unsure  # no drafts would fit


def test_one_slow_step_does_not_end_drafts() -> None:
    made = on_graphs(capture_s=1e9)
    made.note_step(16, 20.0)
    made.note_step(16, 20.0)
    for _ in range(40 * PROBE_INTERVAL):
        made.note_curve(curve(8, 0.9, 16))
        if made.size_for(8, 4):
            made.note_step(16, 1.1)
            if made.size_for(8, 4):
                return
        made.measure_plain(8, 1.0)
    raise AssertionError("drafts are not tried any more")


def test_one_capture_at_a_time() -> None:
    """A size is at hand once it is launched, before it was measured."""
    made = on_graphs((16, 1.1), capture_s=4.0)
    while (size := made.size_for(8, 4)) in (0, 16):
        made.note_curve(curve(8, 0.9, 16))
    made.note_size(size)
    made.note_curve(curve(8, 0.9, 16))
    assert made.size_for(8, 4) in (16, size)


def test_surveys_become_rare_while_drafts_do_not_pay() -> None:
    made = on_graphs((16, 1.1), capture_s=1e9)
    made.begin()
    assert made.is_unsure and made.survey_is_due(8) and not made.survey_is_due(made.max_tokens)
    waits = []
    for _ in range(6):
        made.note_curve(curve(8, 0.01, 16))
        assert made.size_for(8, 4) == 0 and not made.is_unsure
        waits.append(0)
        while not made.survey_is_due(8):
            made.measure_plain(8, 1.0)
            waits[-1] += 1
    assert waits == [1, 3, 7, 15, 16, 16]
    made.note_curve(curve(8, 0.9, 16))
    assert made.size_for(8, 4) == 16
    made.begin()
    assert made.survey_is_due(8) and made.size_for(8, 4) == 0 and made.is_unsure  # the curve was of other requests


def test_expectations_are_corrected_by_what_became_of_them() -> None:
    made = on_graphs((16, 1.3), capture_s=1e9)
    for _ in range(40):
        made.note_curve(curve(8, 0.8, 1))
        if not made.size_for(8, 4):
            break
        made.note_expected(num_rows=32, num_accepted=4)
    else:
        raise AssertionError("drafts are still expected to pay")
    for _ in range(400):  # and tried again later
        made.note_curve(curve(8, 0.8, 1))
        if made.size_for(8, 4):
            return
    raise AssertionError("drafts are not tried any more")


def test_steps_in_which_no_draft_was_found_have_metrics() -> None:
    """The decoder may find none for a size that was chosen from an older curve."""
    drafter = Drafter(HistoryDraftsConfig(enable=True), max_num_seqs=8)
    drafter.use_cuda()
    drafter.note_window(4, num_steps=8, seconds=0.1)
    drafter.note_steps(8, 4, 4, DraftCounts(num_rows=16, num_sampled=16, num_drafted=0, num_failed=0), seconds=0.1)
    drafter.totals.num_generated = 16
    metrics = drafter.take_metrics()
    assert metrics["perf/drafts/tokens_per_step"] == 1 and "perf/drafts/acceptance" not in metrics
