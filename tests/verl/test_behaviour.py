"""What programs on verl rely on, beyond the numbers of the golden vectors."""

import importlib
import json
import logging
import time
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf, open_dict

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.verl import DataProto
from lockstep.verl._config import default_tree, typed_config, view
from lockstep.verl._ray import unwrapped
from lockstep.verl.base_config import BaseConfig
from lockstep.verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from lockstep.verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker
from lockstep.verl.single_controller.base.decorator import Dispatch, register
from lockstep.verl.trainer.config import RolloutCorrectionConfig
from lockstep.verl.trainer.main_ppo import create_rl_dataset
from lockstep.verl.trainer.ppo.core_algos import get_adv_estimator_fn, kl_penalty, register_adv_est
from lockstep.verl.trainer.ppo.metric_utils import process_validation_metrics
from lockstep.verl.trainer.ppo.ray_trainer import Role
from lockstep.verl.trainer.ppo.reward import compute_reward, load_reward_manager
from lockstep.verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_add_to_batch,
)
from lockstep.verl.trainer.ppo.utils import need_critic, need_reference_policy
from lockstep.verl.utils import hf_processor, hf_tokenizer
from lockstep.verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, should_save_ckpt_esi
from lockstep.verl.utils.config import omega_conf_to_dataclass, validate_config
from lockstep.verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from lockstep.verl.utils.debug.metrics import calculate_debug_metrics
from lockstep.verl.utils.device import auto_set_device, get_device_name, get_torch_device
from lockstep.verl.utils.hdfs_io import copy, exists, makedirs
from lockstep.verl.utils.metric import reduce_metrics
from lockstep.verl.utils.profiler import marked_timer, simple_timer
from lockstep.verl.utils.py_functional import append_to_dict, convert_to_regular_types, union_two_dict
from lockstep.verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from lockstep.verl.utils.seqlen_balancing import prepare_dynamic_batch, restore_dynamic_batch
from lockstep.verl.utils.torch_functional import logprobs_from_logits, masked_mean
from lockstep.verl.utils.tracking import Tracking, ValidationGenerationsLogger
from lockstep.verl.workers.config import ActorConfig, CriticConfig, FSDPOptimizerConfig, RolloutConfig
from lockstep.verl.workers.reward_manager import get_reward_manager_cls, register as register_manager
from tests.tiny import save_tiny_model, tiny_tokenizer, write_rows

pytestmark = pytest.mark.usefixtures("no_registrations")


def batch_of(num_rows: int = 5) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(num_rows), "attention_mask": torch.ones(num_rows, 3, dtype=torch.int64)},
        non_tensors={"uid": np.array([f"u{i // 2}" for i in range(num_rows)], dtype=object)},
        meta_info={"temperature": 0.7},
    )


def test_a_batch_survives_padding_chunks_and_workers() -> None:
    class Doubling(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def double(self, data: DataProto) -> DataProto:
            return DataProto.from_dict(tensors={"y": data.batch["x"] * 2})

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def where(self) -> int:
            return self.rank

    from lockstep.single_controller import LocalWorkerGroup

    data = batch_of()
    padded, pad_size = pad_dataproto_to_divisor(data, 2)
    assert (len(padded), pad_size, padded.batch["x"][-1]) == (6, 1, 0)
    assert unpad_dataproto(padded, pad_size).batch["x"].tolist() == list(range(5))
    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Doubling))
    assert group.double(data).batch["y"].tolist() == [0, 2, 4, 6, 8]
    assert group.where() == [0, 1]


def test_kl_and_masks_by_verls_argument_names() -> None:
    log_prob = torch.tensor([[0.0, -1.0]], requires_grad=True)
    value = kl_penalty(logprob=log_prob, ref_logprob=torch.tensor([[0.0, -2.0]]), kl_penalty="k2")
    assert masked_mean(value, mask=torch.tensor([[0, 1]]), axis=-1).tolist() == [0.5]
    logits = torch.tensor([[[0.0, 0.0], [0.0, 100.0]]])
    picked = logprobs_from_logits(logits=logits, labels=torch.tensor([[0, 1]]))
    assert picked.tolist() == [[pytest.approx(np.log(0.5)), pytest.approx(0.0)]]


