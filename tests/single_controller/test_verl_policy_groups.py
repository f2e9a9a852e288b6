"""Worker groups of a policy, critic and reward model that a program on verl builds itself, on Ray."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lockstep.protocol import object_array
from lockstep.verl import DataProto
from lockstep.verl._config import default_tree
from lockstep.verl.trainer.main_ppo import run_ppo
from lockstep.verl.trainer.ppo import ray_trainer
from lockstep.verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from lockstep.verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from tests.metrics import metrics_of
from tests.shared_processes import Borrowed, SharedProcesses
from tests.tiny import random_batch, save_tiny_model, small_run, write_rows

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, create_colocated_worker_cls

pytestmark = [pytest.mark.first, pytest.mark.usefixtures("no_registrations")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_hand")
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 8)
    write_rows(folder / "val.parquet", 2)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(set(solution_str)) / 10\n"
    )
    return folder


def config_of(files: Path, *changes: str) -> Any:
    changes = (*small_run(files), "trainer.total_training_steps=1", *changes)
    return OmegaConf.merge(OmegaConf.create(default_tree()), OmegaConf.from_dotlist(list(changes)))


@pytest.fixture
def group_class(shared_processes: SharedProcesses) -> type[RayWorkerGroup]:
    class OnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Borrowed:
            return Borrowed(shared_processes, self.world_size)

    return OnSharedProcesses


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_program_trains_with_groups_that_it_built(
    world_size: int, group_class: type[RayWorkerGroup], files: Path
) -> None:
    config = config_of(files, "algorithm.adv_estimator=gae")
    manager = ResourcePoolManager({"global_pool": [world_size]}, {Role.ActorRollout: "global_pool"})
    manager.create_resource_pool()
    pool = manager.get_resource_pool(Role.ActorRollout)
    assert pool.world_size == world_size and not pool.use_gpu  # type: ignore[attr-defined]
    classes = {
        "actor_rollout_ref": RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor_rollout_ref"
        ),
        "critic": RayClassWithInitArgs(CriticWorker, config.critic),
    }
    group = group_class(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=classes))
    try:
        groups = group.spawn(prefix_set=classes.keys())
        actor, critic = groups["actor_rollout_ref"], groups["critic"]
        for member in groups.values():
            member.init_model()
        ids = object_array([list(range(3, 9 + row)) for row in range(4)])
        prompts = DataProto.from_dict(non_tensors={"raw_prompt_ids": ids})
        output = actor.generate_sequences(prompts)
        assert len(output) == 4 and {"responses", "response_mask", "rollout_log_probs"} <= set(output.batch.keys())
        again = actor.generate_sequences(prompts)
        assert not torch.equal(output.batch["responses"], again.batch["responses"])  # another draw
        old, ref = actor.compute_log_prob(output), actor.compute_ref_log_prob(output)
        assert torch.allclose(old.batch["old_log_probs"], ref.batch["ref_log_prob"], atol=1e-5)
        rewards = DataProto(batch={"advantages": torch.ones(4, 8), "returns": torch.ones(4, 8)})
        merged = output.union(old, ref, critic.compute_values(output), rewards)
        assert critic.update_critic(merged).meta_info["metrics"]["critic/grad_norm"]
        assert actor.update_actor(merged).meta_info["metrics"]["actor/grad_norm"]
        after = actor.compute_log_prob(output).batch["old_log_probs"]
        assert not torch.allclose(after, ref.batch["ref_log_prob"], atol=1e-5)
    finally:
        group.shutdown()


def test_a_group_without_a_reference_says_so(group_class: type[RayWorkerGroup], files: Path) -> None:
    config = config_of(files)
    pool = ResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool"})
    pool.create_resource_pool()
    init = RayClassWithInitArgs(ActorRolloutRefWorker, config=config.actor_rollout_ref, role="actor_rollout")
    group = group_class(pool.get_resource_pool(Role.ActorRollout), init)
    try:
        with pytest.raises(
            ValueError, match="role='actor_rollout' have no reference policy; construct them with role="
        ):
            group.compute_ref_log_prob(DataProto(batch=random_batch(2)))
    finally:
        group.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_fit_with_an_init_workers_of_the_program(
    world_size: int,
    group_class: type[RayWorkerGroup],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Trainer(RayPPOTrainer):
        def init_workers(self) -> None:
            self.resource_pool_manager.create_resource_pool()
            by_pool: dict[Any, dict[str, Any]] = defaultdict(dict)
            policy = self.config.actor_rollout_ref
            for role in (Role.ActorRollout, Role.RefPolicy):
                by_pool[self.resource_pool_manager.get_resource_pool(role)][str(role)] = RayClassWithInitArgs(
                    cls=self.role_worker_mapping[role], config=policy, role=str(role)
                )
            groups: dict[str, Any] = {}
            for pool, class_dict in by_pool.items():
                workers = group_class(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict))
                groups |= workers.spawn(prefix_set=class_dict.keys())
            self.actor_rollout_wg = groups[str(Role.ActorRollout)]
            self.ref_policy_wg = groups[str(Role.RefPolicy)]
            for group in groups.values():
                group.init_model()

    changes = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"trainer.n_gpus_per_node={world_size}",
    ]
    monkeypatch.setattr(ray_trainer, "RayPPOTrainer", Trainer)
    run_ppo(config_of(files, *changes, f"trainer.default_local_dir={tmp_path}/by_hand"))
    own = metrics_of(tmp_path / "by_hand")
    monkeypatch.undo()
    if world_size == 1:  # the same run in this process
        run_ppo(config_of(files, *changes, f"trainer.default_local_dir={tmp_path}/built_in"))
        for name, value in metrics_of(tmp_path / "built_in")[-1].items():
            if name.startswith(("actor/", "critic/")):
                assert own[-1][name] == pytest.approx(value, abs=1e-5), name
    assert own[-1]["actor/grad_norm"] > 0 and own[-1]["actor/kl_loss"] >= 0
