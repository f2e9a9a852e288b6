"""What a start does not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "package, distribution, module",
    [
        ("sklearn", "scikit_learn", "transformers.generation.candidate_generator"),
        ("scipy", "scipy", "transformers.loss.loss_for_object_detection"),
    ],
)
def test_a_package_that_no_policy_needs_is_not_imported_but_can_be(
    tmp_path: Path, package: str, distribution: str, module: str
) -> None:
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '1.7'\n")
    information = tmp_path / f"{distribution}-1.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.7\n")
    (information / "top_level.txt").write_text(f"{package}\n")
    script = (
        "import sys, lockstep.models\n"
        f"assert not [name for name in sys.modules if name.startswith('{package}')]\n"
        f"import {module} as module\n"
        f"assert not module.is_{package}_available()\n"
        f"from transformers.utils import is_{package}_available\n"
        f"assert is_{package}_available()\n"
        f"import {package}\n"
        f"assert {package}.__version__ == '1.7'\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": path})
