"""The names of groups."""

from lockstep.trainer.ppo.sampling import _uid


def test_groups_of_a_step_have_names_of_their_own() -> None:
    assert len({_uid(draw, number) for draw in (0, 1, 2, 300) for number in (0, 1, 17, 5000)}) == 16
