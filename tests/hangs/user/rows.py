"""A dataset."""

from typing import Any

from lockstep.data.rl_dataset import RLHFDataset
from tests.hangs.plants import hang_here, is_now, note_pid


class Rows(RLHFDataset):
    def __getitem__(self, item: int) -> dict[str, Any]:
        note_pid("loader")
        if is_now("dataset"):
            hang_here()
        return super().__getitem__(item)
