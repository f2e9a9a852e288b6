"""The batch of a step in which an audit found something: RUN/audits/step_N_<audit>/.

info.json            `DumpInfo`
batch.safetensors    the batch as the audit saw it: `DataProto.save_to_disk`, for `lockstep replay`
N.jsonl              its responses, for `lockstep rollouts`
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.observability.run_folder import AUDIT_INFO as INFO, AUDITS
from lockstep.protocol import DataProto
from lockstep.protocol.columns import names_of, tensors_of
from lockstep.protocol.images import IMAGES
from lockstep.utils.state_file import encode

logger = logging.getLogger(__name__)

BATCH = "batch.safetensors"
MOST_PER_AUDIT = 3
"""Dumps of one audit in the folder of a run."""
MOST_BYTES = 2**28
"""Of the tensors of a dump; rows beyond are left out."""
LARGE = ("routed_experts", "multi_modal_data", "multi_modal_inputs", "images", "videos")
"""Columns that are left out."""


@dataclass(frozen=True)
class DumpInfo:
    """What was found, and where the step began.

    audit:       its name in `trainer.audit`.
    step:        the training step, from 1.
    num_updates: updates of the policy before the step: the policy version that the step trains.
    checkpoint:  the newest checkpoint before the step, as a name in the run's folder or an absolute path; None: the run began at
                 step 0 and has saved none.
    left_out:    columns of the batch that are not plain data or are large, and how many rows were too many.
    """

    audit: str
    message: str
    step: int
    num_updates: int
    checkpoint: str | None
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BatchDump:
    """run: the folder of the run."""

    folder: Path
    info: DumpInfo
    batch: DataProto

    @property
    def run(self) -> Path:
        return self.folder.parent.parent

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint that the step's run began from; it may have been removed since."""
        return None if self.info.checkpoint is None else self.run / self.info.checkpoint


def checkpoint_name(run: Path, checkpoint: Path | None) -> str | None:
    """As `DumpInfo.checkpoint` holds it."""
    if checkpoint is None:
        return None
    return checkpoint.name if checkpoint.parent.resolve() == run.resolve() else str(checkpoint.resolve())


def write_dump(
    run: Path, batch: DataProto, info: DumpInfo, write_rows: Callable[[DataProto, Path], None] | None = None
) -> Path | None:
    """Keep the batch in the folder of a run. Returns the dump's folder; None if the audit has enough, or the disk is full.

    write_rows: writes the responses of a batch into a folder, as text.
    """
    root = run / AUDITS
    folder = root / f"step_{info.step}_{info.audit}"
    others = [found for found in root.glob(f"step_*_{info.audit}") if found != folder]
    if len(others) >= MOST_PER_AUDIT:
        return None
    staged = root / f".{folder.name}"
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        plain, left_out = _plain(batch)
        plain.save_to_disk(staged / BATCH)
        if write_rows is not None:
            write_rows(batch, staged)
        (staged / INFO).write_text(json.dumps(asdict(info) | {"left_out": left_out}, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
    except (OSError, MemoryError) as error:  # what the audit found is worth more than its batch
        logger.warning("the batch of audit %s is not kept: %s", info.audit, error)
        shutil.rmtree(staged, ignore_errors=True)
        return None
    return folder


def read_dump(folder: Path) -> BatchDump:
    """ValueError if the folder is not a dump."""
    folder = folder.expanduser().resolve()
    try:
        content = json.loads((folder / INFO).read_bytes())
        info = DumpInfo(**{key.name: content[key.name] for key in fields(DumpInfo)})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder} is not the dump of an audit, a folder RUN/{AUDITS}/step_N_NAME with {INFO} and {BATCH} "
            f"({type(error).__name__}: {error})"
        ) from error
    if not (folder / BATCH).is_file():
        raise ValueError(f"{folder} has no {BATCH}")
    return BatchDump(folder, info, DataProto.load_from_disk(folder / BATCH))


def _plain(batch: DataProto) -> tuple[DataProto, list[str]]:
    """The batch without what is large, not plain data, or of rows beyond the limit, and the names of what is left out."""
    large = [name for name in (*names_of(batch.batch), *batch.non_tensor_batch) if name in LARGE]
    if all(
        images is None for images in batch.non_tensor_batch.get(IMAGES, ())
    ):  # a model that reads images, rows without
        large = [name for name in large if name != IMAGES]
    names = [name for name in names_of(batch.batch) if name not in LARGE]
    batch = batch.select(names, [name for name in batch.non_tensor_batch if name not in LARGE])
    size = sum(tensor.nbytes for tensor in tensors_of(batch.batch).values())
    most = max(1, len(batch) * MOST_BYTES // max(size, MOST_BYTES))
    too_many = [f"{len(batch) - most} rows"] if most < len(batch) else []
    if too_many:
        batch = batch.select_idxs(list(range(most)))
    columns, others = _kept(batch.non_tensor_batch)
    meta_info, more = _kept(batch.meta_info)
    return DataProto(batch.batch, columns, meta_info), sorted(large + others + more) + too_many


def _kept(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kept = {}
    for name, value in values.items():
        try:
            if getattr(value, "dtype", None) is None or value.dtype == object:
                encode(value, owner=name)
        except ValueError:
            continue
        kept[name] = value
    return kept, [name for name in values if name not in kept]
