"""How the packages of `lockstep.verl` find their names: imported on first use, or refused with what to use instead."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "lockstep.verl"

_AGENTS = (
    "the run serves agent loops; derive yours from AgentLoopBase or lockstep.agents.loops.AgentLoop, see docs/agents.md"
)
_MEGATRON = "models are trained with FSDP2; use the classes of {0}.workers.fsdp_workers"
_ENGINE = (
    "the worker owns its training engine; choose the loss with actor_rollout_ref.actor.policy_loss.loss_mode "
    "({0}.trainer.ppo.core_algos.register_policy_loss), or subclass {0}.workers.fsdp_workers.ActorRolloutRefWorker"
)
_ROLLOUT = "the rollout engine is chosen by actor_rollout_ref.rollout.name; implement lockstep.engines.rollout.base for another"
_SHARDING = "FSDP2 is applied by lockstep.engines.train.fsdp.FsdpEngine"
_CHECKPOINT = "workers save and load with save_checkpoint(path) and load_checkpoint(path); lockstep.trainer.checkpoint has the rest"
_PROFILER = "there are no profiler hooks; use {0}.utils.profiler.marked_timer, or torch.profiler in your program"
_SFT = "use {0}.trainer.fsdp_sft_trainer (`lockstep sft`), which accepts the keys of sft_trainer_engine.yaml too"
_GENERATION = "use {0}.trainer.main_generation (`lockstep generate`), which generates in the program's own workers"

NOT_SERVED: dict[str, str] = {
    "experimental.agent_loop.AgentLoopManager": _AGENTS,
    "experimental.agent_loop.AgentLoopWorker": _AGENTS,
    "experimental.agent_loop.AsyncLLMServerManager": _AGENTS,
    "experimental.agent_loop.agent_loop.AgentLoopManager": _AGENTS,
    "experimental.agent_loop.agent_loop.AgentLoopWorker": _AGENTS,
    "experimental.agent_loop.agent_loop.AsyncLLMServerManager": _AGENTS,
    "experimental.agent_loop.single_turn_agent_loop": _AGENTS,
    "experimental.agent_loop.tool_agent_loop": _AGENTS,
    "experimental.reward_loop": "write a reward manager ({0}.workers.reward_manager.register); async functions run concurrently",
    "model_merger": "use `lockstep export` for checkpoints of Lockstep, `lockstep convert` for those of verl",
    "models": "models are transformers' own; lockstep.models.known_models lists the layers with fused kernels",
    "protocol.DataProtoConfig": "worker groups pad and unpad batches; pass auto_padding=True to DataProto.from_dict for chunk",
    "protocol.all_gather_data_proto": "worker groups join the outputs of their ranks",
    "single_controller.ray.base.merge_resource_pool": "set resource_pool_spec and resource_pool_mapping",
    "single_controller.ray.base.split_resource_pool": "set resource_pool_spec and resource_pool_mapping",
    "single_controller.ray.megatron": _MEGATRON,
    "single_controller.ray.merge_resource_pool": "set resource_pool_spec and resource_pool_mapping",
    "single_controller.ray.split_resource_pool": "set resource_pool_spec and resource_pool_mapping",
    "tools.utils": _AGENTS,
    "trainer.sft_trainer": _SFT,
    "trainer.main_generation_server": _GENERATION,
    "utils.checkpoint.fsdp_checkpoint_manager": _CHECKPOINT,
    "utils.checkpoint.checkpoint_manager.BaseCheckpointManager": _CHECKPOINT,
    "utils.fsdp_utils": _SHARDING,
    "utils.metric.Metric": "metrics are plain numbers; {0}.utils.metric.reduce_metrics reduces lists of them",
    "utils.tensordict_utils": "use DataProto, or tensordict's own functions",
    "utils.megatron_utils": _MEGATRON,
    "utils.profiler.DistProfiler": _PROFILER,
    "utils.profiler.DistProfilerExtension": _PROFILER,
    "utils.profiler.ProfilerConfig": _PROFILER,
    "utils.reward_score.sandbox_fusion": "set reward_model.sandbox_fusion.url, and use {0}.utils.reward_score.prime_code",
    "utils.rollout_skip": "every step generates; set trainer.rollout_data_dir to keep the rollouts",
    "utils.ulysses": "sequence parallelism is built in: actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "utils.vllm": _ROLLOUT,
    "utils.vllm_utils": _ROLLOUT,
    "workers.actor": _ENGINE,
    "workers.critic": _ENGINE,
    "workers.engine": _ENGINE,
    "workers.engine_workers": _ENGINE,
    "workers.megatron_workers": _MEGATRON,
    "workers.rollout": _ROLLOUT,
    "workers.sharding_manager": _SHARDING,
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
