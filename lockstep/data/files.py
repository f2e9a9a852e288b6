"""Read rows of parquet and jsonl files as Python dicts."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.config.data import ImageDataConfig
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.files import sha256_all

logger = logging.getLogger(__name__)

READ_ROWS = 1024
AUDIO_COLUMN = "audios"
TEXT_MODEL = "the model reads no images; give a vision-language model"


@dataclass(frozen=True)
class FileRow:
    """One row and its location, for error messages."""

    file: str
    number: int
    """Row number in the file, from 0."""
    columns: dict[str, Any]

    @property
    def location(self) -> str:
        return f"{self.file}, row {self.number}"


def read_rows(
    data_files: str | Path | Sequence[str | Path], max_samples: int = -1, draw_seed: int | None = None
) -> list[FileRow]:
    """The rows of all files in order, at most `max_samples` if that is not negative.

    data_files: what `data.train_files` may be: files, folders, datasets of the Hub, URLs.
    With `draw_seed` they are a random draw that depends only on the seed and the number of rows, else the first ones.
    """
    if max_samples < 0 or draw_seed is None:
        return _read_first(data_files, max_samples)
    return drawn(_read_first(data_files, -1), max_samples, draw_seed)


def drawn(rows: list[FileRow], max_samples: int, draw_seed: int | None) -> list[FileRow]:
    """At most `max_samples` of the rows if that is not negative: a random draw by the seed, else the first ones."""
    if max_samples < 0 or max_samples >= len(rows):
        return rows
    if draw_seed is None:
        return rows[:max_samples]
    chosen = np.random.default_rng(draw_seed).choice(len(rows), size=max_samples, replace=False)
    return [rows[i] for i in chosen]


def _read_first(data_files: str | Path | Sequence[str | Path], max_samples: int) -> list[FileRow]:
    files = local_data_files(data_files, "train", "data.train_files")
    if not files:
        raise ValueError("no data files; set data.train_files (data.val_files) to a parquet or jsonl file")
    rows: list[FileRow] = []
    for file in files:
        before = len(rows)
        for number, columns in enumerate(iter_file(file)):
            if 0 <= max_samples <= len(rows):
                return rows
            rows.append(FileRow(str(file), number, columns))
        if len(rows) == before:
            logger.warning("%s has no rows", file)
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))} has no rows; set other data.train_files (data.val_files)")
    return rows


def file_digests(files: Sequence[Path]) -> dict[str, str]:
    """Local file -> SHA-256 of its content."""
    return {str(file): digest for file, digest in sha256_all(files).items()}


def drop_none(struct: dict[str, Any] | None, keep: str | None = None) -> dict[str, Any]:
    """Drop null fields: parquet gives every row the fields of all rows, with null for absent ones."""
    return {name: value for name, value in (struct or {}).items() if value is not None or name == keep}


def media_columns(config: ImageDataConfig) -> tuple[str, ...]:
    return config.image_key, config.video_key, AUDIO_COLUMN


def refuse_media(
    files: Sequence[Path], key: str, config: ImageDataConfig, *, text_only: str | None, no_videos: str
) -> None:
    """ValueError if a row has media that are not read; other columns are not looked at.

    key: the config key of the files. text_only: why images are not read, and what to do; None if they are. no_videos: the same for
    videos; empty if they are read.
    """
    read = () if text_only else (config.image_key,) if no_videos else (config.image_key, config.video_key)
    refused = [name for name in media_columns(config) if name not in read]
    for file in files:
        for number, columns in enumerate(_iter_media(file, refused)):
            for name in refused:
                if columns.get(name):
                    problem = media_problem(name, config, text_only, no_videos)
                    raise ValueError(f"{key}: {FileRow(str(file), number, columns).location} {problem}")


def refuse_media_of(row: FileRow, config: ImageDataConfig, *, with_images: bool) -> None:
    """ValueError if a row has media that the model does not read; of a model that reads images, `RowImages` tells about videos."""
    for name in media_columns(config):
        if row.columns.get(name) and not (with_images and name in (config.image_key, config.video_key)):
            problem = media_problem(name, config, None if with_images else TEXT_MODEL)
            raise ValueError(f"{row.location} {problem}")


def media_problem(column: str, config: ImageDataConfig, text_only: str | None, no_videos: str = "") -> str:
    """What is wrong with a row that has the column. text_only, no_videos: as in `refuse_media`."""
    if column == config.image_key:
        return f"has {column!r}, but {text_only}, or remove the column"
    if column == config.video_key and not text_only:
        return f"has {column!r}, but {no_videos}; or remove the column"
    supported = "only text is" if text_only else "text, images and videos are"
    return f"has {column!r}: {supported} supported; remove the column"


def _iter_media(file: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The media columns of the rows, as far as the file may have some; files that cannot be read are reported elsewhere."""
    try:
        if file.suffix == ".parquet":
            reader = pq.ParquetFile(file)
            present = [name for name in names if name in reader.schema_arrow.names]
            for batch in reader.iter_batches(batch_size=16, columns=present) if present else ():
                yield from batch.to_pylist()
        elif any(f'"{name}"'.encode() in file.read_bytes() for name in names):
            yield from _iter_json(file)
    except (pa.ArrowInvalid, ValueError, OSError):
        return


def iter_file(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet, jsonl or json file; ValueError if it cannot be read."""
    if path.suffix == ".parquet":
        yield from _iter_parquet(path)
    else:
        yield from _iter_json(path)


def _iter_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=READ_ROWS):
            yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _iter_json(path: Path) -> Iterator[dict[str, Any]]:
    """One JSON object per line, or one list of objects."""
    with path.open(encoding="utf-8") as lines:
        is_list = lines.read(1) == "["
        lines.seek(0)
        numbered = enumerate(json.load(lines), 1) if is_list else _iter_lines(path, lines)
        for number, row in numbered:
            if not isinstance(row, dict):
                raise ValueError(f"{path}, entry {number}: a row must be a JSON object, not {type(row).__name__}")
            yield row


def _iter_lines(path: Path, lines: Any) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
