"""Whether installed packages are compiled to bytecode; one that is not is compiled anew at every start."""

import importlib.util
import os
import sys
from collections.abc import Iterable

BIG = ("numpy", "sympy", "torch", "transformers")
"""What takes seconds to compile."""


def uncompiled(packages: Iterable[str] = BIG) -> list[str]:
    """Those of `packages` that are installed without bytecode, while Python may not write it either."""
    found = [spec for spec in map(importlib.util.find_spec, packages) if spec is not None]
    return [spec.name for spec in found if spec.origin is not None and _is_compiled_each_time(spec.origin)]


def _is_compiled_each_time(source: str) -> bool:
    may_write = not sys.dont_write_bytecode and os.access(os.path.dirname(source), os.W_OK)
    return not may_write and not os.path.exists(importlib.util.cache_from_source(source))


def how_to_compile(packages: Iterable[str]) -> str:
    """The command that compiles them for good."""
    origins = [spec.origin for spec in map(importlib.util.find_spec, packages) if spec is not None and spec.origin]
    return " ".join(["python -m compileall -q", *map(os.path.dirname, origins)])
