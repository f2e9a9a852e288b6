"""Working directory, module path, environment variables and user code of the controller, to apply in other processes of a run."""

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from lockstep.registry import UserCode

logger = logging.getLogger(__name__)

PROCESS_VARIABLES = ("RAY_", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", "OLDPWD", "PWD", "SHLVL", "_")
"""Prefixes of variables that Ray or the shell sets per process."""


ALWAYS_SENT = ("CUBLAS_WORKSPACE_CONFIG",)
"""Environment variables that a program sets for its workers; a cluster that runs already has its own for all others."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """
    working_dir: base of relative paths.
    module_path: `sys.path`.
    variables:   environment variables to set.
    user_code:   with each entry and object pickled, which can be loaded once `sys.path` is set.
    """

    working_dir: str
    module_path: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    user_code: UserCode = field(default_factory=UserCode)

    @classmethod
    def capture(cls, with_variables: bool = False) -> Self:
        """The environment of this process."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PROCESS_VARIABLES)}
        own = UserCode.capture()
        code = UserCode(own.files, _pickled(own.entries), _pickled(own.objects))
        if not with_variables:
            kept = {name: kept[name] for name in ALWAYS_SENT if name in kept}
        return cls(os.getcwd(), list(sys.path), kept, code)

    def apply(self, change_dir: bool = True) -> None:
        """Apply it to this process. change_dir: also change to the working directory, if this machine has it."""
        os.environ.update(self.variables)
        own = set(sys.path)
        missing = [entry for entry in self.module_path if entry not in own and (not entry or os.path.exists(entry))]
        sys.path[:] = [*missing, *sys.path] if change_dir else [*sys.path, *missing]
        if change_dir:
            try:
                os.chdir(self.working_dir)
            except OSError as error:
                logger.warning("relative paths are resolved from %s: %s", os.getcwd(), error)
        code = self.user_code
        UserCode(code.files, _unpickled(code.entries), _unpickled(code.objects)).apply()


def _pickled(items: dict[Any, Any]) -> dict[Any, bytes]:
    """Each value by itself, so that one that cannot be loaded elsewhere does not prevent the others."""
    pickled = {}
    for name, item in items.items():
        try:
            pickled[name] = cloudpickle.dumps(item)
        except Exception as error:
            what = name if isinstance(name, str) else " ".join(name)
            raise ValueError(f"{what} cannot be sent to other processes: {error}") from error
    return pickled


def _unpickled(items: dict[Any, bytes]) -> dict[Any, Any]:
    found = {}
    for name, item in items.items():
        try:
            found[name] = cloudpickle.loads(item)
        except ImportError as error:
            logger.warning("%s is not available on this machine: %s", name, error)
    return found
