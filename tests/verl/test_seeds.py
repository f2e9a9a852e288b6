"""Every Python block of the documents that describe verl runs on `lockstep.verl`.

`HELD` is the table: a block by document, heading and first line, and the function that runs it. Code is run as printed, with the
imports substituted as docs/migrate_from_verl.md says; an `edit` replaces what cannot run anywhere (`...` for arguments, a missing
line), and stand-ins are given only for names that a block leaves undefined.
"""

import asyncio
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from lockstep.protocol import object_array
from lockstep.verl import DataProto
from lockstep.verl._config import default_tree
from lockstep.verl.interactions.gsm8k_interaction import Gsm8kInteraction
from lockstep.verl.single_controller.base import Worker
from lockstep.verl.single_controller.base.decorator import Dispatch, register
from lockstep.verl.trainer import main_ppo
from lockstep.verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from lockstep.verl.trainer.ppo import core_algos, ray_trainer
from lockstep.verl.trainer.ppo.reward import compute_reward, load_reward_manager
from lockstep.verl.trainer.ppo.utils import need_critic, need_reference_policy, need_reward_model
from lockstep.verl.utils import hf_processor, hf_tokenizer
from lockstep.verl.utils.fs import copy_to_local
from lockstep.verl.utils.tracking import Tracking
from lockstep.verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from tests.metrics import metrics_of
from tests.shared_processes import Borrowed, SharedProcesses
from tests.tiny import save_tiny_model, small_run, tiny_config, tiny_tokenizer, write_rows
from tests.verl.seed_blocks import FOLDER, PythonBlock, all_blocks
from tests.verl.test_programs import SUBSTITUTIONS

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)

pytestmark = [
    pytest.mark.first,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER.name} is not here"),
    pytest.mark.usefixtures("no_registrations"),
]

Edit = tuple[str, str]
Role = ray_trainer.Role


@dataclass
class Scene:
    """A block, and what runs need. groups: hand-built ones of two workers, by role."""

    block: PythonBlock
    files: Path
    folder: Path
    group_class: type[RayWorkerGroup]
    groups: Callable[[], dict[str, Any]]
    monkeypatch: pytest.MonkeyPatch
    names: dict[str, Any] = field(default_factory=dict)

    def code(self, *edits: Edit) -> str:
        text = self.block.code
        for before, after in edits:
            assert before in text, f"{before!r} is not in the block"
            text = text.replace(before, after)
        for pattern, replacement in SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        return text

    def run(self, /, *edits: Edit, **names: Any) -> dict[str, Any]:
        """Execute the block; returns its names."""
        space = NAMES | {"RayWorkerGroup": self.group_class} | names
        exec(compile(self.code(*edits), "block", "exec"), space)
        return space

    def config(self, *changes: str) -> Any:
        given = [
            *small_run(self.files),
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={self.folder}/run",
        ]
        return OmegaConf.merge(OmegaConf.create(default_tree()), OmegaConf.from_dotlist([*given, *changes]))

    def metrics(self) -> dict[str, Any]:
        return metrics_of(self.folder / "run")[-1]

    @cached_property
    def prompts(self) -> DataProto:
        ids = object_array([list(range(3, 9 + row)) for row in range(4)])
        return DataProto.from_dict(non_tensors={"raw_prompt_ids": ids})

    def experience(self) -> DataProto:
        """A generated batch with all that an update reads."""
        groups = self.groups()
        data = groups["actor_rollout_ref"].generate_sequences(self.prompts)
        data.union(groups["actor_rollout_ref"].compute_log_prob(data), groups["critic"].compute_values(data))
        data.batch["token_level_rewards"] = torch.rand(data.batch["responses"].shape)
        return ray_trainer.compute_advantage(data, adv_estimator="gae", gamma=1.0, lam=0.95)