def test_estimators_are_registered_by_the_value_of_an_enum() -> None:
    class Mine(Enum):
        ZERO = "zero_of_a_test"

    @register_adv_est(Mine.ZERO)
    def zero(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards * 0, token_level_rewards * 0

    assert get_adv_estimator_fn(Mine.ZERO) is get_adv_estimator_fn("zero_of_a_test") is zero


def test_sections_constructed_by_hand_are_complete_and_checked() -> None:
    actor = ActorConfig(clip_ratio=0.3)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.grad_clip, actor.rollout_n) == (0.3, 0.3, 1.0, 1)
    assert CriticConfig(ppo_mini_batch_size=8).ppo_epochs == 1
    with pytest.raises(ValueError, match=r"optim.lr_scheduler_type=cosin: must be one of constant, cosine, linear"):
        FSDPOptimizerConfig(lr_scheduler_type="cosin")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.clip_ratio"):
        ActorConfig(clip_ratio="wide")  # type: ignore[arg-type]


def test_sections_constructed_by_hand_take_older_names() -> None:
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size=2)
    assert actor.ppo_micro_batch_size_per_gpu == 2
    critic = CriticConfig(ppo_micro_batch_size=4)
    assert critic.ppo_micro_batch_size_per_gpu == critic.forward_micro_batch_size_per_gpu == 4
    assert RolloutConfig(log_prob_micro_batch_size=3).log_prob_micro_batch_size_per_gpu == 3
    assert FSDPOptimizerConfig(warmup_style="cosine").lr_scheduler_type == "cosine"
    with pytest.raises(ValueError, match="ppo_micro_batch_size=4 and ppo_micro_batch_size_per_gpu=2: set only one"):
        ActorConfig(ppo_micro_batch_size=4, ppo_micro_batch_size_per_gpu=2)
    section = OmegaConf.create({"_target_": "lockstep.verl.workers.config.ActorConfig", "ppo_micro_batch_size": None})
    assert omega_conf_to_dataclass(section).ppo_micro_batch_size_per_gpu is None


def test_the_presets_of_rollout_correction() -> None:
    own = vars(RolloutCorrectionConfig).items()
    presets = [name for name, value in own if isinstance(value, classmethod) and not name.startswith("_")]
    assert len(presets) == 17
    mask, log_prob = torch.ones(3, 4), torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 0.01 - 1
    for name in presets:
        config = getattr(RolloutCorrectionConfig, name)()
        data = {"old_log_probs": log_prob, "rollout_log_probs": log_prob * 1.001, "response_mask": mask}
        batch, metrics = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors=data), config)
        corrects = not config.bypass_mode and (config.rollout_is or config.rollout_rs) is not None
        assert bool(metrics) == corrects, name
        assert ("rollout_is_weights" in batch.batch) == (corrects and config.rollout_is is not None), name
    assert RolloutCorrectionConfig.decoupled_seq_is(3.0).rollout_is_threshold == 3.0
    assert RolloutCorrectionConfig.bypass_pg_is().loss_type == "reinforce"


def test_offpolicy_metrics_are_numbers_also_without_the_rollout() -> None:
    log_prob, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
    both = compute_offpolicy_metrics(log_prob, log_prob, mask)
    assert all(type(value) is float for value in both.values()) and both["kl"] == 0
    alone = compute_offpolicy_metrics(log_prob, None, mask)
    assert alone == {"training_ppl": pytest.approx(np.e), "training_log_ppl": 1.0}


