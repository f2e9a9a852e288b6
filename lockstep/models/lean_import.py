"""Import transformers without what no policy needs of it, which is seconds of a start."""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def import_lean() -> None:
    """Nothing is done where transformers is there already; scipy and scikit-learn are left out each where it is not there yet."""
    if "transformers" in sys.modules:
        return
    with _distributions_unread():
        if "scipy" not in sys.modules:  # for losses of detection, which import it when they are called
            _import_without("scipy", "transformers.loss.loss_utils")
            for name, module in list(sys.modules.items()):
                if name.startswith("transformers.loss."):
                    vars(module).setdefault("linear_sum_assignment", _linear_sum_assignment)
        if "sklearn" not in sys.modules:  # for a kind of decoding
            generator = _import_without("sklearn", "transformers.generation.candidate_generator")
            generator.is_sklearn_available = lambda: False


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


class _Distributions(dict[str, list[str]]):
    """The distributions of each package, for which the files of all that are installed must be looked through.

    That is done when a package is asked for whose distribution has another name, or that may be in several.
    """

    look_through = staticmethod(importlib.metadata.packages_distributions)

    def get(self, package: str, default: Any = None) -> Any:
        try:
            return self[package]
        except KeyError:
            return default

    def __missing__(self, package: str) -> list[str]:
        if self:
            raise KeyError(package)
        if not package.startswith("flash_attn") and _has_distribution(package):
            return [package]
        self.update(self.look_through())
        return self[package]


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def _distributions_unread() -> Iterator[None]:
    importlib.metadata.packages_distributions = _Distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _Distributions.look_through