NAMES: dict[str, Any] = {
    "ActorRolloutRefWorker": ActorRolloutRefWorker,
    "Any": Any,
    "CriticWorker": CriticWorker,
    "DataProto": DataProto,
    "DictConfig": DictConfig,
    "Dispatch": Dispatch,
    "RayClassWithInitArgs": RayClassWithInitArgs,
    "RayPPOTrainer": ray_trainer.RayPPOTrainer,
    "RayResourcePool": RayResourcePool,
    "ResourcePoolManager": ResourcePoolManager,
    "Role": Role,
    "TaskRunner": main_ppo.TaskRunner,
    "Tracking": Tracking,
    "Worker": Worker,
    "apply_kl_penalty": ray_trainer.apply_kl_penalty,
    "compute_advantage": ray_trainer.compute_advantage,
    "compute_reward": compute_reward,
    "copy_to_local": copy_to_local,
    "create_colocated_worker_cls": create_colocated_worker_cls,
    "create_rl_dataset": main_ppo.create_rl_dataset,
    "create_rl_sampler": main_ppo.create_rl_sampler,
    "dataclass": dataclass,
    "get_ppo_ray_runtime_env": get_ppo_ray_runtime_env,
    "hf_processor": hf_processor,
    "hf_tokenizer": hf_tokenizer,
    "load_reward_manager": load_reward_manager,
    "need_critic": need_critic,
    "need_reference_policy": need_reference_policy,
    "need_reward_model": need_reward_model,
    "np": np,
    "ray": ray,
    "register": register,
    "torch": torch,
    **{name: getattr(core_algos, name) for name in core_algos.__all__},
    "compute_policy_loss": core_algos.compute_policy_loss,
}
"""What verl's modules define under these names."""

HELD: dict[tuple[str, str, str], Callable[[Scene], None]] = {}


