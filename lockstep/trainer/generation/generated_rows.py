"""The output of `lockstep generate`: finished batches while it runs, one file in the end. A kill loses at most one batch.

    batch ─► OUTPUT.parts/00000128-00000255.parquet ─► … ─► OUTPUT (the rows of the data with the responses) ─► parts removed
             OUTPUT.parts/job.json: what determines the responses; another command over the same parts is refused

The job of a finished output is in its metadata if it is a parquet file, else in OUTPUT.job.json.

Files are written under a temporary name and renamed when they are complete.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.config.errors import show
from lockstep.config.generation import GenerationConfig, parts_folder
from lockstep.config.schema import as_written, get_in, keys
from lockstep.data.files import READ_ROWS, file_digests, iter_file
from lockstep.utils.files import (
    atomic_write_json,
    atomic_writer,
    make_private_folder,
    remove_temporary_files,
    sha256_all,
)
from lockstep.utils.model_path import revision_of

logger = logging.getLogger(__name__)

JOB_FILE = "job.json"
JOB_METADATA = b"lockstep.generation"
"""Key of the job in the output's metadata."""
COLUMNS = {
    "responses": pa.list_(pa.string()),
    "response_lengths": pa.list_(pa.int64()),
    "finish_reasons": pa.list_(pa.string()),
    "rollout_infos": pa.list_(pa.string()),
}
"""Added to the rows: one entry per sample; lengths are in tokens, reasons `stop` or `length`.

rollout_infos: of agents only; JSON objects with what the reward function finds in `extra_info`.
"""
ROW = "row"
"""Column of the parts: number of the row in the data."""

Job = dict[str, Any]
"""What determines the responses: settings by key, `model` (Hub revision, or its files), `data` (digests of its files)."""

_NOT_OF_THE_JOB = (
    *("trainer.", "ray_init.", "data.path", "data.output_path", "data.batch_size", "model.enable_", "model.use_"),
    *("rollout.max_num", "rollout.gpu_memory", "rollout.free_cache", "rollout.enforce_eager", "rollout.enable_"),
    *("rollout.kv_block_size", "rollout.max_model_len", "rollout.tensor_model"),
)
"""Keys, or their beginnings, that change speed and memory only."""


def job_of(config: GenerationConfig, model: Sequence[Path], data_files: Sequence[Path]) -> Job:
    """The job of a command. model: its local folders, more than one with an adapter."""
    tree = as_written(config)
    settings = {key: get_in(tree, key, None) for key in keys(GenerationConfig) if not key.startswith(_NOT_OF_THE_JOB)}
    data = [digest for _, digest in sorted(file_digests(data_files).items())]
    identities = [revision_of(folder) or _file_identities(folder) for folder in model]
    return {**settings, "model": identities, "data": data}


def _file_identities(model: Path) -> dict[str, str]:
    """File -> digest; of weights, which take long to read, size and time of change."""
    files = sorted(path for path in model.iterdir() if path.is_file())
    digests = sha256_all([path for path in files if path.suffix in (".json", ".jinja", ".txt", ".model")])
    return {path.name: digests.get(path) or f"{path.stat().st_size} bytes, {path.stat().st_mtime_ns}" for path in files}


def differences(saved: Mapping[str, Any], job: Job) -> list[str]:
    """What two jobs differ in, for messages."""
    changed = [key for key in dict.fromkeys([*job, *saved]) if saved.get(key) != job.get(key)]
    files = {"model": "the files of the model", "data": "the content of the data"}
    return [
        f"{files[key]} changed" if key in files else f"{key} was {show(saved.get(key))} and is {show(job.get(key))}"
        for key in changed
    ]


