"""Forms in which documents and programs on verl write its calls."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.config.sft import SFTConfig
from lockstep.utils.distributed import init_single_process_group
from lockstep.verl import DataProto
from lockstep.verl._config import default_tree, typed_config
from lockstep.verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer, create_sft_dataset
from lockstep.verl.trainer.main_ppo import TaskRunner, run_ppo
from lockstep.verl.trainer.ppo.core_algos import (
    compute_policy_loss,
    compute_reinforce_plus_plus_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from lockstep.verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from lockstep.verl.trainer.ppo.reward import load_reward_manager
from lockstep.verl.utils import hf_tokenizer
from lockstep.verl.workers.fsdp_workers import ActorRolloutRefWorker
from tests.metrics import metrics_of
from tests.tiny import save_tiny_model, small_run, tiny_tokenizer, write_rows

pytestmark = pytest.mark.usefixtures("no_registrations")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 8)
    write_rows(folder / "val.parquet", 2)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    return folder


def config_of(files: Path, run: Path, *changes: str) -> Any:
    given = [*small_run(files), "trainer.total_training_steps=1", f"trainer.default_local_dir={run}", *changes]
    return OmegaConf.merge(OmegaConf.create(default_tree()), OmegaConf.from_dotlist(given))


def test_a_batch_from_a_dict_of_tensors() -> None:
    data = DataProto(
        batch={"x": torch.arange(4)},  # type: ignore[arg-type]
        non_tensor_batch={"uid": np.array(list("aabb"), dtype=object)},
        meta_info={"step": 1},
    )
    first, second = data.split(n_parts=2)
    assert first.batch["x"].tolist() == [0, 1] and list(second.non_tensor_batch["uid"]) == ["b", "b"]
    assert isinstance(first, DataProto) and len(data.split(3)) == 2
    assert DataProto.concat([first, second]).batch["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="either split_size, the rows of a part, or n_parts"):
        data.split()
    with pytest.raises(ValueError, match="x"):
        DataProto(batch={"x": torch.arange(4), "y": torch.arange(3)})  # type: ignore[arg-type]
    assert len(DataProto(batch={})) == 0  # type: ignore[arg-type]


def test_a_union_of_several_batches() -> None:
    parts = [DataProto(batch={name: torch.arange(2)}) for name in "abcd"]  # type: ignore[arg-type]
    merged = parts[0].union(parts[1], parts[2], parts[3])
    assert merged is parts[0] and set(merged.batch.keys()) == set("abcd")
    assert merged.union() is merged


def test_the_policy_loss_is_a_tuple_and_a_loss() -> None:
    old, mask = torch.zeros(2, 3), torch.ones(2, 3)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    log_prob = torch.full((2, 3), 0.5, requires_grad=True)
    loss = compute_policy_loss(old, log_prob, advantages, mask, clip_ratio=0.1)
    # ratio e^0.5: clipped at 1.1 for the positive advantage, unclipped for the negative
    assert loss.item() == pytest.approx((-1.1 + np.exp(0.5)) / 2, rel=1e-5)
    assert torch.equal(compute_policy_loss(old, log_prob, advantages, mask, 0.1)[0], loss[0])
    value, clipfrac, *_ = loss
    assert value is loss[0] and clipfrac == pytest.approx(0.5)
    loss.backward()
    assert log_prob.grad is not None and log_prob.grad[1].abs().sum() > 0
    with pytest.raises(TypeError, match="cliprange and clip_ratio are the same"):
        compute_policy_loss(old, log_prob, advantages, mask, cliprange=0.1, clip_ratio=0.1)
    default = compute_policy_loss(old, log_prob, advantages, mask)
    assert torch.equal(default.loss, compute_policy_loss(old, log_prob, advantages, mask, clip_ratio=0.2).loss)


def test_reinforce_plus_plus_by_its_short_name() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    expected = compute_reinforce_plus_plus_outcome_advantage(rewards, mask)
    for one, other in zip(
        compute_reinforce_plus_plus_advantage(token_level_rewards=rewards, response_mask=mask), expected
    ):
        assert torch.equal(one, other)
    _, returns = compute_reinforce_plus_plus_advantage(rewards, mask, gamma=0.5)
    assert returns[0].tolist() == [0.5, 1.0]


def test_a_reward_manager_needs_no_count_of_examples(files: Path, tmp_path: Path) -> None:
    manager = load_reward_manager(config_of(files, tmp_path), tiny_tokenizer())
    assert manager.num_examine == 0  # type: ignore[attr-defined]


def test_a_task_runner_written_from_scratch(files: Path, tmp_path: Path) -> None:
    """Without the constructor, with one class per role, and a mapping that leaves the pools open."""

    class Mine(TaskRunner):
        def __init__(self) -> None:
            self.role_worker_mapping = {}
            self.mapping = {}

        def add_actor_rollout_worker(self, config: Any) -> Any:
            self.role_worker_mapping[Role.ActorRollout] = ActorRolloutRefWorker
            return ActorRolloutRefWorker

        def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any = None) -> None:
            super().add_ref_policy_worker(config)

    config = config_of(
        files, tmp_path / "run", "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"
    )
    run_ppo(config, task_runner_class=Mine)
    assert metrics_of(tmp_path / "run")[-1]["actor/kl_loss"] >= 0


def test_a_programs_own_loaders(files: Path, tmp_path: Path) -> None:
    made = []

    class Trainer(RayPPOTrainer):
        def _create_dataloader(self, *datasets: Any) -> None:
            super()._create_dataloader(*datasets)
            made.append(self.total_training_steps)

    config = config_of(files, tmp_path / "run", "trainer.total_training_steps=null", "trainer.total_epochs=3")
    manager = ResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool", Role.Critic: "global_pool"})
    trainer = Trainer(config, tiny_tokenizer(), {Role.ActorRollout: ActorRolloutRefWorker}, manager)
    assert made == [6] and trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 6


PROGRAM = """
import hydra
from lockstep.verl.trainer.main_ppo import run_ppo

