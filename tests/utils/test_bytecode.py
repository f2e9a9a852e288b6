import py_compile
import sys
from pathlib import Path

import pytest

from lockstep.utils.bytecode import how_to_compile, uncompiled


def test_a_package_without_bytecode_that_python_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "plain_package" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert uncompiled(["plain_package", "no_such_package"]) == []  # the next start writes it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert uncompiled(["plain_package", "no_such_package"]) == ["plain_package"]
    assert how_to_compile(["plain_package"]) == f"python -m compileall -q {source.parent}"
    py_compile.compile(str(source))
    assert uncompiled(["plain_package"]) == []