def holds(file: str, heading: str, first_line: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def enter(run: Callable[[Scene], None]) -> Callable[[Scene], None]:
        HELD[file, heading, first_line] = run
        return run

    return enter


@holds("001", "3.1", '@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)')
def _(scene: Scene) -> None:
    imports = "import hydra\nfrom lockstep.verl.trainer.main_ppo import run_ppo\n\n"
    program = scene.folder / "program.py"
    program.write_text(imports + scene.code() + "\n\nif __name__ == '__main__':\n    main()\n")
    settings = [*small_run(scene.files), "trainer.total_training_steps=1"]
    quiet = [f"hydra.run.dir={scene.folder}/hydra", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    argv = [str(program), *settings, f"trainer.default_local_dir={scene.folder}/run", *quiet]
    scene.monkeypatch.setattr(sys, "argv", argv)
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        GlobalHydra.instance().clear()
    assert scene.metrics()["actor/grad_norm"] > 0


@holds("001", "3.2  : Ray", "def run_ppo(config, task_runner_class=None) -> None:")
def _(scene: Scene) -> None:
    scene.run()["run_ppo"](scene.config())
    assert scene.metrics()["actor/grad_norm"] > 0


@holds("001", "3.3  : TaskRunner", "class TaskRunner:")
def _(scene: Scene) -> None:
    dataset = "create_rl_dataset(config.data.{}_files, config.data, tokenizer, processor, is_train={})"
    edits = [
        ("class TaskRunner:", "class TaskRunner(TaskRunner):"),  # the printed one has only part of the methods
        ("train_dataset = create_rl_dataset(...)", f"train_dataset = {dataset.format('train', True)}"),
        ("val_dataset = create_rl_dataset(...)", f"val_dataset = {dataset.format('val', False)}"),
        ("create_rl_sampler(...)", "create_rl_sampler(config.data, train_dataset)"),
        ("            ...\n", ""),
    ]
    runner = scene.run(*edits)["TaskRunner"]()
    runner.run(scene.config("actor_rollout_ref.actor.use_kl_loss=true"))
    assert scene.metrics()["actor/kl_loss"] >= 0 and Role.Critic in runner.mapping


@holds("001", "3.3.1 Worker", "def add_actor_rollout_worker(self, config):")
def _(scene: Scene) -> None:
    method = scene.run()["add_actor_rollout_worker"]
    runner = type("Runner", (main_ppo.TaskRunner,), {"add_actor_rollout_worker": method})
    main_ppo.run_ppo(scene.config(), task_runner_class=runner)
    assert scene.metrics()["actor/grad_norm"] > 0


@holds("001", "3.3.2", "def init_resource_pool_mgr(self, config):")
def _(scene: Scene) -> None:
    method = scene.run()["init_resource_pool_mgr"]
    runner = type("Runner", (main_ppo.TaskRunner,), {"init_resource_pool_mgr": method})
    main_ppo.run_ppo(scene.config(), task_runner_class=runner)
    assert scene.metrics()["actor/grad_norm"] > 0
    pools = ["reward_model.enable_resource_pool=true", "reward_model.n_gpus_per_node=2", "reward_model.nnodes=3"]
    manager = runner().init_resource_pool_mgr(scene.config(*pools))
    assert manager.resource_pool_spec == {"global_pool": [1], "reward_pool": [2, 2, 2]}


@holds("001", "3.4  : RayPPOTrainer", "class RayPPOTrainer:")
def _(scene: Scene) -> None:
    edits = [
        ("class RayPPOTrainer:", "class RayPPOTrainer(RayPPOTrainer):"),
        (
            "resource_pool_manager, ...)",
            "resource_pool_manager, train_dataset, val_dataset, collate_fn, train_sampler)",
        ),
    ]
    config, tokenizer = scene.config("algorithm.use_kl_in_reward=true"), tiny_tokenizer()
    dataset = main_ppo.create_rl_dataset(config.data.train_files, config.data, tokenizer)
    mapping = {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker}
    trainer = scene.run(*edits)["RayPPOTrainer"](config, tokenizer, mapping, None, dataset, dataset, None, None)
    assert trainer.use_critic and trainer.use_reference_policy and not trainer.use_rm
    assert trainer.kl_ctrl_in_reward.value == 0.001 and len(trainer.train_dataloader) == 2
    assert trainer.total_training_steps == 1 and len(list(trainer.val_dataloader)) == 1


@holds("001", "3.4.1 Worker", "def init_workers(self):")
def _(scene: Scene) -> None:
    edit = ("resource_pool_to_cls = {}", "resource_pool_to_cls = defaultdict(dict)")  # printed without the pools' dicts
    method = scene.run(edit, defaultdict=defaultdict)["init_workers"]
    trainer = type("Trainer", (ray_trainer.RayPPOTrainer,), {"init_workers": method})
    scene.monkeypatch.setattr(ray_trainer, "RayPPOTrainer", trainer)
    main_ppo.run_ppo(scene.config("trainer.n_gpus_per_node=2", "algorithm.adv_estimator=gae"))
    assert scene.metrics()["actor/grad_norm"] > 0 and scene.metrics()["critic/grad_norm"] > 0


@holds("001", "4.1 ResourcePoolManager", "@dataclass")
def _(scene: Scene) -> None:
    spec, mapping = {"global_pool": [2], "reward_pool": [1]}, {Role.ActorRollout: "global_pool"}
    printed = scene.run()["ResourcePoolManager"](spec, mapping, {})
    printed.create_resource_pool()
    own = ResourcePoolManager(resource_pool_spec=spec, mapping=mapping)
    own.create_resource_pool()
    for manager in (printed, own):
        pools = manager.resource_pool_dict
        assert {name: pool.store for name, pool in pools.items()} == spec
        assert all(isinstance(pool, RayResourcePool) for pool in pools.values())


@holds("001", "4.2 RayWorkerGroup", "class RayWorkerGroup(WorkerGroup):")
def _(scene: Scene) -> None:
    class Doubling:
        def init_model(self) -> None:
            self.factor = 2

        def generate_sequences(self, data: DataProto) -> DataProto:
            return DataProto(batch={"y": data.batch["x"] * self.factor})  # type: ignore[arg-type]

    class Batch(DataProto):
        def split(self, *sizes: Any) -> Any:  # printed without a size
            return super().split(*sizes or [2])

    pool = RayResourcePool([1, 1], use_gpu=False, name_prefix="printed")
    try:
        edit = ("self.workers = []", "self.ray_cls_with_init, self.workers = ray_cls_with_init, []")  # printed without
        group = scene.run(edit, WorkerGroup=object)["RayWorkerGroup"](pool, ray.remote(num_cpus=0)(Doubling))
        assert group.spawn(set()).world_size == 2
        group.init_model()
        output = group.generate_sequences(Batch(batch={"x": torch.arange(4)}))  # type: ignore[arg-type]
        assert output.batch["y"].tolist() == [0, 2, 4, 6]
    finally:
        pool.shutdown()


@holds("001", "4.3 DataProto", "@dataclass")
def _(scene: Scene) -> None:
    printed = scene.run()["DataProto"]
    columns = {"batch": {"x": torch.arange(4)}, "non_tensor_batch": {"uid": np.arange(4)}, "meta_info": {"a": 1}}
    assert printed(**columns).batch is columns["batch"]
    own = DataProto(**columns)  # type: ignore[arg-type]
    parts = own.split(n_parts=2)
    assert DataProto.concat(parts).union(own).batch["x"].tolist() == [0, 1, 2, 3]
    assert {"split", "concat", "union"} <= vars(printed).keys()


@holds("001", "5.1", "def fit(self):")
def _(scene: Scene) -> None:
    edits = [
        ("Tracking(...)", "Tracking('p', 'e', self.config.trainer.logger, OmegaConf.to_container(self.config))"),
        (  # printed without taking the prompts out of the batch and the responses in
            "gen_batch_output = self.actor_rollout_wg.generate_sequences(batch)",
            "batch = batch.union(self.actor_rollout_wg.generate_sequences(self._get_gen_batch(batch)))",
        ),
    ]
    method = scene.run(*edits, OmegaConf=OmegaConf, metrics={"a": 1.0})["fit"]
    trainer = type("Trainer", (ray_trainer.RayPPOTrainer,), {"fit": method})
    scene.monkeypatch.setattr(ray_trainer, "RayPPOTrainer", trainer)
    changes = [
        "algorithm.use_kl_in_reward=true",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "trainer.total_epochs=1",
    ]
    main_ppo.run_ppo(scene.config(*changes, "trainer.total_training_steps=null"))
    assert (scene.folder / "run" / "global_step_2" / "actor").is_dir()


@holds("001", "5.2", "def compute_advantage(data, adv_estimator, gamma, lam):")
def _(scene: Scene) -> None:
    compute = scene.run()["compute_advantage"]
    for name in ("GAE", "GRPO", "REINFORCE_PLUS_PLUS"):
        estimator = core_algos.AdvantageEstimator[name]
        found, expected = (
            DataProto(
                batch={  # type: ignore[arg-type]
                    "token_level_rewards": torch.eye(4, 3),
                    "values": torch.full((4, 3), 0.5),
                    "response_mask": torch.ones(4, 3),
                },
                non_tensor_batch={"uid": np.array(list("aabb"), dtype=object)},
            )
            for _ in range(2)
        )
        found = compute(found, estimator, 1.0, 0.95)
        expected = ray_trainer.compute_advantage(expected, adv_estimator=estimator, gamma=1.0, lam=0.95)
        for key in ("advantages", "returns"):
            assert torch.allclose(found.batch[key], expected.batch[key]), (name, key)


@holds("001", "5.3 Actor", "def update_actor(self, data: DataProto):")
def _(scene: Scene) -> None:
    class Model(torch.nn.Linear):
        def compute_log_prob(self, input_ids: Any, attention_mask: Any, responses: Any) -> torch.Tensor:
            return self(responses[..., None].float())[..., 0]

    model = Model(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = SimpleNamespace(
        model=model, optimizer=optimizer, config=SimpleNamespace(clip_ratio=0.2, max_grad_norm=1.0)
    )
    shape, before = (2, 3), model.weight.detach().clone()
    names = ("input_ids", "attention_mask", "responses", "old_log_probs", "advantages", "response_mask")
    data = DataProto(batch={name: torch.ones(shape) for name in names})  # type: ignore[arg-type]
    data.batch["old_log_probs"] = model.compute_log_prob(None, None, data.batch["responses"]).detach()
    output = scene.run()["update_actor"](worker, data)
    assert output.meta_info["metrics"]["loss"] == pytest.approx(-1.0)
    assert not torch.equal(before, model.weight)


@holds("002", "Stage 1: Actor", "batch = actor.generate_sequences(prompts)")
def _(scene: Scene) -> None:
    batch = scene.run(actor=scene.groups()["actor_rollout_ref"], prompts=scene.prompts)["batch"]
    assert {"input_ids", "attention_mask", "responses", "rollout_log_probs"} <= set(batch.batch.keys())


@holds("002", "2.1 Critic", "batch = critic.compute_values(batch)")
def _(scene: Scene) -> None:
    batch = scene.run(critic=scene.groups()["critic"], batch=scene.experience())["batch"]
    assert batch.batch["values"].shape == (4, 8)


@holds("002", "2.2 Reference Policy", "batch = reference.compute_log_prob(batch)")
def _(scene: Scene) -> None:
    batch = scene.run(reference=scene.groups()["ref"], batch=scene.experience())["batch"]
    assert batch.batch["ref_log_prob"].shape == (4, 8)


OLD, REFERENCE = (
    torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]]),
    torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]]),
)