@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config):
    {body}

if __name__ == "__main__":
    main()
"""


def run_program(path: Path, *settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = [f"hydra.run.dir={path.parent}/hydra", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    monkeypatch.setattr(sys, "argv", [str(path), *settings, *quiet])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        GlobalHydra.instance().clear()


def test_hydras_folder_config_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body=f"open('{tmp_path}/n', 'w').write(str(config.actor_rollout_ref.rollout.n))"))
    run_program(program, "algorithm.adv_estimator=grpo", monkeypatch=monkeypatch)
    assert (tmp_path / "n").read_text() == "5"
    (tmp_path / "config").mkdir()  # the program's own
    own = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 7}}\n"
    (tmp_path / "config" / "mine.yaml").write_text(own)
    run_program(program, "--config-name=mine", monkeypatch=monkeypatch)
    assert (tmp_path / "n").read_text() == "7"
    program.write_text(program.read_text().replace('"config"', '"confgi"'))
    with pytest.raises(MissingConfigException, match="confgi"):
        run_program(program, monkeypatch=monkeypatch)


def test_the_command_line_takes_verls_config_folder(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ppo", "--config-path=config", "--config-name=ppo_trainer.yaml", "--cfg", "job"]) == 0
    assert "adv_estimator: gae" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["ppo", "--config-path=confgi", "--cfg", "job"])
    assert "--config-dir=confgi: no such folder" in capsys.readouterr().err


def test_sft_with_verls_constructor(files: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: Any = OmegaConf.create(default_tree(SFTConfig))
    config.model.partial_pretrain = f"{files}/model"
    config.data.train_files = f"{tmp_path}/train.jsonl"
    config.data.prompt_key, config.data.response_key = "prompt", "response"
    config.data.train_batch_size, config.data.max_length = 4, 64
    config.trainer.total_epochs, config.trainer.device = 1, "cpu"
    config.trainer.default_local_dir = f"{tmp_path}/run"
    tokenizer = hf_tokenizer(config.model.partial_pretrain)
    dataset = create_sft_dataset(config.data.train_files, config.data, tokenizer)
    init_single_process_group(torch.device("cpu"))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    trainer = FSDPSFTTrainer(
        config=config,
        device_mesh=mesh,
        ulysses_device_mesh=None,
        tokenizer=tokenizer,
        train_dataset=dataset,
        val_dataset=None,
    )
    trainer.fit()
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "global_step_2").is_dir()
    with pytest.raises(ValueError, match="needs a tokenizer and a train_dataset"):
        FSDPSFTTrainer(config)
    assert typed_config(config, cls=SFTConfig).model.path == f"{files}/model"
