"""Models of transformers, and what they compute with here."""

import sys
from importlib import import_module
from typing import Any


def _import_without(package: str, module: str) -> Any:
    """The module, imported while the package is found absent, which it is where sys.modules has None."""
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        imported = import_module(module)
        is_available = getattr(import_module("transformers.utils"), f"is_{package}_available")
        getattr(is_available, "cache_clear", lambda: None)()
    finally:
        del sys.modules[package]
    return imported


def _linear_sum_assignment(*args: Any, **options: Any) -> Any:
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped,unused-ignore]

    return linear_sum_assignment(*args, **options)


# transformers imports scipy and scikit-learn, where they are installed, for losses and a kind of decoding that no policy uses:
# seconds of a start. The losses import it when they are called.
_present = set(sys.modules)
if not {"transformers", "scipy"} & _present:
    _import_without("scipy", "transformers.loss.loss_utils")
    for _name, _loss in list(sys.modules.items()):
        if _name.startswith("transformers.loss."):
            vars(_loss).setdefault("linear_sum_assignment", _linear_sum_assignment)
if not {"transformers", "sklearn"} & _present:
    _import_without("sklearn", "transformers.generation.candidate_generator").is_sklearn_available = lambda: False
