"""The real model that some golden cases were made with: a local folder, where there is one."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("SMOLLM2_DIR", "smollm2-135m-instruct"))
"""SmolLM2-135M-Instruct as Hugging Face files."""

needs_smollm2 = pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(), reason="set SMOLLM2_DIR to a folder of SmolLM2-135M-Instruct"
)
