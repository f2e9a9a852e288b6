"""What a program finds around itself: working directory, module path, environment. For processes that Ray starts elsewhere."""

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Self

logger = logging.getLogger(__name__)

OF_THE_PROCESS = ("RAY_", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", "OLDPWD", "PWD", "SHLVL", "_")
"""Beginnings of the variables that Ray or the shell set for one process."""


@dataclass(frozen=True)
class Surroundings:
    """working_dir: relative paths start there. module_path: `sys.path`. environment: variables, or none where those of the
    machine hold."""

    working_dir: str
    module_path: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, with_environment: bool = False) -> Self:
        """Those of this process."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_PROCESS)}
        return cls(os.getcwd(), list(sys.path), kept if with_environment else {})

    def adopt(self, move: bool = True) -> None:
        """Make this process see them. move: also go to the working directory, where this machine has it."""
        os.environ.update(self.environment)
        own = set(sys.path)
        missing = [entry for entry in self.module_path if entry not in own and (not entry or os.path.exists(entry))]
        sys.path[:] = [*missing, *sys.path] if move else [*sys.path, *missing]
        if not move:
            return
        try:
            os.chdir(self.working_dir)
        except OSError as error:
            logger.warning("relative paths start at %s here: %s", os.getcwd(), error)
