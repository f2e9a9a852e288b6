"""verl.utils.import_utils"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from lockstep.registry import load_object


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import modules by name, for what importing them registers."""
    for module in [external_libs] if isinstance(external_libs, str) else external_libs or ():
        importlib.import_module(module)


def load_extern_type(file_path: str | None, type_name: str) -> Any:
    """A class or function from a `.py` file, or from `pkg://module`; None without a path."""
    return None if not file_path else load_object(file_path, type_name)


load_extern_object = load_extern_type


def is_vllm_available() -> bool:
    return importlib.util.find_spec("vllm") is not None


def is_sglang_available() -> bool:
    return importlib.util.find_spec("sglang") is not None


def is_megatron_core_available() -> bool:
    return importlib.util.find_spec("megatron") is not None
