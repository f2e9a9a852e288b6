"""The registry class of every plug-in point: rejects duplicate names, suggests a name for an unknown one.

User code is given as `pkg.module:attr`, `pkg://pkg.module:attr` or `path/to/file.py:attr`; see `load_object`.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

USER_FILES: set[str] = set()
"""Files of user code that this process has loaded."""


class Registry(Generic[T]):
    """A named table of objects of one kind.

    kind:  what the entries are, for error messages ("advantage estimator").
    key:   the dotted config key that selects an entry, for error messages; None if there is none.
    names: also add the names of entries to this set, which config checks read.
    """

    def __init__(self, kind: str, key: str | None = None, names: set[str] | None = None) -> None:
        self.kind = kind
        self.key = key
        self._names = set() if names is None else names
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: register an object under `name`; registering a second one under the same name is an error."""

        def add(obj: T) -> T:
            if name in self._entries and self._entries[name] is not obj:
                raise ValueError(f"{self.kind} {name!r} is already registered: {self._entries[name]!r}")
            self._entries[name] = obj
            self._names.add(name)
            return obj

        return add

    def get(self, name: str) -> T:
        """The entry `name`, or the user's object if `name` is `module:attr` or `file.py:attr`."""
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            try:
                return load_object(name)
            except (ValueError, ImportError) as error:
                raise ValueError(f"{self.key}={name}: {error}" if self.key else str(error)) from error
        raise ValueError(self.explain_unknown(name))

    def explain_unknown(self, name: str) -> str:
        where = f"{self.key}={name}" if self.key else repr(name)
        return f"{where}: no such {self.kind}. {did_you_mean(name, self._entries)}"

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def did_you_mean(name: str, known: Any) -> str:
    """A message with the closest known name, if any, and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}Known: {', '.join(names)}."


def defined_at(function: Any) -> str:
    """`name (file:line)` of a user's function, for error messages; the name alone if it has no source file."""
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def check_signature(function: Callable[..., Any], arguments: Collection[str]) -> None:
    """ValueError if a user's function cannot be called with these keyword arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        name, _, place = defined_at(function).partition(" ")
        raise ValueError(
            f"{f'{name}{signature} {place}'.rstrip()} cannot be called with ({', '.join(arguments)}): {error}. It must accept "
            "these parameters by name, or **kwargs"
        ) from error


def describe(value: Any) -> str:
    """What a user's function returned, in a few words: types and tensor shapes."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of ({', '.join(describe(item) for item in value)})"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def load_object(reference: str, default_attr: str | None = None) -> Any:
    """Load `pkg.module:attr`, `pkg://pkg.module:attr` or `path/to/file.py:attr`.

    Without `:attr`, load the attribute `default_attr`.
    """
    target = reference.removeprefix("pkg://")
    module_ref, _, attr = target.rpartition(":") if ":" in target else (target, "", default_attr or "")
    if not attr:
        raise ValueError(f"{reference!r} names no attribute; write it as {reference}:name")
    module = _load_module(module_ref)
    if (file := getattr(module, "__file__", None)) and not module.__name__.startswith(f"{__package__}."):
        USER_FILES.add(file)
    if not hasattr(module, attr):
        own = getattr(module, "__name__", None)
        public = [n for n, o in vars(module).items() if not n.startswith("_") and getattr(o, "__module__", own) == own]
        raise ValueError(f"{module_ref!r} has no attribute {attr!r}. {did_you_mean(attr, public)}")
    return getattr(module, attr)


def _load_module(module_ref: str) -> Any:
    if not module_ref.endswith(".py"):
        try:
            return importlib.import_module(module_ref)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_ref}.".startswith(f"{error.name}."):
                raise ValueError(_import_problem(module_ref, error)) from error
            raise
        except Exception as error:
            raise ValueError(_import_problem(module_ref, error)) from error
    path = Path(module_ref).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"no file {path}")
    # the modification time is part of the name, so an edited file is loaded again
    name = f"lockstep_user_{path.stem}_{abs(hash((str(path), path.stat().st_mtime_ns))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(_import_problem(str(path), error)) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_problem(module: str, error: Exception) -> str:
    """Where the user's code raised `error` while it was imported, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or module}, line {error.lineno}: SyntaxError: {error.msg}"
    ours = ("<frozen", __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    places = [f"{frame.filename}, line {frame.lineno}" for frame in frames if "site-packages" not in frame.filename]
    where = f"{places[-1]}: " if places else f"importing {module}: "
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
