"""Keys of Megatron: presets, verl's names, layouts that fit the workers, sections that are not selected."""

import logging
from pathlib import Path

import pytest

from lockstep.config import checks
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig

ACTOR, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "model"))
M = f"{ACTOR}.megatron"
ON = f"{ACTOR}.strategy=megatron"
TP, PP = f"{M}.tensor_model_parallel_size", f"{M}.pipeline_model_parallel_size"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of a config do not import Megatron."""
    monkeypatch.setattr(checks, "is_installed", lambda package: True)


def load(overrides: list[str], **kwargs: object) -> PPOConfig:
    return load_config(PPOConfig, overrides, run_checks=False, **kwargs)  # type: ignore[arg-type]


def problems(*overrides: str, cls: type = PPOConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(cls, overrides)
    return str(caught.value)


def strategies(config: PPOConfig) -> list[str]:
    policy = config.actor_rollout_ref
    return [role.strategy for role in (policy.actor, policy.ref, config.critic, config.reward_model)]


def test_presets(tmp_path: Path) -> None:
    assert strategies(load([], config_name="ppo_megatron_trainer.yaml")) == ["megatron"] * 4
    assert strategies(load(["actor_rollout_ref=megatron"])) == ["megatron"] * 3 + ["fsdp"]
    assert strategies(load(["critic=megatron"])) == ["fsdp", "fsdp", "megatron", "fsdp"]
    lines = ["actor@actor_rollout_ref.actor: megatron_actor", "critic@critic: megatron_critic"]
    lines += ["ref@actor_rollout_ref.ref: megatron_ref", "reward_model@reward_model: megatron_reward_model"]
    (tmp_path / "my.yaml").write_text(f"defaults: [{', '.join('{' + line + '}' for line in lines)}, _self_]\n")
    assert strategies(load([], config_name="my", config_dir=tmp_path)) == ["megatron"] * 4
    sft = load_config(
        SFTConfig, ["engine=megatron", "optim=megatron", "engine.pipeline_model_parallel_size=2"], run_checks=False
    )
    assert (sft.model.strategy, sft.model.megatron.pipeline_model_parallel_size) == ("megatron", 2)
    assert sft.optim.optimizer == "AdamW"


VERL = """\
actor_rollout_ref:
  actor:
    strategy: megatron
    load_weight: true
    optim:
      optimizer: adam
      lr: 1.0e-3
      lr_warmup_init: 0.0
      lr_decay_steps: 20
      lr_decay_style: cosine
      min_lr: 1.0e-4
      weight_decay_incr_style: constant
      lr_wsd_decay_style: exponential
      lr_wsd_decay_steps: null
      use_checkpoint_opt_param_scheduler: false
      override_optimizer_config: {}
    megatron: &engine
      _target_: verl.workers.config.McoreEngineConfig
      param_offload: false
      grad_offload: false
      optimizer_offload: false
      tensor_model_parallel_size: 2
      expert_model_parallel_size: 1
      expert_tensor_parallel_size: null
      pipeline_model_parallel_size: 1
      virtual_pipeline_model_parallel_size: null
      context_parallel_size: 1
      sequence_parallel: true
      use_distributed_optimizer: true
      use_dist_checkpointing: false
      dist_checkpointing_path: null
      dist_checkpointing_prefix: ''
      seed: 7
      override_ddp_config: {}
      override_transformer_config:
        recompute_granularity: null
        recompute_modules: [core_attn]
        recompute_method: null
        recompute_num_layers: null
        attention_backend: flash
      override_mcore_model_config: {}
      use_mbridge: true
      vanilla_mbridge: true
      use_remove_padding: true
      forward_only: false
      dtype: float32
  ref:
    strategy: megatron
    load_weight: true
    megatron:
      param_offload: ${oc.select:actor_rollout_ref.actor.megatron.param_offload,False}
      tensor_model_parallel_size: ${oc.select:actor_rollout_ref.actor.megatron.tensor_model_parallel_size,1}
      expert_tensor_parallel_size: ${oc.select:actor_rollout_ref.actor.megatron.expert_tensor_parallel_size,null}
      override_transformer_config: ${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}
      use_mbridge: ${oc.select:actor_rollout_ref.actor.megatron.use_mbridge,False}
      forward_only: true
      dtype: float32
  rollout:
    layer_name_map: {qkv_layer_name: qkv, gate_proj_layer_name: gate_up}
  model:
    override_config: {model_config: {}, moe_config: {freeze_moe_router: false}}
    use_remove_padding: false
    lora: {type: lora, rank: 0, alpha: 32, target_modules: [linear_qkv], adapter_path: null}