@holds("002", "2.2 Reference Policy", "kld = old_log_probs - ref_log_prob")
def _(scene: Scene) -> None:
    kld = scene.run(old_log_probs=OLD, ref_log_prob=REFERENCE)["kld"]
    assert torch.equal(kld, core_algos.kl_penalty(OLD, REFERENCE, "kl")) and kld[0, 0] == pytest.approx(0.03)


@holds("002", "2.3 Reward Model", "batch = reward.compute_reward(batch)")
def _(scene: Scene) -> None:
    batch = scene.experience()
    batch.non_tensor_batch["data_source"] = object_array(["openai/gsm8k"] * 4)
    batch.non_tensor_batch["reward_model"] = object_array([{"ground_truth": "1"}] * 4)
    manager = load_reward_manager(scene.config(), tiny_tokenizer())
    reward = SimpleNamespace(compute_reward=partial(compute_reward, reward_fn=manager))
    scores, _ = scene.run(reward=reward, batch=batch)["batch"]
    assert scores.shape == (4, 8)


@holds("002", "2.3 Reward Model", "token_level_rewards = token_level_scores - beta * kld")
def _(scene: Scene) -> None:
    scores = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
    data = DataProto(
        batch={  # type: ignore[arg-type]
            "token_level_scores": scores,
            "old_log_probs": OLD,
            "ref_log_prob": REFERENCE,
            "response_mask": torch.ones_like(OLD),
        }
    )
    printed = scene.run(token_level_scores=scores, beta=0.01, kld=OLD - REFERENCE)["token_level_rewards"]
    own, _ = ray_trainer.apply_kl_penalty(data, core_algos.FixedKLController(0.01))
    assert torch.allclose(printed, own.batch["token_level_rewards"])


