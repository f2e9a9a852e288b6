"""What a start does not import."""

import subprocess
import sys
from pathlib import Path


def test_scikit_learn_is_left_alone_and_stays_importable(tmp_path: Path) -> None:
    package = tmp_path / "sklearn"
    (package / "metrics").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "metrics" / "__init__.py").write_text("def roc_curve(): ...\n")
    (tmp_path / "scikit_learn-1.7.dist-info").mkdir()
    (tmp_path / "scikit_learn-1.7.dist-info" / "METADATA").write_text("Name: scikit-learn\nVersion: 1.7\n")
    (tmp_path / "scikit_learn-1.7.dist-info" / "top_level.txt").write_text("sklearn\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import lockstep.models.loading\n"
        "assert not [name for name in sys.modules if name.startswith('sklearn')]\n"
        "from transformers.generation import candidate_generator\n"
        "assert not candidate_generator.is_sklearn_available()\n"
        "from transformers.utils import is_sklearn_available\n"
        "import sklearn.metrics\n"
        "assert is_sklearn_available() and sklearn.metrics.roc_curve"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
