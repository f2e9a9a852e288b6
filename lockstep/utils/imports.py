"""Imports of torch and transformers without garbage collections, which take an eighth of their time. Imports no torch."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Imported modules stay alive: collect nothing until they are loaded, and do not scan them later.

    No-op if transformers is already imported: other objects, such as models of an earlier run, must stay collectable.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