class GeneratedRows:
    """The finished rows of one job. output: the final file."""

    def __init__(self, config: GenerationConfig, job: Job) -> None:
        self.output = Path(config.data.output_path).expanduser().absolute()
        self.folder = Path(parts_folder(config)).expanduser().absolute()
        self.job: Job = json.loads(json.dumps(job))
        self.is_jsonl = self.output.suffix == ".jsonl"
        self.job_file = self.output.with_name(f"{self.output.name}.{JOB_FILE}")

    def is_complete(self) -> bool:
        """Whether the output has the job's responses. ValueError if it is of another job."""
        if not self.output.exists():
            return False
        try:
            saved = json.loads(self._saved_job())
        except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
            raise ValueError(f"data.output_path={self.output} exists; delete it, or set another") from error
        if changed := differences(saved, self.job):
            raise ValueError(
                f"data.output_path={self.output} has the responses of another command: {'; '.join(changed)}. Delete it, or set "
                "another data.output_path"
            )
        self._remove_parts()
        return True

    def _saved_job(self) -> bytes:
        if self.is_jsonl:
            return self.job_file.read_bytes()
        return (pq.read_schema(self.output).metadata or {})[JOB_METADATA]

    def open(self) -> None:
        """Begin or go on with the parts; hold the lock."""
        make_private_folder(self.folder)
        remove_temporary_files(self.folder)
        self.check_parts()
        atomic_write_json(self.folder / JOB_FILE, self.job)

    def finished(self) -> dict[int, dict[str, Any]]:
        """The rows of the parts, by number: the columns of `COLUMNS`."""
        parts = sorted(self.folder.glob("*.parquet"))
        try:
            return {row.pop(ROW): row for part in parts for row in pq.read_table(part).to_pylist()}
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.folder} cannot be read ({error}); delete it to start over") from error

    def check_parts(self) -> None:
        """ValueError if the parts are of another job."""
        job_file = self.folder / JOB_FILE
        if not any(self.folder.glob("*.parquet")):
            return
        try:
            saved = json.loads(job_file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{job_file} cannot be read ({error}); delete the folder to start over") from error
        if changed := differences(saved, self.job):
            raise ValueError(
                f"{self.folder} has finished batches of another command: {'; '.join(changed)}. Run that command to go on with it, "
                "delete the folder to start over, or set another data.output_path"
            )

    def add(self, rows: Sequence[int], columns: Mapping[str, Sequence[list[Any]]]) -> None:
        """Keep the responses of a finished batch."""
        arrays = {name: pa.array(values, COLUMNS[name]) for name, values in columns.items()}
        table = pa.table({ROW: pa.array(rows, pa.int64()), **arrays})
        with atomic_writer(self.folder / f"{min(rows):08d}-{max(rows):08d}.parquet") as file:
            pq.write_table(table, file)

    def finish(self, table: pa.Table) -> None:
        """Write the output. table: the rows of the data, in the order of their numbers."""
        finished = self.finished()
        for name, kind in COLUMNS.items():
            if finished and name not in next(iter(finished.values())):
                continue
            table = table.append_column(name, pa.array([finished[row][name] for row in range(len(table))], kind))
        if self.is_jsonl:
            atomic_write_json(self.job_file, self.job)
        metadata = {**(table.schema.metadata or {}), JOB_METADATA: json.dumps(self.job).encode()}
        with atomic_writer(self.output) as file:
            if self.is_jsonl:
                file.writelines(_json_lines(table))
            else:
                pq.write_table(table.replace_schema_metadata(metadata), file)
        self._remove_parts()

    def _remove_parts(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _json_lines(table: pa.Table) -> Iterator[bytes]:
    for batch in table.to_batches(max_chunksize=READ_ROWS):
        for row in batch.to_pylist():
            yield json.dumps(row, ensure_ascii=False, default=_as_text).encode() + b"\n"


def _as_text(value: Any) -> str:
    """A value of a parquet file that JSON does not have: bytes, dates."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def read_table(data_files: Sequence[Path], rows: Sequence[int]) -> pa.Table:
    """The given rows of the files, with all their columns. ValueError if they have a column that would be added."""
    tables = [
        pq.read_table(file) if file.suffix == ".parquet" else _table(list(iter_file(file))) for file in data_files
    ]
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    if taken := [name for name in COLUMNS if name in table.column_names]:
        raise ValueError(f"data.path has a column {taken[0]!r} already; remove or rename it")
    return table.take(pa.array(rows, pa.int64()))


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """With the columns of all rows; `Table.from_pylist` takes those of the first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})