@holds("002", "2.4   (Advantage)", "batch = compute_advantages(batch)")
def _(scene: Scene) -> None:
    data = scene.experience()
    compute = partial(ray_trainer.compute_advantage, adv_estimator="gae", gamma=1.0, lam=0.95)
    assert {"advantages", "returns"} <= set(scene.run(compute_advantages=compute, batch=data)["batch"].batch.keys())


@holds("002", "2.4   (Advantage)", "_t = r_t +  *V(s_{t+1}) - V(s_t)")
def _(scene: Scene) -> None:
    """A formula, not code: what GAE computes."""
    with pytest.raises(SyntaxError):
        scene.run()
    rewards, values, gamma, lam = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]]), 0.9, 0.8
    r, v = rewards[0].tolist(), [*values[0].tolist(), 0.0]
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(3)]
    expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(3 - t)) for t in range(3)]
    _, returns = core_algos.compute_gae_advantage_return(rewards, values, torch.ones(1, 3), gamma, lam)
    assert torch.allclose(returns - values, torch.tensor([expected]))


@holds("002", "3.1 Critic", "critic_metrics = critic.update_critic(batch)")
def _(scene: Scene) -> None:
    output = scene.run(critic=scene.groups()["critic"], batch=scene.experience())["critic_metrics"]
    assert "critic/vf_loss" in output.meta_info["metrics"]


