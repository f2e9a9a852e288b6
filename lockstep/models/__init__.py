"""Models of transformers, and what they compute with here."""

import sys
from importlib import import_module
from typing import Any

SPARED = {
    "scipy": "transformers.loss.loss_for_object_detection",
    "sklearn": "transformers.generation.candidate_generator",
}
"""Packages that transformers imports where they are installed, for one module each that no policy needs: seconds of a start."""


def _import_without(package: str, module: str) -> None:
    """To be found absent while that module is imported, and only then, a package is None in sys.modules."""
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        imported: Any = import_module(module)
        is_available = getattr(import_module("transformers.utils"), f"is_{package}_available")
        getattr(is_available, "cache_clear", lambda: None)()
        setattr(imported, f"is_{package}_available", lambda: False)  # what it has imported says so
    finally:
        del sys.modules[package]


if "transformers" not in sys.modules:
    for _package, _module in SPARED.items():
        if _package not in sys.modules:
            _import_without(_package, _module)