critic:
  strategy: megatron
  load_weight: true
  megatron: *engine
  model:
    override_config: {model_config: {rope_theta: 5}, moe_config: {freeze_moe_router: false}}
reward_model:
  strategy: megatron
  load_weight: true
  megatron:
    tensor_model_parallel_size: 2
    use_distributed_optimizer: false
    seed: ${oc.select:actor_rollout_ref.actor.megatron.seed,42}
    use_mbridge: ${oc.select:actor_rollout_ref.actor.megatron.use_mbridge,False}
"""


def test_the_keys_of_verls_files(tmp_path: Path, minimal: list[str], caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "megatron.yaml").write_text(VERL)
    with caplog.at_level(logging.WARNING):
        config = load_config(
            PPOConfig, [*minimal, "trainer.n_gpus_per_node=2"], config_name="megatron", config_dir=tmp_path
        )
    policy = config.actor_rollout_ref
    assert strategies(config) == ["megatron"] * 4
    assert policy.ref.megatron.tensor_model_parallel_size == 2 and policy.ref.megatron.seed == 7
    assert policy.ref.megatron.override_transformer_config == policy.actor.megatron.override_transformer_config
    optim = policy.actor.optim
    assert (optim.optimizer, optim.lr_scheduler_type, optim.min_lr) == ("AdamW", "cosine", 1e-4)
    assert optim.total_training_steps == 20
    assert policy.model.override_config == {} and config.critic.model.override_config == {"rope_theta": 5}
    assert "settings have no effect" in caplog.text or "use_mbridge has no effect" in caplog.text


def test_every_key_of_verls_section_says_why_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load([f"{M}.use_mbridge=true", f"{M}.use_dist_checkpointing=true", f"{M}.forward_only=true"])
        load(["critic.megatron.override_mcore_model_config={a: 1}", "reward_model.megatron.use_remove_padding=true"])
    for key in ("use_mbridge", "use_dist_checkpointing", "forward_only", "override_mcore_model_config"):
        assert f"megatron.{key} has no effect: " in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{TP}=2", f"{PP}=2", "trainer.n_gpus_per_node=6"],
            f"{TP}=2: {TP}=2 × {PP}=2 × {M}.context_parallel_size=1 is 4 ranks, which does not divide the number of workers in "
            "global_pool (6); set sizes whose product is a divisor, or trainer.n_gpus_per_node to a multiple of 4",
        ),
        (
            [f"{M}.expert_model_parallel_size=4", "trainer.n_gpus_per_node=2"],
            f"{M}.expert_model_parallel_size=4: {M}.expert_tensor_parallel_size=1 × {M}.expert_model_parallel_size=4 × {PP}=1",
        ),
        (
            [f"{M}.virtual_pipeline_model_parallel_size=2"],
            f"{M}.virtual_pipeline_model_parallel_size=2: not supported: a stage is computed in one piece; set null",
        ),
        (
            [
                f"{TP}=2",
                f"{M}.expert_model_parallel_size=2",
                f"{M}.sequence_parallel=false",
                "trainer.n_gpus_per_node=4",
            ],
            f"{M}.sequence_parallel=false: experts on several ranks need it",
        ),
        (
            [f"{M}.context_parallel_size=2", "trainer.n_gpus_per_node=2"],
            f"{M}.context_parallel_size=2: not supported: it needs the attention of TransformerEngine",
        ),
        (
            [f"{TP}=2", "critic.megatron.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=2"],
            f"critic.megatron.tensor_model_parallel_size=1: differs from {TP}=2, but roles in one pool share a layout; set 2, "
            "or another pool",
        ),
        ([f"{TP}=0"], f"{TP}=0: must be greater than 0"),
        ([f"{MODEL}.lora_rank=4"], f"{ON} trains no adapters; set 0, or {ACTOR}.strategy=fsdp"),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"],
            f"{ON} does not split sequences by Ulysses; set 1",
        ),
    ],
)
def test_layouts_that_do_not_fit(minimal: list[str], overrides: list[str], message: str) -> None:
    found = problems(*minimal, ON, *overrides)
    assert message in found and "1 problem in" in found


def test_layouts_that_fit(minimal: list[str]) -> None:
    load_config(PPOConfig, [*minimal, ON, f"{TP}=2", f"{PP}=2", "trainer.n_gpus_per_node=8"])
    load_config(PPOConfig, [*minimal, ON, f"{M}.expert_model_parallel_size=4", "trainer.n_gpus_per_node=4"])
    dense_critic = ["critic.megatron.expert_model_parallel_size=1", "trainer.n_gpus_per_node=4"]
    load_config(PPOConfig, [*minimal, ON, f"{M}.expert_model_parallel_size=2", *dense_critic])
    hybrid = ["trainer.placement=hybrid", "trainer.n_gpus_per_node=4", "critic.megatron.tensor_model_parallel_size=1"]
    load_config(PPOConfig, [*minimal, ON, f"{TP}=2", *hybrid])
    ignored = [f"{ACTOR}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=2"]
    load_config(PPOConfig, [*minimal, ON, *ignored])
    with pytest.raises(ConfigError, match="fsdp_size=3: does not divide"):
        load_config(PPOConfig, [*minimal, *ignored])


def test_tensor_parallel_ranks_do_not_split_sequences(minimal: list[str]) -> None:
    lengths = ["data.max_prompt_length=512", "data.max_response_length=512", f"{ACTOR}.ppo_max_token_len_per_gpu=512"]
    lengths += [f"{ACTOR}.use_dynamic_bsz=true", "trainer.n_gpus_per_node=2"]
    assert "a sequence can have 1024 tokens" in problems(*minimal, ON, f"{TP}=2", *lengths)


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        ([f"{TP}=2"], f"{TP}=2 has no effect: {ACTOR}.strategy is fsdp"),
        ([f"{M}.param_offload=true"], f"{ACTOR}.strategy is fsdp; set {ACTOR}.fsdp_config.param_offload"),
        ([ON, f"{ACTOR}.fsdp_config.param_offload=true"], f"{ACTOR}.strategy is megatron; set {M}.param_offload"),
        (
            [ON, "critic.model.fsdp_config.forward_prefetch=true"],
            "critic.model.fsdp_config.forward_prefetch=True has no effect: critic.strategy is megatron",
        ),
        ([ON, f"{ACTOR}.deepspeed.zero_stage=3"], f"{ACTOR}.deepspeed.zero_stage=3 has no effect"),
        (
            [ON, f"{MODEL}.use_remove_padding=false"],
            "use_remove_padding=False has no effect: Megatron's rows are always",
        ),
        (
            [ON, f"{ACTOR}.use_kl_loss=true", f"{REF}.megatron.use_distributed_optimizer=false"],
            f"{REF}.megatron.use_distributed_optimizer=False has no effect: the reference policy is not trained",
        ),
        (
            [ON, f"{M}.override_transformer_config.attention_backend=flash"],
            f"{M}.override_transformer_config.attention_backend=flash has no effect: ",
        ),
    ],
)
def test_notices(minimal: list[str], overrides: list[str], notice: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*minimal, *overrides])
    assert notice in caplog.text


def test_a_package_that_is_missing(minimal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_installed", lambda package: False)
    found = problems(*minimal, ON)
    assert "1 problem in" in found and f'{ON}: needs megatron-core: pip install "lockstep-rl[megatron]"' in found
    assert "needs DeepSpeed" in problems(*minimal, "critic.strategy=deepspeed")
    supervised = [part.replace("actor_rollout_ref.", "") for part in minimal]
    assert "model.strategy=megatron: needs megatron-core" in problems(
        *supervised, "model.strategy=megatron", cls=SFTConfig
    )


def test_sft(minimal: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    supervised = [part.replace("actor_rollout_ref.", "") for part in minimal] + ["model.strategy=megatron"]
    size = "model.megatron.tensor_model_parallel_size"
    found = problems(*supervised, f"{size}=2", cls=SFTConfig)
    assert f"{size}=2: {size}=2 × " in found and "or torchrun's --nproc_per_node to a multiple of 2" in found
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        config = load_config(SFTConfig, [*supervised, f"{size}=2", "engine.seed=4", "model.use_remove_padding=false"])
    assert config.model.megatron.tensor_model_parallel_size == 2
    assert "model.fsdp_config.seed=4 has no effect: model.strategy is megatron; set model.megatron.seed" in caplog.text
    assert "Megatron's rows are always packed" in caplog.text