def printed_metrics(scene: Scene) -> set[str]:
    return set(eval(scene.code()))


@holds("002", "3.1 Critic", "{")
def _(scene: Scene) -> None:
    metrics = scene.groups()["critic"].update_critic(scene.experience()).meta_info["metrics"]
    assert printed_metrics(scene) <= metrics.keys()


@holds("002", "3.2 Actor", "actor_metrics = actor.update_actor(batch)")
def _(scene: Scene) -> None:
    output = scene.run(actor=scene.groups()["actor_rollout_ref"], batch=scene.experience())["actor_metrics"]
    assert output.meta_info["metrics"]["actor/grad_norm"]


@holds("002", "3.2 Actor", "{")
def _(scene: Scene) -> None:
    data = scene.experience()
    metrics = scene.groups()["actor_rollout_ref"].update_actor(data).meta_info["metrics"]
    named = {"actor/approx_kl": "actor/ppo_kl"}  # the name that verl gives it
    elsewhere = {"actor/entropy"}  # of the log-prob pass, from the batch's `entropys`
    assert {named.get(name, name) for name in printed_metrics(scene)} - elsewhere <= metrics.keys()
    assert "entropys" in data.batch


@holds("002", "3.2 Actor", "ratio = exp(new_log_prob - old_log_prob)")
def _(scene: Scene) -> None:
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 0.5]])
    functions = {"exp": torch.exp, "min": torch.minimum, "clip": torch.clamp, "\u03b5": 0.01}
    space = scene.run(new_log_prob=REFERENCE, old_log_prob=OLD, A=advantages, **functions)
    loss, *_ = core_algos.compute_policy_loss(OLD, REFERENCE, advantages, torch.ones_like(OLD), clip_ratio=0.01)
    assert torch.allclose(-space["L_clip"].mean(), loss)


@holds("002", "1.1", "gen_batch_output = self.actor_rollout_wg.generate_sequences(gen_batch)")
def _(scene: Scene) -> None:
    trainer = SimpleNamespace(actor_rollout_wg=scene.groups()["actor_rollout_ref"])
    assert len(scene.run(self=trainer, gen_batch=scene.prompts)["gen_batch_output"]) == 4


@holds("002", "2", "role_worker_mapping = {")
def _(scene: Scene) -> None:
    mapping = scene.run()["role_worker_mapping"]
    config = scene.config("algorithm.use_kl_in_reward=true")
    pools = dict.fromkeys(mapping, "global_pool")
    manager = ResourcePoolManager({"global_pool": [1]}, pools)
    trainer = ray_trainer.RayPPOTrainer(config, tiny_tokenizer(), mapping, manager)
    assert trainer.role_worker_mapping == {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }


@holds("002", "** **", "class ActorRolloutRefWorker(Worker):")
def _(scene: Scene) -> None:
    cls = scene.run()["ActorRolloutRefWorker"]
    for role in ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"):
        printed, own = cls(OmegaConf.create({}), role), ActorRolloutRefWorker(scene.config().actor_rollout_ref, role)
        assert (printed._is_actor, printed._is_rollout, printed._is_ref) == (own.is_actor, own.is_rollout, own.is_ref)


