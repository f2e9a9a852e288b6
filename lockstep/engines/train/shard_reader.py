"""Read the shards of a checkpoint as data: a planted pickle is refused, with the name of its file, and never runs.

torch.distributed.checkpoint describes the shards in a pickled `.metadata`; the unpickler here knows its classes and nothing else.
Shards are tensors, which torch loads with `weights_only=True`; entries that are not tensors are refused.
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import _get_layout

# a single process without a process group is a supported case
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

METADATA = ".metadata"
DAMAGE = (RuntimeError, EOFError, AttributeError, ValueError, LookupError, TypeError, AssertionError)
"""What torch raises for a damaged file, apart from UnpicklingError."""

_RECORDS = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    filesystem._StorageInfo,
)
"""The classes whose instances have state in the pickle."""


def _path(*parts: str) -> str:
    """A path of a pickle as text."""
    return "/".join(parts)


_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__name__): cls for cls in (*_RECORDS, metadata._MEM_FORMAT_ENCODING, torch.Size, _get_layout)
}
# a path is pickled under the module that defined it, which depends on the Python version
_CLASSES |= {(module, "PosixPath"): _path for module in ("pathlib", "pathlib._local")}
_CLASSES |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _MetadataUnpickler(pickle._Unpickler):
    """Knows the classes of a `.metadata` file. State is set on instances of the records only, never on a class."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed in checkpoint metadata")
        return _CLASSES[module, name]

    def load_build(self) -> None:
        target, state = self.stack[-2:]  # type: ignore[attr-defined]
        if type(target) not in _RECORDS or not (isinstance(state, dict) or hasattr(type(target), "__setstate__")):
            raise pickle.UnpicklingError(f"it sets the state of {target!r}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class ShardReader(dcp.FileSystemReader):
    """Reads the shards in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._found: metadata.Metadata | None = None

    def read_metadata(self) -> metadata.Metadata:  # takes no rank: ranks have no own metadata
        if self._found is None:
            self._found = self._read_metadata(self.folder / METADATA)
        self._found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._found

    def _read_metadata(self, file: Path) -> metadata.Metadata:
        try:
            with open(file, "rb") as stream:
                found = _MetadataUnpickler(stream).load()
            if not isinstance(found, metadata.Metadata):
                raise TypeError(f"it holds a {type(found).__name__}")
            paths = [info.relative_path for info in found.storage_data.values()]
            if strange := [path for path in paths if path in ("", "..") or Path(path).name != path]:
                raise ValueError(f"it refers to {strange[0]!r}, a file outside its folder")
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise ValueError(f"{file} is not the metadata of a checkpoint: {error}") from error
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.storage_index not in self.storage_data:
                raise ValueError(f"{self.folder / METADATA} does not say where {item.storage_index.fqn} is")
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except (*DAMAGE, pickle.UnpicklingError) as error:
                is_pickle = isinstance(error, pickle.UnpicklingError)
                reason = "it holds a pickle of something else than a tensor" if is_pickle else str(error).split("\n")[0]
                raise ValueError(f"{self.folder / name} is not a shard of the checkpoint: {reason}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Loads tensors only: the default planner unpickles other entries."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


class ShardTensors:
    """The tensors of a checkpoint, read whole and one at a time by a single process, whatever number of ranks wrote them.

    part: the section of the state whose tensors these are.
    """

    def __init__(self, folder: Path, part: str = "model") -> None:
        self._reader = ShardReader(folder)
        self._part = part
        entries = self._reader.read_metadata().state_dict_metadata
        self.entries: dict[str, metadata.TensorStorageMetadata] = {}
        for name, entry in entries.items():
            section, _, rest = name.partition(".")
            if section == part and isinstance(entry, metadata.TensorStorageMetadata):
                self.entries[rest] = entry

    def read(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with plain_errors():
            state = {f"{self._part}.{name}": tensor}
            dcp.load(state, storage_reader=self._reader, planner=TensorPlanner(), no_dist=True)
        return tensor


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first rank's own error instead of the CheckpointException around it, which is a BaseException."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error
