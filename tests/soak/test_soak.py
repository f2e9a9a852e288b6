"""The soak itself: slopes and bounds by numbers, and a short run with loose bounds."""

import pytest

from tests.soak.__main__ import main
from tests.soak.samples import Series

pytestmark = pytest.mark.first


def series(quantity: str, values: list[float], every: int = 50) -> Series:
    found = Series(quantity, "trainer")
    for number, value in enumerate(values):
        found.add(number * every, value)
    return found


def test_a_leak_is_found_and_noise_is_not() -> None:
    assert series("memory", [100 + 2 * i for i in range(40)]).growth() == pytest.approx((40, 38))  # 2 MiB per 50 steps
    assert series("memory", [100 + 2 * i for i in range(40)]).exceeds()
    assert not series("memory", [100 + 2 * min(i, 15) for i in range(40)]).exceeds()  # it grows at the beginning only
    assert not series("memory", [100 + 90 * (i % 5 == 0) for i in range(40)]).exceeds()  # outliers
    assert series("handles", [20 + i for i in range(40)]).exceeds()
    assert not series("handles", [20, 22, 21] * 10).exceeds()
    assert series("step time", [1 + 0.05 * i for i in range(40)]).exceeds()
    assert not series("step time", [1 + 0.2 * (i % 2) for i in range(40)]).exceeds()


@pytest.mark.slow
def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "32", "--save-freq", "8", "--noise", "8"]) == 0
    output = capsys.readouterr().out
    assert output.count("nothing grows beyond its bound") == 2
    assert "| memory | trainer (pid " in output and "| threads | agent worker (pid " in output