def test_debug_metrics() -> None:
    old = torch.log(torch.tensor([[0.5, 0.25, 0.9]]))
    rollout = torch.log(torch.tensor([[0.4, 0.25, 0.1]]))
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": torch.tensor([[1, 1, 0]])}
    metrics = calculate_debug_metrics(DataProto.from_dict(tensors=tensors))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.05)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    tensors["response_mask"] = torch.zeros(1, 3)
    assert calculate_debug_metrics(DataProto.from_dict(tensors=tensors))["training/rollout_probs_diff_valid"] == 0


def test_validation_metrics_take_verls_seed() -> None:
    arguments = (["gsm8k"] * 4, ["a"] * 4, {"reward": [0.0, 1.0, 2.0, 4.0]})
    default, same, other = (
        process_validation_metrics(*arguments, **options)["gsm8k"]["reward"]
        for options in ({}, {"seed": 42}, {"seed": 7})
    )
    assert default == same and default["mean@4"] == other["mean@4"] == 1.75
    assert 0 < abs(default["best@2/mean"] - other["best@2/mean"]) < 0.2  # other draws of the same distribution


def test_metrics_are_reduced_by_their_names() -> None:
    metrics = {"actor/loss": [1.0, 3.0], "perf/max_memory": [1, 3], "length/min": [1, 3], "lr": 0.5}
    assert reduce_metrics(metrics) == {"actor/loss": 2.0, "perf/max_memory": 3.0, "length/min": 1.0, "lr": 0.5}


def test_timers_add_up() -> None:
    timing: dict[str, float] = {}
    for timer in (marked_timer, simple_timer, marked_timer):
        with timer("gen", timing):
            time.sleep(0.01)
    with marked_timer("ref", timing, color="olive"):
        pass
    assert 0.03 <= timing["gen"] < 1 and set(timing) == {"gen", "ref"}


def test_dictionaries() -> None:
    data: dict[str, Any] = {}
    append_to_dict(data, {"loss": 1.0})
    append_to_dict(data, {"loss": [2.0, 3.0]}, prefix="")
    append_to_dict(data, {"loss": 4.0}, prefix="val/")
    assert data == {"loss": [1.0, 2.0, 3.0], "val/loss": [4.0]}
    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match="'a' is 1 and 2"):
        union_two_dict({"a": 1}, {"a": 2})
    plain = convert_to_regular_types({"x": OmegaConf.create({"y": [1]})})
    assert plain == {"x": {"y": [1]}} and type(plain["x"]) is dict


def test_boxes() -> None:
    assert last_boxed_only_string(r"so \boxed{1} or \boxed{\frac{1}{2}}.") == r"\boxed{\frac{1}{2}}"
    assert last_boxed_only_string("none") is None
    assert remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}" and remove_boxed(r"\boxed 5") == "5"
    with pytest.raises(AssertionError):
        remove_boxed("5")


def test_dynamic_batches_are_restored() -> None:
    data = batch_of(6)
    data.batch["attention_mask"] = (torch.arange(3) < torch.tensor([3, 1, 2, 3, 1, 2])[:, None]).long()
    parts, rows = prepare_dynamic_batch(data, max_token_len=6)
    assert len(parts) == 2 and all(int(part.batch["attention_mask"].sum()) <= 6 for part in parts)
    joined = torch.cat([part.batch["x"] for part in parts])
    assert restore_dynamic_batch(joined, rows).tolist() == list(range(6))


def test_config_with_keys_of_the_program_and_of_verl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create(default_tree())
    with open_dict(config):
        config.algorithm.my_key = 3
        config.my_section = {"a": "${algorithm.my_key}"}
    config.actor_rollout_ref.actor.clip_ratio = 0.4
    config.actor_rollout_ref.actor.ppo_micro_batch_size = 2  # verl's older name
    with caplog.at_level(logging.WARNING):
        typed = typed_config(config, run_checks=False)
    assert typed.actor_rollout_ref.actor.clip_ratio_low == 0.4
    assert typed.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    assert any("read by your program only: algorithm.my_key, my_section.a" in line for line in caplog.messages)
    full = view(config, typed)
    assert full.my_section.a == 3 and full.actor_rollout_ref.actor.get("ppo_micro_batch_size_per_gpu") == 2
    assert json.dumps(OmegaConf.to_container(full, resolve=True))
    config.actor_rollout_ref.actor.strategy = "megatron-lm"
    with pytest.raises(ConfigError, match=r"no such name\. Did you mean 'megatron'"):
        validate_config(config)


