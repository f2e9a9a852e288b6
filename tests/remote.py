"""A file system in memory, `faulty://`, whose operations tests can let fail, wait or lie."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Fault = Callable[[str, str], Any]
"""Called with the operation and path before it is done; may raise. What it returns, unless None, is the operation's result, or the
content that is written instead."""


class FaultyFileSystem(MemoryFileSystem):
    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    planted: ClassVar[list[Fault]] = []

    def fault(self, operation: str, path: str) -> Any:
        return self.planted[-1](operation, path) if self.planted else None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        planted = self.fault("ls", path)
        return super().ls(path, detail=detail, **kwargs) if planted is None else planted

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        planted = self.fault("cat", path)
        return bytes(super().cat_file(path, start, end, **kwargs) if planted is None else planted)

    def get_file(self, rpath: str, lpath: Any, **kwargs: Any) -> None:
        self.fault("get", rpath)
        super().get_file(rpath, lpath, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        planted = self.fault("put", rpath)
        if planted is None:
            super().put_file(lpath, rpath, **kwargs)
        else:
            super().pipe_file(rpath, planted)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        planted = self.fault("pipe", path)
        super().pipe_file(path, value if planted is None else planted, **kwargs)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.fault("rm", str(path))
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The fault inside the block."""
    FaultyFileSystem.planted.append(fault)
    try:
        yield
    finally:
        FaultyFileSystem.planted.remove(fault)


def emptied() -> None:
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.planted.clear()
