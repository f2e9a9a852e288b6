"""Config sections that programs on verl construct: they read like mappings, and some of their fields may be assigned."""

import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any, Optional

import pytest
import torch
from omegaconf import OmegaConf

from lockstep.config import actor_rollout_ref
from lockstep.config.schema import to_plain
from lockstep.verl.base_config import BaseConfig, dict_like
from lockstep.verl.trainer.config import AlgoConfig, KLControlConfig, RolloutCorrectionConfig
from lockstep.verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss
from lockstep.verl.utils.config import omega_conf_to_dataclass
from lockstep.verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreActorConfig,
    McoreCriticConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    RolloutConfig,
)
from lockstep.verl.workers.config.actor import PolicyLossConfig
from lockstep.workers.losses import actor_loss_fn

pytestmark = pytest.mark.usefixtures("no_registrations")


@dataclass
class Inner(BaseConfig):
    size: int = 1


@dataclass
class Outer(BaseConfig):
    _mutable_fields = {"rate"}  # noqa: RUF012 - as programs write it
    rate: float = 0.5
    name: str = "x"
    inner: Inner = field(default_factory=Inner)
    maybe: Optional[Inner] = None  # noqa: UP045
    options: dict[str, Any] = field(default_factory=dict)


def test_a_programs_own_dataclass() -> None:
    config = Outer()
    assert config["rate"] == config.get("rate") == 0.5 and config.get("none", 2) == 2 and dict(**config)["name"] == "x"
    assert list(config) == ["rate", "name", "inner", "maybe", "options"] and len(config) == 5
    config.rate = 0.75
    assert config.rate == 0.75
    with pytest.raises(FrozenInstanceError, match=r"Outer\.name cannot be assigned \(mutable fields: rate\)"):
        config.name = "y"
    with pytest.raises(KeyError):
        config["none"]
    with pytest.raises(TypeError):
        config[3]  # type: ignore[index]


def test_nested_sections_are_built_by_their_types() -> None:
    given = {"rate": 1.0, "inner": {"size": 3}, "maybe": {"size": 4}, "options": {"a": 1}}
    made = omega_conf_to_dataclass(OmegaConf.create(given), Outer)
    assert made.inner == Inner(3) and made.maybe == Inner(4) and made.options == {"a": 1}
    with pytest.raises(ValueError, match="Inner has no width; it has size"):
        omega_conf_to_dataclass(OmegaConf.create({"inner": {"width": 1}}), Outer)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (ActorConfig(ppo_mini_batch_size=8), "ppo_mini_batch_size", 8),
        (CriticConfig(ppo_epochs=2), "ppo_epochs", 2),
        (RolloutConfig(n=3), "n", 3),
        (FSDPOptimizerConfig(lr=0.1), "lr", 0.1),
        (FSDPEngineConfig(param_offload=True), "param_offload", True),
        (HFModelConfig(path="m"), "path", "m"),
        (PolicyLossConfig(loss_mode="gspo"), "loss_mode", "gspo"),
        (AlgoConfig(gamma=0.9), "gamma", 0.9),
        (KLControlConfig(kl_coef=0.1), "kl_coef", 0.1),
        (RolloutCorrectionConfig.bypass_pg_is(), "loss_type", "reinforce"),
    ],
)
def test_sections_read_like_mappings(config: Any, name: str, value: Any) -> None:
    assert isinstance(config, Mapping) and isinstance(config, BaseConfig)
    assert config[name] == config.get(name) == getattr(config, name) == dict(config)[name] == value
    assert config.get("no_such_key", "default") == "default" and name in config and len(config) == len(list(config))
    with pytest.raises(KeyError):
        config["no_such_key"]
    assert to_plain(config)[name] == value and to_plain(pickle.loads(pickle.dumps(config))) == to_plain(config)


def test_batch_sizes_may_be_assigned_and_others_not() -> None:
    for config in (ActorConfig(ppo_micro_batch_size=4), CriticConfig(ppo_micro_batch_size=4)):
        assert config.ppo_micro_batch_size == config.ppo_micro_batch_size_per_gpu == 4
        for name in ("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"):
            setattr(config, name, 2)
            assert getattr(config, name) == config[name] == 2
        with pytest.raises(AttributeError):
            config.strategy = "megatron"
    with pytest.raises(AttributeError):
        ActorConfig().clip_ratio = 0.5  # type: ignore[misc]
    assert replace(ActorConfig(), clip_ratio=0.3).clip_ratio == 0.3


def test_sections_inside_read_like_mappings_too() -> None:
    actor = ActorConfig(optim=FSDPOptimizerConfig(lr=0.1))
    assert actor.optim["lr"] == 0.1 and actor.policy_loss.get("loss_mode") == "vanilla"
    assert actor["fsdp_config"].get("wrap_policy")["min_num_params"] == 0 and actor.engine is actor.fsdp_config
    assert isinstance(actor.policy_loss.rollout_correction, Mapping)
    assert actor.policy_loss.rollout_correction["bypass_mode"] is False  # which follows another key
    assert AlgoConfig().kl_ctrl["kl_coef"] == AlgoConfig().get("kl_ctrl").kl_coef
    plain = actor_rollout_ref.ActorConfig(clip_ratio=0.4)
    adapted = dict_like(plain)
    assert isinstance(adapted, ActorConfig) and adapted["clip_ratio"] == 0.4 and not isinstance(plain, Mapping)
    again = pickle.loads(pickle.dumps(adapted))
    assert again.checkpoint.get("async_save") is False and again.profiler["all_ranks"] is False


