"""Make torchvision importable if its compiled operators do not load: a wheel for CUDA next to torch for CPU.

vLLM's models that read images need its transforms, which are written in Python. `python tests/repair_torchvision.py` changes the
torchvision of that interpreter's environment.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

OPERATORS = """
if not _has_ops():  # names alone, for which fake kernels are registered on import
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
IMPORT = [sys.executable, "-c", "import torchvision"]


def main() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return print("torchvision is not installed: the tests that need it are skipped")
    if subprocess.run(IMPORT, stderr=subprocess.DEVNULL).returncode != 0:
        with (Path(spec.origin).parent / "extension.py").open("a") as file:
            file.write(OPERATORS)
        subprocess.run(IMPORT, check=True)


if __name__ == "__main__":
    main()
