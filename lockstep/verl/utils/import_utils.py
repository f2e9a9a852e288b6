"""verl.utils.import_utils"""

import importlib
import importlib.util
from collections.abc import Sequence
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
    if (reference.endswith(".py") or "/" in reference) and not Path(reference).expanduser().is_file():
        raise FileNotFoundError(f"no file {module_path}")
    return reference


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """The same; None without a path."""
    return None if not file_path or not type_name else load_extern_object(file_path, type_name)


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
