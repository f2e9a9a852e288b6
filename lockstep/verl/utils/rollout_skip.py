"""verl.utils.rollout_skip: reuse the rollouts of an earlier run, to debug what follows them.

skip = RolloutSkip(config, self.actor_rollout_wg)
skip.wrap_generate_sequences()         steps 1 to max_dump_step are read from dump_dir, or generated and written there
skip.record(batch, global_steps)       in `fit`, before each rollout
"""

import json
import logging
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.utils.files import make_private_folder
from lockstep.verl.protocol import DataProto

logger = logging.getLogger(__name__)

BATCH, ROLLOUT, META = "new_batch.dp", "gen_batch.dp", "meta.json"


class SkipAction(Enum):
    """After `max_dump_step` steps: generate again, or reuse the dumped steps one after another, or the last of them."""

    CACHE = "cache"
    REPEAT = "repeat"
    REPEAT_LAST = "repeat_last"


class RolloutSkip:
    """
    config:     `actor_rollout_ref.rollout.skip` has `enable`, `dump_dir`, `max_dump_step` and `action`. Runs whose names, batch
                sizes or lengths differ have folders of their own.
    rollout_wg: the worker group, or any object with `generate_sequences`.
    """

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        skip = rollout.get("skip") or {}
        self._group = rollout_wg
        self.is_enable = bool(skip.get("enable", False))
        self.action = SkipAction(skip.get("action", "repeat"))
        self.max_dump_step = int(skip.get("max_dump_step", 1))
        self.curr_step = 0
        self._batch: Any = None
        self._dumped: list[int] = []
        if not self.is_enable:
            return
        if self.max_dump_step < 1 and self.action is not SkipAction.CACHE:
            raise AssertionError(
                f"rollout.skip.max_dump_step={self.max_dump_step}: must be at least 1 with {self.action}"
            )
        trainer, data = config.trainer, config.data
        names = f"{trainer.get('experiment_name', '')}_{trainer.get('project_name', '')}"
        batch_size = data.get("gen_batch_size") or data.get("train_batch_size", 0)
        sizes = f"GBS{batch_size}_N{rollout.get('n', 1)}_in{data.get('max_prompt_length', 0)}"
        root = Path(skip.get("dump_dir", "~/.verl/rollout_dump")).expanduser().resolve()
        self.dumped_dir = root / names / f"{sizes}_out{data.get('max_response_length', 0)}"
        make_private_folder(self.dumped_dir)
        logger.warning("rollouts are reused from %s (rollout.skip.enable)", self.dumped_dir)

    @property
    def is_activate(self) -> bool:
        return self.is_enable and self._group is not None

    def record(self, new_batch: DataProto, global_steps: int | None = None, *unused: Any, **options: Any) -> None:
        """The batch of the next rollout; a reused rollout replaces its rows by those of the dumped step."""
        self._batch = new_batch
        if global_steps is not None:
            self.curr_step = global_steps - 1

    def wrap_generate_sequences(self) -> None:
        """Replace `generate_sequences` of the worker group; no-op if not enabled."""
        if not self.is_activate:
            return
        generate = self._group.generate_sequences

        def generate_or_reuse(batch: DataProto, **options: Any) -> DataProto:
            self.curr_step += 1
            source = self._step_to_load()
            if source is not None and (found := self.try_load(source)) is not None:
                return found
            output: DataProto = generate(batch, **options)
            if self.curr_step <= self.max_dump_step or (self.action is not SkipAction.CACHE and not self._dumped):
                self.dump(batch, output)
            return output

        self._group.generate_sequences = generate_or_reuse

    def _step_to_load(self) -> int | None:
        if self.curr_step <= self.max_dump_step:
            return self.curr_step
        if self.action is SkipAction.CACHE or not self._dumped:
            return None
        return self._dumped[-1 if self.action is SkipAction.REPEAT_LAST else (self.curr_step - 1) % len(self._dumped)]

    def get_path_dump(self, step: int | None = None) -> Path:
        return self.dumped_dir / f"genstep_{self.curr_step if step is None else step:06d}"

    def try_load(self, step: int | None = None) -> DataProto | None:
        """The rollout of a dumped step, whose rows the recorded batch then has; None without one."""
        folder = self.get_path_dump(step)
        if not (folder / META).is_file():
            return None
        loaded = read_dumped_data(folder)
        if self._batch is not None:
            rows = loaded["new_batch"]
            self._batch.batch, self._batch.non_tensor_batch = rows.batch, rows.non_tensor_batch
            self._batch = None
        self._note(int(folder.name.rpartition("_")[2]))
        return loaded["gen_batch"]

    def dump(self, batch: DataProto, output: DataProto) -> None:
        folder = self.get_path_dump()
        folder.mkdir(parents=True, exist_ok=True)
        (batch if self._batch is None else self._batch).save_to_disk(folder / BATCH)
        output.save_to_disk(folder / ROLLOUT)
        (folder / META).write_text(json.dumps({"global_steps": self.curr_step}))
        self._batch = None
        self._note(self.curr_step)

    def _note(self, step: int) -> None:
        self._dumped = sorted({*self._dumped, step})


def read_dumped_data(path_dump: str | Path) -> dict[str, Any]:
    """`new_batch` and `gen_batch` of a folder `genstep_N`."""
    folder = Path(path_dump)
    return {
        "new_batch": DataProto.load_from_disk(folder / BATCH),
        "gen_batch": DataProto.load_from_disk(folder / ROLLOUT),
    }