@holds("002", "", "actor_rollout_cls = RayClassWithInitArgs(cls=self.role_worker_mapping[Role.ActorRollout],")
def _(scene: Scene) -> None:
    mapping = {Role.ActorRollout: ray.remote(ActorRolloutRefWorker), Role.RefPolicy: ActorRolloutRefWorker}
    space = scene.run(self=SimpleNamespace(role_worker_mapping=mapping, config=scene.config()))
    for name, role in (("actor_rollout_cls", "actor_rollout"), ("ref_policy_cls", "ref")):
        made = space[name]
        assert made.cls is ActorRolloutRefWorker and made.kwargs["role"] == role
        assert made.kwargs["config"].model.path == f"{scene.files}/model"


@holds("002", "Rollout", "if self._is_actor or self._is_rollout:")
def _(scene: Scene) -> None:
    """How verl's worker shares its model; ours does too (`models/shared_weights.py`)."""
    module = SimpleNamespace(_fsdp_wrapped_module="module")
    worker = SimpleNamespace(
        _is_actor=True,
        _is_rollout=True,
        config=SimpleNamespace(actor=None),
        _build_model_optimizer=lambda *parts: (module, "optimizer", "schedule", "config"),
        _build_rollout=lambda: ("rollout", "sharding manager"),
    )
    scene.run(self=worker, DataParallelPPOActor=SimpleNamespace)
    assert worker.actor.actor_module is module and worker.actor_module == "module" and worker.rollout == "rollout"


@holds("002", "`FSDPVLLMShardingManager` 69-76", "def __enter__(self):")
def _(scene: Scene) -> None:
    """How verl sends its weights to vLLM; ours are sent by `weight_sync`."""
    sent = []
    engine = SimpleNamespace(sync_model_weights=lambda params, load_format: sent.append((params, load_format)))
    manager = SimpleNamespace(module=torch.nn.Linear(1, 1), inference_engine=engine)
    scene.run(load_format="auto")["__enter__"](manager)
    assert list(sent[0][0]) == ["weight", "bias"] and sent[0][1] == "auto"


@holds("002", "", "@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)")
def _(scene: Scene) -> None:
    class Sharding:
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...
        def preprocess_data(self, data: Any) -> Any:
            return data

        def postprocess_data(self, data: Any) -> Any:
            results.append(data)
            return data

    results: list[Any] = []
    method = scene.run()["generate_sequences"]
    rollout = SimpleNamespace(generate_sequences=lambda prompts: prompts)
    cls = type("Rollout", (Worker,), {"generate_sequences": method})
    worker = cls()
    worker.rollout_sharding_manager, worker.rollout = Sharding(), rollout
    data = DataProto(batch={"x": torch.arange(2)})  # type: ignore[arg-type]
    worker.generate_sequences(data)
    assert results == [data]
    from lockstep.single_controller import LocalWorkerGroup
    from lockstep.verl.single_controller.base import ClassWithInitArgs, ResourcePool

    assert LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(cls)).generate_sequences is not None


@holds("003", "Parquet", "import pandas as pd")
def _(scene: Scene) -> None:
    scene.monkeypatch.chdir(scene.folder)
    space = scene.run()
    assert space["df2"].equals(space["df"])


@holds("003", "RL interaction_kwargs", "{")
def _(scene: Scene) -> None:
    row = eval(scene.code())
    assert row.pop("name") == "gsm8k"
    interaction = Gsm8kInteraction({"name": "gsm8k"})
    interaction.check_kwargs(row)

    async def talk(answer: str) -> bool:
        instance = await interaction.start_interaction(**row)
        ends, *_ = await interaction.generate_response(instance, [{"role": "assistant", "content": answer}])
        return ends

    assert asyncio.run(talk("12 - 3 = 9.")) and not asyncio.run(talk("The answer is 8."))


