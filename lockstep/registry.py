"""Plug-in points: the registry class, and how user code that a config key names is found.

A name in the config is one of

    name                                              registered with a decorator
    pkg.module:attr, pkg://pkg.module:attr            imported
    path/to/file.py:attr                              loaded from the file
    python://name                                     an object passed from Python; see `ObjectReferences`

`UserCode` carries what a process has registered to the processes that Ray starts.
"""

import difflib
import importlib
import importlib.util
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

USER_MODULE = "lockstep_user_"
"""Prefix of the modules that are loaded from files; other processes cannot import them by name."""
OBJECT = "python://"
"""Prefix of references to objects of this program."""

USER_FILES: set[str] = set()
"""Files of user code that this process has loaded."""
_objects: dict[str, Any] = {}
"""`python://name` -> object."""
_received: dict[tuple[str, str], Any] = {}
"""(kind, name) -> entry that the controller had registered."""


class Registry(Generic[T]):
    """A named table of objects of one kind.

    kind:  what the entries are, for error messages ("advantage estimator").
    key:   the dotted config key that selects an entry, for error messages; None if there is none.
    names: also add the names of entries to this set, which config checks read.
    """

    instances: ClassVar[list["Registry[Any]"]] = []

    def __init__(self, kind: str, key: str | None = None, names: set[str] | None = None) -> None:
        self.kind = kind
        self.key = key
        self._names = set() if names is None else names
        self._entries: dict[str, T] = {}
        self.instances.append(self)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: register an object under `name`; registering a second one under the same name is an error."""

        def add(obj: T) -> T:
            if name in self._entries and self._entries[name] is not obj:
                raise ValueError(f"{self.kind} {name!r} is already registered: {self._entries[name]!r}")
            self._entries[name] = obj
            self._names.add(name)
            return obj

        return add

    def forget(self, module: str) -> None:
        """Remove the entries of modules whose name begins with `module`: a file that is loaded again registers them anew."""
        for name in [name for name, entry in self._entries.items() if _module_of(entry).startswith(module)]:
            del self._entries[name]

    def get(self, name: str) -> T:
        """The entry `name`, or the user's object if `name` is a reference such as `file.py:attr`."""
        if (entry := self._table.get(name)) is not None:
            return entry
        if ":" in name:
            return load_plugin(self.key, name)
        raise ValueError(self.explain_unknown(name))

    def explain_unknown(self, name: str) -> str:
        where = f"{self.key}={name}" if self.key else repr(name)
        return f"{where}: no such {self.kind}. {did_you_mean(name, self.known)}"

    def __contains__(self, name: str) -> bool:
        return name in self.known

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.known))

    @property
    def known(self) -> set[str]:
        return set(self._table)

    @property
    def _table(self) -> dict[str, T]:
        received = {name: entry for (kind, name), entry in _received.items() if kind == self.kind}
        return received | self._entries if received else self._entries


def find_registered(kind: str, name: str) -> Any:
    """The entry `name` of a registry that is loaded, or received from the controller; None if there is none."""
    own = (registry.get(name) for registry in Registry.instances if registry.kind == kind and name in registry)
    return next(own, _received.get((kind, name)))


@dataclass(frozen=True)
class UserCode:
    """What a program has registered from outside the package.

    files:   Python files that registered something when they were loaded, and will do so again.
    entries: (kind, name) -> other entries. Pickle by value what belongs to `__main__`, as cloudpickle does.
    objects: the objects that were passed from Python, by reference.
    """

    files: tuple[str, ...] = ()
    entries: dict[tuple[str, str], Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls) -> Self:
        """The user code of this process."""
        found = [
            (registry.kind, name, entry)
            for registry in Registry.instances
            for name, entry in registry._table.items()
            if not _module_of(entry).startswith("lockstep.")
        ]
        files = {
            str(sys.modules[module].__file__): None
            for _, _, entry in found
            if (module := _module_of(entry)).startswith(USER_MODULE) and module in sys.modules
        }
        entries = {(kind, name): entry for kind, name, entry in found if not _module_of(entry).startswith(USER_MODULE)}
        return cls(tuple(files), entries, dict(_objects))

    def apply(self) -> None:
        """Make it known in this process."""
        for file in self.files:
            if Path(file).is_file():
                load_module(file)
            else:
                logger.warning("%s is not on this machine; what it registers is unknown here", file)
        _received.update(self.entries)
        _objects.update(self.objects)


class ObjectReferences:
    """References to objects of this program for config keys, valid inside the context."""

    def __init__(self) -> None:
        self._own: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for reference in self._own:
            del _objects[reference]

    def add(self, item: Any) -> str:
        """`python://name` of the object, with its own name so that a resumed run has the same config."""
        name = getattr(item, "__name__", None) or type(item).__name__
        reference, number = f"{OBJECT}{name}", 1
        while reference in _objects:
            number += 1
            reference = f"{OBJECT}{name}{number}"
        _objects[reference] = item
        self._own.append(reference)
        return reference


