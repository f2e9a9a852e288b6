"""The names of groups."""

import uuid

from lockstep.trainer.ppo.sampling import _uid


def test_groups_of_a_step_have_names_of_their_own() -> None:
    names = {_uid(draw, number): (draw << 64) + number for draw in (0, 1, 2, 300) for number in (0, 1, 17, 5000)}
    assert len(names) == 16
    assert all(str(uuid.UUID(int=number)) == name for name, number in names.items())