@holds("003", "RL interaction_kwargs", 'interaction = interaction_map["gsm8k"]')
def _(scene: Scene) -> None:
    interaction = scene.run(interaction_map={"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})["interaction"]
    assert asyncio.run(interaction.start_interaction(ground_truth="The correct answer is 9."))


@holds("003", "1. ** **", "rollouts = actor.generate()")
def _(scene: Scene) -> None:
    groups = scene.groups()
    scene.run(
        actor=SimpleNamespace(generate=scene.experience),
        reward_model=SimpleNamespace(score=groups["rm"].compute_rm_score),
        critic=SimpleNamespace(evaluate=groups["critic"].compute_values),
        ppo=SimpleNamespace(update=lambda actor, rewards, values: (rewards.batch["rm_scores"], values.batch["values"])),
    )


@holds("003", "2.   Worker", "output = actor_rollout_ref_wg.generate_sequences(data)")
def _(scene: Scene) -> None:
    group = scene.groups()["actor_rollout_ref"]
    assert len(scene.run(actor_rollout_ref_wg=group, data=scene.prompts)["output"]) == 4


@holds("003", "PPO", "for prompt in dataloader:")
def _(scene: Scene) -> None:
    def compute_advantages(values: Any, rewards: Any) -> DataProto:
        returns = rewards.batch["rm_scores"].flip(-1).cumsum(-1).flip(-1)
        return DataProto(batch={"advantages": returns - values.batch["values"], "returns": returns})  # type: ignore[arg-type]

    groups = scene.groups()
    space = scene.run(
        dataloader=[scene.prompts],
        actor_rollout_ref_wg=groups["actor_rollout_ref"],
        critic_wg=groups["critic"],
        reward_wg=groups["rm"],
        compute_advantages=compute_advantages,
    )
    assert {"old_log_probs", "ref_log_prob", "values", "rm_scores", "advantages"} <= set(space["merged"].batch.keys())


BLOCKS = all_blocks()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("seeds")
    save_tiny_model(folder / "model")
    reward_model = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    reward_model.save_pretrained(folder / "reward_model")
    tiny_tokenizer().save_pretrained(folder / "reward_model")
    write_rows(folder / "train.parquet", 8)
    write_rows(folder / "val.parquet", 2)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(set(solution_str)) / 10\n"
    )
    return folder


@pytest.fixture(scope="module")
def group_class(shared_processes: SharedProcesses) -> type[RayWorkerGroup]:
    class OnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Borrowed:
            return Borrowed(shared_processes, self.world_size)

    return OnSharedProcesses


@pytest.fixture(scope="module")
def groups(files: Path, group_class: type[RayWorkerGroup]) -> Any:
    """A function that builds the groups once."""
    started: list[Any] = []

    def build() -> dict[str, Any]:
        if started:
            return dict(started[1])
        changes = [*small_run(files), "reward_model.enable=true", f"reward_model.model.path={files}/reward_model"]
        config: Any = OmegaConf.merge(OmegaConf.create(default_tree()), OmegaConf.from_dotlist(changes))
        policy = config.actor_rollout_ref
        classes = {
            "actor_rollout_ref": RayClassWithInitArgs(ActorRolloutRefWorker, policy, "actor_rollout_ref"),
            "ref": RayClassWithInitArgs(ActorRolloutRefWorker, config=policy, role="ref"),
            "critic": RayClassWithInitArgs(CriticWorker, config=config.critic),
            "rm": RayClassWithInitArgs(RewardModelWorker, config=config.reward_model),
        }
        pool = RayResourcePool([2], use_gpu=False)
        started.append(group_class(pool, create_colocated_worker_cls(classes)))
        started.append(started[0].spawn(classes.keys()))
        for group in started[1].values():
            group.init_model()
        return dict(started[1])

    yield build
    if started:
        started[0].shutdown()


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.file} {block.heading} {block.first_line}" for block in BLOCKS])
def test_a_block_runs(
    block: PythonBlock, files: Path, group_class: Any, groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert block.key in HELD, f"no test holds the block {block.key}"
    HELD[block.key](Scene(block, files, tmp_path, group_class, groups, monkeypatch))


def test_the_table_has_no_other_blocks() -> None:
    keys = [block.key for block in BLOCKS]
    assert sorted(HELD) == sorted(keys) and len(set(keys)) == len(keys)
