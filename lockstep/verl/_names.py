"""How the packages of `lockstep.verl` find their names: imported on first use, or refused with what to use instead."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "lockstep.verl"
RESOLVER = "lockstep.default"
"""Name of the interpolation `${lockstep.default:CONFIG,KEY}`."""

_MEGATRON = (
    "strategy=megatron selects lockstep.engines.train.megatron, which builds, loads and saves its models itself; use the classes "
    "of {0}.workers.megatron_workers and {0}.workers.config"
)
_ENGINE = (
    "the worker owns its training engine; choose the loss with actor_rollout_ref.actor.policy_loss.loss_mode "
    "({0}.trainer.ppo.core_algos.register_policy_loss), or subclass {0}.workers.fsdp_workers.ActorRolloutRefWorker"
)
_ROLLOUT = "the rollout engine is chosen by actor_rollout_ref.rollout.name; see lockstep.engines.rollout.rollout_engine"
_SHARDING = (
    "weights reach the rollout through lockstep.weight_sync; FSDP2 is applied by lockstep.engines.train.fsdp.FsdpEngine"
)
_PATCH = (
    "nothing has to be patched: packed rows and Ulysses are part of the worker "
    "(actor_rollout_ref.actor.ulysses_sequence_parallel_size)"
)
_GENERATION = "use {0}.trainer.main_generation (`lockstep generate`), which generates in the program's own workers"
_REWARD_LOOP = (
    "the run scores batches with the manager of reward_model.reward_manager; derive yours from RewardManagerBase of "
    "{0}.experimental.reward_loop.reward_manager and register it there"
)

NOT_SERVED: dict[str, str] = {
    "checkpoint_engine": "weights reach the rollout through lockstep.weight_sync; set rollout.checkpoint_engine.backend",
    "experimental.reward_loop.reward_loop.RewardLoopManager": _REWARD_LOOP,
    "experimental.reward_loop.reward_loop.RewardLoopWorker": _REWARD_LOOP,
    "model_merger": "use `lockstep export` for checkpoints of Lockstep, `lockstep convert` for those of verl",
    "models.mcore": _MEGATRON,
    "models.registry": "models are transformers' own; lockstep.models.known_models lists the layers with fused kernels",
    "models.transformers.monkey_patch": _PATCH,
    "single_controller.ray.megatron": _MEGATRON,
    "trainer.main_generation_server": _GENERATION,
    "utils.megatron": _MEGATRON,
    "utils.megatron_utils": _MEGATRON,
    "utils.vllm": _ROLLOUT,
    "utils.vllm_utils": _ROLLOUT,
    "workers.critic": _ENGINE,
    "workers.engine": _ENGINE,
    "workers.engine_workers.TrainingWorker": _ENGINE,
    "workers.rollout.base": _ROLLOUT,
    "workers.rollout.hf_rollout": _ROLLOUT,
    "workers.rollout.replica.RolloutReplica": _ROLLOUT,
    "workers.rollout.sglang_rollout": _ROLLOUT,
    "workers.rollout.vllm_rollout": _ROLLOUT,
    "workers.sharding_manager.fsdp_sglang": _SHARDING,
    "workers.sharding_manager.fsdp_vllm": _SHARDING,
    "workers.sharding_manager.megatron_vllm": _MEGATRON,
}
"""Names of verl that Lockstep does not have (modules, or `module.name`) -> what to use instead. {0} is this package."""


def instead_of(name: str) -> str | None:
    """What to use instead of a name of this package; None if the table does not list it."""
    short = name.removeprefix(f"{PACKAGE}.")
    parts = short.split(".")
    for length in range(len(parts), 0, -1):
        if (reason := NOT_SERVED.get(".".join(parts[:length]))) is not None:
            return reason.format(PACKAGE)
    return None


def refuse(module: str, name: str) -> AttributeError | ImportError:
    """The error for a name that `module` does not have."""
    if (reason := instead_of(f"{module}.{name}")) is not None:
        return ImportError(f"{module}.{name} is not served: {reason}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}; see docs/migrate_from_verl.md")


def exports(module: str, served: Mapping[str, Sequence[str]] | None = None) -> Callable[[str], Any]:
    """A module's `__getattr__`. served: module -> the names to take from it on first use."""
    home = {name: source for source, names in (served or {}).items() for name in names}

    def find(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(home[name]), name)
        raise refuse(module, name)

    return find


class NotServedFinder:
    """Explains the import of a module that is not here; comes last, so that it is asked only about missing ones."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}."):
            return None
        reason = instead_of(name) or "Lockstep has no such module; see docs/migrate_from_verl.md"
        raise ModuleNotFoundError(f"{name} is not served: {reason}", name=name)


def explain_missing_modules() -> None:
    if not any(finder is NotServedFinder for finder in sys.meta_path):
        sys.meta_path.append(NotServedFinder)
