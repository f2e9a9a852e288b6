"""Lockstep: RL post-training of language models; trainer and rollout share one set of weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.api import History, TrainResult, train
    from lockstep.config.errors import ConfigError
    from lockstep.policy import Policy
    from lockstep.trainer.run.errors import RunError

__version__ = "0.1.0"
__all__ = ["ConfigError", "History", "Policy", "RunError", "TrainResult", "train"]

_MODULES = {
    "ConfigError": "lockstep.config.errors",
    "History": "lockstep.api",
    "Policy": "lockstep.policy",
    "RunError": "lockstep.trainer.run.errors",
    "TrainResult": "lockstep.api",
    "train": "lockstep.api",
}
"""Public name -> its module, which is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