def _module_of(entry: Any) -> str:
    if isinstance(entry, dict):  # the functions of a dispatch mode: the user's module if one of them has it
        modules = sorted(map(_module_of, entry.values()), key=lambda name: name.startswith("lockstep."))
        return modules[0] if modules else ""
    return getattr(getattr(entry, "func", entry), "__module__", None) or ""


def did_you_mean(name: str, known: Any) -> str:
    """A message with the closest known name, if any, and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}Known: {', '.join(names) or 'none'}."


def no_such_name(name: str, known: Any, what: str = "name", named: str = "function") -> str:
    """The message about an unknown name in the config. named: what would be named in a file."""
    if name.endswith(".py"):
        return f"names a file; add the {named}: {name}:{named.upper()}"
    return f"no such {what}. {did_you_mean(name, known)}"


def name_from_data(column: str, name: Any, kind: str, known: Collection[str], remedy: str) -> str:
    """The name that a row has in `column`; ValueError unless the config or a registry defines it.

    Every name that comes from data goes through here: rows are data, so what they name is looked up and never imported.

    kind: what it names, for the message ("agent loop"). remedy: which config key defines more names.
    """
    if isinstance(name, str) and name in known:
        return name
    raise ValueError(
        f"{column}={name!r:.200}: no such {kind}. {did_you_mean(str(name), known)} A row may only use these names; {remedy}"
    )


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


def load_plugin(key: str | None, reference: str, name: str | None = None, base: type | None = None) -> Any:
    """The user's object that a config key names; ValueError with the key if there is none or it is of the wrong kind.

    name: the attribute, if the reference has none. base: the class that it must be a subclass of; None for any callable.
    """
    where = f"{key}={reference}" + (f", name={name}" if name else "") if key else reference
    try:
        found = load_object(reference, name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    is_of_kind = callable(found) if base is None else isinstance(found, type) and issubclass(found, base)
    if not is_of_kind:
        kind = "a function or a class" if base is None else f"a subclass of {base.__module__}.{base.__qualname__}"
        raise ValueError(f"{where}: must be {kind}, not {getattr(found, '__qualname__', repr(found))}")
    return found


def load_object(reference: str, default_attr: str | None = None) -> Any:
    """Load a reference (see the module's docstring); without `:attr`, its attribute `default_attr`."""
    if reference.startswith(OBJECT):
        if reference not in _objects:
            raise ValueError(
                "this object belongs to the Python program that started the run; pass it to lockstep.train"
            )
        return _objects[reference]
    target = reference.removeprefix("pkg://")
    module_ref, _, attr = target.rpartition(":") if ":" in target else (target, "", default_attr or "")
    if not attr:
        raise ValueError(f"{reference!r} names no attribute; write it as {reference}:name")
    module = load_module(module_ref)
    if (file := getattr(module, "__file__", None)) and not module.__name__.startswith(f"{__package__}."):
        USER_FILES.add(file)
    if not hasattr(module, attr):
        own = getattr(module, "__name__", None)
        public = [n for n, o in vars(module).items() if not n.startswith("_") and getattr(o, "__module__", own) == own]
        functions = [name for name in public if callable(getattr(module, name))]
        hint = f" Write {reference}:{functions[0]} to use it." if ":" not in target and len(functions) == 1 else ""
        raise ValueError(f"{module_ref!r} has no attribute {attr!r}. {did_you_mean(attr, public)}{hint}")
    return getattr(module, attr)


_loading = threading.RLock()
"""Held while a file is loaded: another thread must not get a module that is half executed."""


def load_module(module_ref: str) -> Any:
    """Import `pkg.module`, or load `path/to/file.py`; ValueError if there is none or its code fails, unless memory is short."""
    if not module_ref.endswith(".py"):
        try:
            return importlib.import_module(module_ref)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(_import_problem(module_ref, error)) from error
    path = Path(module_ref).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"no file {path}")
    with _loading:
        return _load_file(path)


def _load_file(path: Path) -> Any:
    # the modification time is part of the name, so an edited file is loaded again
    file = f"{USER_MODULE}{path.stem}_{abs(hash(str(path))):x}_"
    name = f"{file}{path.stat().st_mtime_ns:x}"
    if name in sys.modules:
        return sys.modules[name]
    for registry in Registry.instances:
        registry.forget(file)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            raise
        raise ValueError(_import_problem(str(path), error)) from error
    return module


def _import_problem(module: str, error: Exception) -> str:
    """Where the user's code raised `error` while it was imported, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or module}, line {error.lineno}: SyntaxError: {error.msg}"
    ours = ("<frozen", __file__, importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    places = [f"{frame.filename}, line {frame.lineno}" for frame in frames if "site-packages" not in frame.filename]
    message = " ".join(str(error).split())
    return f"{places[-1]}: {type(error).__name__}: {message}" if places else message
