"""A BM25 index over the passages of a corpus, built once and kept in a folder.

corpus files ─► passages.arrow, BM25 index ─► memory-mapped by every process that searches
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import pyarrow as pa

from lockstep.data.files import iter_file
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.fs import default_cache

logger = logging.getLogger(__name__)

PASSAGES = "passages.arrow"
PASSAGES_PER_BATCH = 10_000


class PassageIndex:
    """corpus: files with `contents` (the title in the first line), or with `title` and `text`."""

    def __init__(self, corpus: str | Sequence[str], folder: str | None = None) -> None:
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise ValueError("a local index needs the package bm25s: pip install 'lockstep-rl[search]'") from error
        files = local_data_files(corpus, "train", "config.corpus")
        place = Path(folder).expanduser() if folder else default_cache() / "search" / _digest(files)
        place.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{place}.lock"):
            if not _is_of(place, files):
                _check_replaceable(place)
                building = place.with_name(f"{place.name}.building")
                try:
                    _build(files, building)
                    shutil.rmtree(place, ignore_errors=True)
                    building.replace(place)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
        self._index = bm25s.BM25.load(place, mmap=True, show_progress=False)
        self._passages = pa.ipc.open_file(pa.memory_map(str(place / PASSAGES))).read_all()["contents"]

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, topk: int) -> list[str]:
        """The best passages that share a word with the query, best first."""
        import bm25s

        tokens = bm25s.tokenize(query, stopwords="en", return_ids=False, show_progress=False)
        known = [[token for token in tokens[0] if token in self._index.vocab_dict]]
        if not known[0]:
            return []
        found, scores = self._index.retrieve(known, k=min(topk, len(self)), show_progress=False)
        return [self._passages[int(number)].as_py() for number, score in zip(found[0], scores[0]) if score > 0]


def _check_replaceable(place: Path) -> None:
    """ValueError if the folder has something else than an older index, which would be lost."""
    is_empty = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    if not is_empty and not (place / PASSAGES).is_file():
        raise ValueError(f"config.index_dir={place}: is not empty and no index; give a new folder")


def _build(files: Sequence[Path], building: Path) -> None:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    logger.info("indexing %s for the search tool", ", ".join(map(str, files)))
    shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
    building.mkdir(parents=True)
    schema = pa.schema({"contents": pa.large_string()})
    with pa.OSFile(str(building / PASSAGES), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in _batches(files):
            writer.write_batch(pa.record_batch({"contents": pa.array(batch, pa.large_string())}, schema))
    passages = pa.ipc.open_file(pa.memory_map(str(building / PASSAGES))).read_all()["contents"]
    if not len(passages):
        raise ValueError(f"config.corpus={[str(file) for file in files]}: no passages")
    index = bm25s.BM25()
    tokens = bm25s.tokenize(passages.to_pylist(), stopwords="en", show_progress=False)
    index.index(tokens, show_progress=False)
    index.save(building, show_progress=False)
    (building / "corpus.json").write_text(json.dumps(_stamps(files)))
    logger.info("indexed %d passages", len(passages))


def _batches(files: Sequence[Path]) -> Iterator[list[str]]:
    batch: list[str] = []
    for file in files:
        for number, row in enumerate(iter_file(file)):
            batch.append(_contents_of(row, file, number))
            if len(batch) == PASSAGES_PER_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _contents_of(row: Mapping[str, Any], file: Path, number: int) -> str:
    if isinstance(row.get("contents"), str):
        return str(row["contents"])
    if isinstance(row.get("text"), str):
        return f"{row.get('title') or ''}\n{row['text']}"
    raise ValueError(
        f"config.corpus={file}, row {number}: has neither `contents` nor `text` (columns: {', '.join(row)})"
    )


def _stamps(files: Sequence[Path]) -> list[list[Any]]:
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(json.dumps([str(file.resolve()) for file in files]).encode()).hexdigest()[:16]


def _is_of(place: Path, files: Sequence[Path]) -> bool:
    """Whether the folder has the index of these files as they are now."""
    stamp = place / "corpus.json"
    return stamp.is_file() and json.loads(stamp.read_text()) == _stamps(files)
