"""What a start does not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def install(folder: Path, package: str, distribution: str, files: dict[str, str]) -> None:
    """A package that says it is there."""
    (folder / package).mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (folder / package / name).write_text(text)
    information = folder / f"{distribution}-1.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.7\n")
    (information / "top_level.txt").write_text(f"{package}\n")


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    install(tmp_path, "sklearn", "scikit_learn", {"metrics.py": "def roc_curve(): ...\n"})
    install(tmp_path, "scipy", "scipy", {"optimize.py": "def linear_sum_assignment(costs): return costs + 1\n"})
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def test_packages_that_no_policy_needs_are_not_imported_but_can_be(packages: dict[str, str]) -> None:
    script = (
        "import sys, lockstep.models.loading\n"
        "import transformers.models.llama.modeling_llama\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('sklearn', 'scipy')]\n"
        "from transformers.generation import candidate_generator\n"
        "from transformers.utils import is_scipy_available, is_sklearn_available\n"
        "assert not candidate_generator.is_sklearn_available()\n"
        "assert is_sklearn_available() and is_scipy_available()\n"
        "import sklearn.metrics\n"
        "assert sklearn.metrics.roc_curve\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=packages)


def test_a_loss_of_transformers_imports_scipy_when_it_needs_it(packages: dict[str, str]) -> None:
    script = (
        "import sys, lockstep.models.loading\n"
        "from transformers.loss import loss_for_object_detection as loss\n"
        "assert 'scipy' not in sys.modules and loss.linear_sum_assignment(1) == 2 and 'scipy' in sys.modules\n"
        "loss.HungarianMatcher()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=packages)


@pytest.mark.parametrize("before", ["", "import scipy\n"])
def test_what_is_installed_is_looked_through_when_a_package_is_not_named_as_its_distribution(
    before: str, packages: dict[str, str]
) -> None:
    script = (
        f"{before}import importlib.metadata as metadata\n"
        "whole = metadata.packages_distributions()\n"
        "looks = []\n"
        "look = metadata.packages_distributions\n"
        "metadata.packages_distributions = lambda: looks.append(1) or look()\n"
        "import lockstep.models\n"
        "from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as found, _is_package_available\n"
        "assert not looks and metadata.packages_distributions() == whole\n"
        "looks.clear()\n"
        "assert found.get('scipy') == found['scipy'] == ['scipy'] and not looks\n"
        "assert found.get('sklearn') == ['scikit_learn'] and looks == [1]\n"
        "assert _is_package_available('sklearn', return_version=True) == (True, '1.7')\n"
        "assert found.get('nothing_of_the_kind', []) == [] and dict(found) == whole and looks == [1]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=packages)
