"""Imports without garbage collections."""

import gc
import sys
from types import ModuleType
from unittest.mock import Mock

import pytest

from lockstep.utils.imports import without_collections


def test_imported_objects_are_frozen_and_collections_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(gc, "freeze", freeze := Mock())
    with pytest.raises(ImportError), without_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    freeze.assert_called_once_with()


def test_nothing_is_frozen_in_a_process_that_may_hold_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(gc, "freeze", freeze := Mock())
    with without_collections():
        assert gc.isenabled()
    freeze.assert_not_called()