def test_roles_from_the_config_or_from_the_mapping() -> None:
    config = OmegaConf.create(default_tree())
    assert need_critic(config) and not need_reference_policy(config)
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.algorithm.adv_estimator = "grpo"
    assert not need_critic(config) and need_reference_policy(config)
    assert need_reference_policy({Role.RefPolicy: Worker}) and not need_reference_policy({Role.ActorRollout: Worker})


def test_dataclasses_of_a_program(tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class Mine(BaseConfig):
        rate: float = 0.5
        name: str = "x"

    mine = omega_conf_to_dataclass(OmegaConf.create({"rate": 2.0}), Mine)
    assert (
        mine.rate == mine["rate"] == mine.get("rate") == 2.0
        and mine.get("none", 1) == 1
        and list(mine) == ["rate", "name"]
    )
    section = OmegaConf.create({"_target_": "lockstep.verl.workers.config.ActorConfig", "clip_ratio": 0.1})
    assert omega_conf_to_dataclass(section).clip_ratio_high == 0.1
    with pytest.raises(ValueError, match="Mine has no speed; it has name, rate"):
        omega_conf_to_dataclass(OmegaConf.create({"speed": 1}), Mine)


def test_rows_have_prompt_tensors(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = write_rows(tmp_path / "rows.parquet", 2)
    config = OmegaConf.create({"max_prompt_length": 48, "truncation": "left", "prompt_key": "prompt"})
    dataset = RLHFDataset(str(rows), tokenizer, config)
    batch = DataProto.from_single_dict(collate_fn([dataset[0], dataset[1]]))
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    assert ids.shape == (2, 48) and ids[0][mask[0].bool()].tolist() == batch.non_tensor_batch["raw_prompt_ids"][0]
    assert batch.batch["position_ids"][0, -1] == mask[0].sum() - 1
    short = OmegaConf.create({"max_prompt_length": 3, "filter_overlong_prompts": False})
    with pytest.raises(ValueError, match=r"row 0: the prompt has \d+ tokens, more than data\.max_prompt_length=3"):
        RLHFDataset(str(rows), tokenizer, short)


def test_folders_are_validated_on_their_test_split(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 4)
    write_rows(tmp_path / "test.jsonl", 2)
    config = OmegaConf.create({"max_prompt_length": 48, "truncation": "left"})
    sizes = [
        len(create_rl_dataset(str(tmp_path), config, tiny_tokenizer(), is_train=is_train)) for is_train in (True, False)
    ]
    assert sizes == [4, 2]
    custom = {"path": "lockstep.verl.utils.dataset.rl_dataset", "name": "RLHFDataset"}
    assert len(create_rl_dataset([tmp_path], {**config, "custom_cls": custom}, tiny_tokenizer(), is_train=False)) == 2


def test_a_programs_reward_manager(tmp_path: Path) -> None:
    @register_manager("constant_of_a_test")
    class Constant:
        def __init__(
            self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str, value: float
        ) -> None:
            self.value = value

        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            rewards = torch.full((len(data), 3), self.value)
            return (
                {"reward_tensor": rewards, "reward_extra_info": {"acc": [1.0] * len(data)}} if return_dict else rewards
            )

    assert get_reward_manager_cls("constant_of_a_test") is Constant
    config = OmegaConf.create(default_tree())
    config.reward_model.reward_manager = "constant_of_a_test"
    manager = load_reward_manager(config, tiny_tokenizer(), num_examine=0, value=0.5)
    rewards, extra = compute_reward(batch_of(2), manager)
    assert rewards.tolist() == [[0.5] * 3] * 2 and extra == {"acc": [1.0, 1.0]}


@pytest.mark.parametrize(("changes", "score"), [({}, 0.0), ({"format_score": 0.1}, 0.1)])
def test_gsm8k_gives_no_partial_credit_unless_set(changes: dict[str, float], score: float) -> None:
    tokenizer = tiny_tokenizer()
    config = OmegaConf.create(default_tree())
    config.custom_reward_function.reward_kwargs = changes
    response = torch.tensor([tokenizer.encode("#### 7")])
    prompt = torch.tensor([[5]])
    wrong = DataProto.from_dict(
        tensors={"prompts": prompt, "responses": response, "attention_mask": torch.ones(1, response.shape[1] + 1)},
        non_tensors={
            "data_source": np.array(["openai/gsm8k"], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": "8"}], dtype=object),
        },
    )
    assert load_reward_manager(config, tokenizer, num_examine=0)(wrong).sum() == pytest.approx(score)


def test_tokenizer_and_processor(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    assert hf_tokenizer(str(folder), trust_remote_code=False).pad_token_id == 0
    assert hf_processor(str(folder), use_fast=True) is None


def test_tracking_writes_where_the_config_says(tmp_path: Path) -> None:
    config = {"trainer": {"default_local_dir": str(tmp_path)}}
    logger = Tracking("project", "experiment", default_backend=["console", "file"], config=config)
    logger.log(data={"loss": np.float32(0.5)}, step=1)
    logger.log(data={"loss": 0.25}, step=2, backend=["console"])
    ValidationGenerationsLogger().log(["console"], [("2+2", "4", 1.0)], step=1)
    logger.finish()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 0.5


def test_checkpoints_are_found_and_saved_before_an_instance_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.trainer.run.checkpoint import CheckpointStore

    assert find_latest_ckpt_path(None) is None and find_latest_ckpt_path(str(tmp_path)) is None
    CheckpointStore(tmp_path).save(3, lambda folder: (folder / "state").write_text("x") and None)
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_3")
    assert not should_save_ckpt_esi(max_steps_duration=60)
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 100))
    assert should_save_ckpt_esi(max_steps_duration=60) and not should_save_ckpt_esi(30, save_ckpt_duration=10)
    assert should_save_ckpt_esi(30, save_ckpt_duration=10, redundant_time=70)


def test_files_by_path_or_url(tmp_path: Path) -> None:
    makedirs(str(tmp_path / "a"), exist_ok=True)
    (tmp_path / "a" / "x.txt").write_text("hello")
    makedirs("memory://verl_test")
    assert copy(str(tmp_path / "a" / "x.txt"), "memory://verl_test/x.txt") and exists("memory://verl_test/x.txt")
    assert copy("memory://verl_test/x.txt", str(tmp_path / "y.txt"))
    assert (tmp_path / "y.txt").read_text() == "hello"
    with pytest.raises(ValueError, match="one of them must be a local path"):
        copy("memory://a", "memory://b")


def test_devices() -> None:
    config = OmegaConf.create({"trainer": {"device": "auto"}})
    auto_set_device(config)
    assert config.trainer.device == get_device_name() in ("cpu", "cuda")
    assert get_torch_device() is getattr(torch, get_device_name())


def test_classes_wrapped_by_ray_remote() -> None:
    ray = pytest.importorskip("ray")
    from lockstep.verl.single_controller.ray import RayClassWithInitArgs

    class Mine(Worker):
        pass

    assert unwrapped(Mine) is Mine is unwrapped(ray.remote(Mine)) is unwrapped(ray.remote(num_cpus=1)(Mine))
    assert RayClassWithInitArgs(ray.remote(Mine)).cls is Mine


def test_presets_of_the_command_are_not_changed_by_the_stored_config() -> None:
    importlib.import_module("lockstep.verl.trainer.main_ppo")
    assert load_config(PPOConfig, ["algorithm=grpo"], run_checks=False).algorithm.adv_estimator == "grpo"
