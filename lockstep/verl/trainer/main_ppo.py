"""verl.trainer.main_ppo: `python -m lockstep.verl.trainer.main_ppo key=value ...` is `lockstep ppo key=value ...`.

Programs call `run_ppo(config)` from their own `hydra.main`, often with a subclass of `TaskRunner`.
"""

import gc
import sys
from typing import TYPE_CHECKING, Any

from lockstep.config.placement import Pools, controller_of, needed_models, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run.inputs import prepare_run
from lockstep.verl._config import typed_config
from lockstep.verl._ray import unwrapped
from lockstep.verl.trainer._datasets import create_rl_dataset, create_rl_sampler

if TYPE_CHECKING:
    from lockstep.single_controller import ResourcePoolManager, Role

__all__ = ["TaskRunner", "create_rl_dataset", "create_rl_sampler", "main", "run_ppo"]


def run_ppo(config: Any, task_runner_class: Any = None) -> Any:
    """Run a training job with a program's task runner, which may be wrapped by `ray.remote`.

    The runner works in this process. Workers are here too if there is one, else on Ray, which is joined or started.
    """
    typed = typed_config(config)
    prepare_run(typed)
    runner = unwrapped(task_runner_class or TaskRunner)()
    try:
        if controller_of(typed) == "local":
            return runner.run(config)
        return _run_on_ray(runner, config, typed)
    finally:
        gc.collect()  # the program's trainer, which refers to itself; the run's folder is then free for the next run


def _run_on_ray(runner: Any, config: Any, typed: PPOConfig) -> Any:
    from lockstep.single_controller.ray_backend import disconnect
    from lockstep.trainer.run.ray_runner import _connect

    joined = _connect(typed)
    try:
        return runner.run(config)
    finally:
        disconnect(typed.ray_init.timeline_json_file, leave=joined)


class TaskRunner:
    """Builds the trainer and runs it; one method per part, for subclasses."""

    _placement: Pools | None = None

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, Any] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: Any) -> tuple[Any, Any]:
        """Returns the worker class and the class of its group."""
        from lockstep.single_controller import LocalWorkerGroup, Role
        from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker

        self._add(config, ActorRolloutRefWorker, Role.ActorRollout, Role.Actor, Role.Rollout)
        if controller_of(typed_config(config, run_checks=False)) == "local":
            return ActorRolloutRefWorker, LocalWorkerGroup
        from lockstep.verl.single_controller.ray import RayWorkerGroup

        return ActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: Any) -> None:
        from lockstep.single_controller import Role
        from lockstep.workers.critic import CriticWorker

        self._add(config, CriticWorker, Role.Critic)

    def add_reward_model_worker(self, config: Any) -> None:
        from lockstep.single_controller import Role
        from lockstep.workers.reward_model import RewardModelWorker

        self._add(config, RewardModelWorker, Role.RewardModel)

    add_reward_model_resource_pool = add_reward_model_worker

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any = None) -> None:
        """ref_policy_cls: None is the class of the actor."""
        from lockstep.single_controller import Role
        from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker

        self._add(config, ref_policy_cls or ActorRolloutRefWorker, Role.RefPolicy)

    def _add(self, config: Any, worker: Any, *roles: "Role") -> None:
        """Each role that the config's placement has."""
        role_pools = self._pools(config).role_pools
        for role in roles:
            if role in role_pools:
                self.role_worker_mapping[role] = worker
                self.mapping[role] = role_pools[role]

    def _pools(self, config: Any) -> Pools:
        if self._placement is None:
            typed = typed_config(config, run_checks=False)
            self._placement = pools_of(typed, needed_models(typed))
        return self._placement

    def init_resource_pool_mgr(self, config: Any) -> "ResourcePoolManager":
        from lockstep.single_controller import ResourcePoolManager

        pools = self._pools(config)
        for role in self.role_worker_mapping:  # of an `add_*_worker` that does not choose a pool
            self.mapping.setdefault(role, pools.role_pools.get(role, next(iter(pools.spec))))
        return ResourcePoolManager(resource_pool_spec=pools.spec, mapping=self.mapping)

    def run(self, config: Any) -> Any:
        from lockstep.verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from lockstep.verl.trainer.ppo.reward import load_reward_manager
        from lockstep.verl.utils.fs import copy_to_local
        from lockstep.verl.utils.tokenizer import hf_processor, hf_tokenizer

        added = self.add_actor_rollout_worker(config)
        actor_rollout_cls, ray_worker_group_cls = added if isinstance(added, tuple) else (added, None)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, actor_rollout_cls)
        model = config.actor_rollout_ref.model
        folder = copy_to_local(model.tokenizer_path or model.path)
        tokenizer = hf_tokenizer(
            folder, trust_remote_code=model.trust_remote_code, custom_chat_template=model.custom_chat_template
        )
        trainer = RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=hf_processor(folder),
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=ray_worker_group_cls,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
        )
        trainer.init_workers()
        try:
            return trainer.fit()
        finally:
            trainer.close()


if __name__ == "__main__":
    sys.exit(main())
