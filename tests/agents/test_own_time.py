"""Deadlines of programs and graphs: waiting for the policy does not count."""

import asyncio
from typing import Any

import pytest

from lockstep.agents.loops import recorded
from lockstep.agents.loops.recorded import OutOfTimeError, OwnTime

ANSWER: Any = object()


async def policy(request: Any) -> Any:
    await asyncio.sleep(0.3)
    return ANSWER


def test_waiting_for_the_policy_does_not_count() -> None:
    async def main() -> tuple[list[Any], float]:
        own_time = OwnTime(policy)

        async def hold() -> list[Any]:
            first = await own_time.sample(ANSWER)
            return [first, *await asyncio.gather(*(own_time.sample(ANSWER) for _ in range(3)))]

        return await own_time.limit(hold(), 0.2, "program", "p"), own_time.seconds

    answers, seconds = asyncio.run(main())
    assert answers == [ANSWER] * 4 and 0 <= seconds < 0.2


@pytest.mark.parametrize("waits_first", [False, True])
def test_own_time_ends_the_call(waits_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "CHECK_EVERY_S", 0.01)
    ended: list[str] = []

    async def main() -> None:
        own_time = OwnTime(policy)

        async def hold() -> None:
            if waits_first:
                await own_time.sample(ANSWER)
            try:
                await asyncio.sleep(30)
            finally:
                ended.append("cancelled")

        await own_time.limit(hold(), 0.1, "program", "p")

    with pytest.raises(OutOfTimeError):
        asyncio.run(main())
    assert ended == ["cancelled"]


@pytest.mark.parametrize("error", [KeyError("of the graph"), TimeoutError("of the graph")])
def test_errors_pass(error: Exception) -> None:
    async def main() -> None:
        async def fail() -> None:
            raise error

        await OwnTime(policy).limit(fail(), 5.0, "program", "p")

    with pytest.raises(type(error), match="of the graph"):
        asyncio.run(main())