def test_sizes_that_do_not_fit_are_refused() -> None:
    config = ActorConfig(ppo_mini_batch_size=256, ppo_micro_batch_size=8)
    with pytest.raises(ValueError, match=r"train_batch_size=128 must be at least actor_rollout_ref\.actor\.ppo_mini"):
        config.validate(n_gpus=8, train_batch_size=128)
    with pytest.raises(ValueError, match="must be >= n_gpus=16"):
        config.validate(n_gpus=16, train_batch_size=512)
    with pytest.raises(ValueError, match="must be divisible by ppo_micro_batch_size=7"):
        CriticConfig(ppo_mini_batch_size=256, ppo_micro_batch_size=7).validate(1, 256)
    config.validate(n_gpus=8, train_batch_size=256)
    ActorConfig(ppo_mini_batch_size=256, use_dynamic_bsz=True).validate(n_gpus=8, train_batch_size=1)
    parallel = FSDPActorConfig(ulysses_sequence_parallel_size=2, use_dynamic_bsz=True)
    with pytest.raises(ValueError, match="you must enable `use_remove_padding`"):
        parallel.validate(n_gpus=8, train_batch_size=256, model_config={"use_remove_padding": False})
    parallel.validate(8, 256, HFModelConfig())


def test_the_optimizers_implementation() -> None:
    config = FSDPOptimizerConfig(lr=0.1, optimizer_impl="torch.optim", min_lr_ratio=None, num_cycles=1)  # type: ignore[arg-type]
    assert (config.min_lr_ratio, config.num_cycles, config.optimizer_impl) == (0.0, 1.0, "torch.optim")
    with pytest.raises(ValueError, match=r"optim\.optimizer_impl=bitsandbytes\.optim: must be torch\.optim"):
        FSDPOptimizerConfig(optimizer_impl="bitsandbytes.optim")
    with pytest.raises(ValueError, match=r"fsdp_config\.strategy=megatron: must be one of fsdp, fsdp2"):
        FSDPEngineConfig(strategy="megatron")
    assert FSDPEngineConfig(strategy="fsdp2", wrap_policy={"min_num_params": 0}).wrap_policy.get("min_num_params") == 0  # type: ignore[arg-type, attr-defined]


def test_sections_of_megatron() -> None:
    engine = McoreEngineConfig(tensor_model_parallel_size=2, use_mbridge=True, dist_checkpointing_path=None)
    actor = McoreActorConfig(megatron=engine, load_weight=True)
    assert actor.strategy == "megatron" and actor.engine["tensor_model_parallel_size"] == 2
    assert McoreCriticConfig().strategy == "megatron" and McoreCriticConfig().megatron.tensor_model_parallel_size == 1
    with pytest.raises(ValueError, match=r"megatron\.strategy=fsdp: must be megatron"):
        McoreEngineConfig(strategy="fsdp")
    optim = McoreOptimizerConfig(optimizer="adam", lr=1e-3, lr_decay_style="cosine", lr_decay_steps=10, min_lr=1e-4)  # type: ignore[arg-type]
    assert (optim.optimizer, optim.lr_scheduler_type, optim.total_training_steps) == ("AdamW", "cosine", 10)
    with pytest.raises(ValueError, match=r"optim\.lr_wsd_decay_steps=3: must be None"):
        McoreOptimizerConfig(lr_wsd_decay_steps=3)


def test_a_programs_policy_loss_reads_its_config_like_a_mapping() -> None:
    seen: list[Any] = []

    @register_policy_loss("own_of_a_test")
    def own(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):  # type: ignore[no-untyped-def]
        assert isinstance(config, ActorConfig)
        seen.append((config.get("clip_ratio_c", 3.0), config["policy_loss"].get("my_key", 7), config.get("mine")))
        return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {"actor/own": 1.0}

    assert "own_of_a_test" in POLICY_LOSS_REGISTRY
    actor = ActorConfig(clip_ratio_c=4.0, policy_loss=PolicyLossConfig(loss_mode="own_of_a_test"))
    info = {"dp_size": 1, "batch_num_tokens": 2, "global_batch_size": 1}
    rows: Any = {"response_mask": torch.ones(1, 2), "advantages": torch.ones(1, 2), "old_log_probs": torch.zeros(1, 2)}
    loss, metrics = actor_loss_fn(actor, info)({"log_probs": torch.full((1, 2), -1.0)}, rows)
    assert (float(loss), float(metrics["actor/own"]), seen) == (1.0, 1.0, [(4.0, 7, None)])
