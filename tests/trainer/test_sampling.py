"""Group ids."""

from lockstep.trainer.ppo.sampling import group_id


def test_group_ids_are_unique_within_a_step() -> None:
    assert len({group_id(draw, number) for draw in (0, 1, 2, 300) for number in (0, 1, 17, 5000)}) == 16
