"""verl.utils.import_utils"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.registry import load_module


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import modules by name, for what importing them registers."""
    for module in [external_libs] if isinstance(external_libs, str) else external_libs or ():
        importlib.import_module(module)


def load_extern_object(module_path: str, object_name: str) -> Any:
    """A class or function from a `.py` file, or from `pkg://module`; FileNotFoundError or AttributeError without one."""
    module = load_module(_reference(module_path))
    if not hasattr(module, object_name):
        raise AttributeError(f"{module_path} has no attribute {object_name!r}")
    return getattr(module, object_name)


def _reference(module_path: str) -> str:
    reference = module_path.removeprefix("pkg://").removeprefix("file://")
    if reference.endswith(".py") and not Path(reference).expanduser().is_file():
        raise FileNotFoundError(f"no file {module_path}")
    return reference


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """The same; None without a path."""
    return None if not file_path or not type_name else load_extern_object(file_path, type_name)


def import_external_lib(external_lib: str) -> None:
    import_external_libs(external_lib)


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """Decorator: a DeprecationWarning at each call of the function or construction of the class."""

    def mark(obj: Any) -> Any:
        target: Any = vars(obj).get("__init__", object.__init__) if isinstance(obj, type) else obj

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            hint = f"; use {replacement}" if replacement else ""
            warnings.warn(f"{obj.__qualname__} is deprecated{hint}", DeprecationWarning, stacklevel=2)
            return target(*args, **kwargs)

        if not isinstance(obj, type):
            return call
        setattr(obj, "__init__", call)  # noqa: B010 - mypy has no types for this assignment
        return obj

    return mark


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_vllm_available() -> bool:
    return _is_installed("vllm")


def is_sglang_available() -> bool:
    return _is_installed("sglang")


def is_megatron_core_available() -> bool:
    return _is_installed("megatron")


def is_nvtx_available() -> bool:
    return _is_installed("nvtx")


def is_trl_available() -> bool:
    return _is_installed("trl")
