"""Group ids."""

from lockstep.trainer.ppo.sampling import _uid


def test__uids_are_unique_within_a_step() -> None:
    assert len({_uid(draw, number) for draw in (0, 1, 2, 300) for number in (0, 1, 17, 5000)}) == 16
