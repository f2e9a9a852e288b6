"""Aliases, unsupported keys, and whole configurations as users of verl write them."""

import logging
from pathlib import Path

import pytest

from lockstep.config import checks
from lockstep.config.compat import ALIASES, NO_EFFECT, UNSUPPORTED_KEYS, UNSUPPORTED_VALUES, VALUE_ALIASES
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.placement import controller_of, num_workers
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import keys, sections


def load(overrides: list[str], **kwargs: object) -> PPOConfig:
    return load_config(PPOConfig, overrides, run_checks=False, **kwargs)  # type: ignore[arg-type]


def test_tables_match_the_schema() -> None:
    known = {*keys(PPOConfig), *sections(PPOConfig)}
    assert {target for target in ALIASES.values() if target not in {*UNSUPPORTED_KEYS, *NO_EFFECT}} <= known
    assert {*VALUE_ALIASES, *UNSUPPORTED_VALUES} <= known
    assert not known & {*ALIASES, *UNSUPPORTED_KEYS, *NO_EFFECT}


def test_alias_logs_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load(["critic.optim.warmup_steps=10", "critic.optim.warmup_steps=11"])
    assert config.critic.optim.lr_warmup_steps == 11
    assert caplog.messages == ["critic.optim.warmup_steps is read as critic.optim.lr_warmup_steps"]


def test_aliases_of_keys_sections_and_values() -> None:
    config = load(
        [
            "actor.max_grad_norm=0.5",
            "actor.ppo_micro_batch_size=4",
            "actor.fsdp_config.param_offload=true",
            "rollout.max_new_tokens=77",
            "critic.fsdp_config={param_offload: true}",
            "critic.optim.warmup_style=cosine",
            "ray_kwargs.ray_init.num_cpus=3",
            "ray_kwargs.timeline_json_file=t.json",
            "reward_manager.name=batch",
            "algorithm.kl_penalty=k3",
        ]
    )
    actor = config.actor_rollout_ref.actor
    assert (actor.grad_clip, actor.ppo_micro_batch_size_per_gpu, actor.fsdp_config.param_offload) == (0.5, 4, True)
    assert config.data.max_response_length == config.actor_rollout_ref.rollout.response_length == 77
    assert config.critic.model.fsdp_config.param_offload and config.critic.optim.lr_scheduler_type == "cosine"
    assert (config.ray_init.num_cpus, config.ray_init.timeline_json_file) == (3, "t.json")
    assert (config.reward_model.reward_manager, config.algorithm.kl_penalty) == ("batch", "low_var_kl")


def test_later_layer_wins_regardless_of_spelling(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("actor_rollout_ref: {rollout: {max_new_tokens: 100, name: vllm}}\n")
    config = load(["data.max_response_length=50", "rollout.name=embedded"], config_name="my", config_dir=tmp_path)
    assert config.actor_rollout_ref.rollout.response_length == 50


def test_contradicting_spellings_in_one_file(tmp_path: Path) -> None:
    text = "rollout: {max_new_tokens: 100}\ndata: {max_response_length: 50}\n"
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"data\.max_response_length=50: contradicts rollout\.max_new_tokens=100"):
        load([], config_name="my", config_dir=tmp_path)


def test_values_that_request_nothing_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(
            [
                "+trainer.default_hdfs_dir=null",
                "+actor_rollout_ref.model.lora={rank: 0, alpha: 32}",
                "+actor_rollout_ref.rollout.multi_turn={enable: false, max_user_turns: 4}",
                "+critic.optim.warmup_style=null",
                "+algorithm.rollout_correction.rollout_is=null",
                "+algorithm.rollout_correction.rollout_is_threshold=2.0",
            ]
        )
    assert caplog.messages == []


def test_unsupported_features_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            [
                "multi_turn.num_repeat_rollouts=4",
                "+model.lora={rank: 8, alpha: 32}",
                "actor.optim.lr_wsd_decay_steps=10",
                "critic.load_weight=false",
                "rollout.name=trtllm",
                "global_profiler.tool=npu",
                "trainer.logger=[console,clearml]",
            ]
        )
    assert [str(problem) for problem in caught.value.problems] == [
        "multi_turn.num_repeat_rollouts=4: not supported: set rollout.n",
        "model.lora.rank=8: not supported: Megatron trains no adapters; set strategy=fsdp, and lora_rank, lora_alpha, "
        "target_modules and lora_adapter_path of the model",
        "actor.optim.lr_wsd_decay_steps=10: not supported: schedules are constant, linear and cosine; set lr_scheduler_type to "
        "one of them",
        "critic.load_weight=false: not supported: weights are always loaded from the model's path; set true",
        "actor_rollout_ref.rollout.name=trtllm: not supported: set embedded, hf, vllm, sglang, tgi or server",
        "global_profiler.tool=npu: not supported: set torch, nsys or torch_memory",
        "trainer.logger=[console,clearml]: clearml is not supported: use any of console, file, tensorboard, wandb, "
        "mlflow, swanlab",
    ]


def test_command_line_can_revert_an_unsupported_setting(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("rollout: {multi_turn: {num_repeat_rollouts: 4}, quantization: fp8}\n")
    load(["multi_turn.num_repeat_rollouts=null", "~rollout.quantization"], config_name="my", config_dir=tmp_path)


def test_settings_without_effect_log_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(["rollout.agent.max_concurrent_requests=4", "actor_rollout_ref.actor.entropy_checkpointing=true"])
    assert any("rollout.agent.max_concurrent_requests has no effect: " in message for message in caplog.messages)


def test_servers_of_agents_are_refused() -> None:
    load(["rollout.agent.default_agent_loop=tool_agent", "rollout.agent.custom_async_server.path=null"])
    with pytest.raises(ConfigError, match=r"custom_async_server\.path=a\.py: not supported"):
        load(["rollout.agent.custom_async_server.path=a.py"])


def test_alias_that_interpolates_the_canonical_key_is_ignored() -> None:
    config = load(["actor.use_remove_padding='${oc.select:actor_rollout_ref.model.use_remove_padding,false}'"])
    assert config.actor_rollout_ref.model.use_remove_padding


LEGACY = """\
actor_rollout_ref:
  model: {fused_kernel_options: null, impl_backend: torch}
critic:
  ppo_micro_batch_size: null
  ppo_micro_batch_size_per_gpu: null
  forward_micro_batch_size: ${critic.ppo_micro_batch_size}
  forward_micro_batch_size_per_gpu: ${critic.ppo_micro_batch_size_per_gpu}
trainer:
  profile_steps: null
  npu_profile: {options: {save_path: ./profiler_data, roles: [all], with_npu: true}}
"""


@pytest.mark.parametrize("setting", ["critic.ppo_micro_batch_size=4", "critic.ppo_micro_batch_size_per_gpu=4"])
def test_keys_of_verls_legacy_file(tmp_path: Path, setting: str) -> None:
    (tmp_path / "legacy_ppo_trainer.yaml").write_text(LEGACY)
    config = load([setting], config_name="legacy_ppo_trainer", config_dir=tmp_path)
    assert config.critic.ppo_micro_batch_size_per_gpu == config.critic.forward_micro_batch_size_per_gpu == 4


def test_no_critic() -> None:
    assert load(["critic=null"]).critic.enable is False


GROUPED = """\
algorithm: {{adv_estimator: grpo, gamma: 1.0, use_kl_in_reward: false}}
data:
  train_files: ['{train}']
  val_files: ['{val}']
  train_batch_size: 64
  max_prompt_length: 32
  max_response_length: 32
actor_rollout_ref:
  model: {{path: {model}, use_remove_padding: true, enable_gradient_checkpointing: true, lora_rank: 0}}
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 16
    clip_ratio_low: 0.8
    clip_ratio_high: 1.2
    optim: {{lr: 1e-6, warmup_steps: 10, total_training_steps: 1000}}
    fsdp_config: {{param_offload: true, optimizer_offload: true}}
  rollout: {{name: {engine}, mode: async, tensor_model_parallel_size: {tp}, n: 16, temperature: 1.0, top_p: 0.9}}
trainer:
  nnodes: 1
  n_gpus_per_node: {gpus}
  total_epochs: 1
  save_freq: 100
  test_freq: 50
  default_hdfs_dir: null
  logger: [console, wandb]
"""

WITH_CRITIC = """
algorithm: {{adv_estimator: gae, gamma: 0.99, lam: 0.95, use_kl_in_reward: true, kl_ctrl: {{kl_coef: 0.01}}}}
critic:
  strategy: fsdp
  ppo_mini_batch_size: 16
  optim: {{lr: 5e-6}}
  fsdp_config: {{param_offload: true}}
data: {{train_files: '{train}', train_batch_size: 64}}
actor_rollout_ref: {{model: {{path: {model}}}, actor: {{ppo_mini_batch_size: 16}}}}
"""


def test_a_grpo_configuration(files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "grpo.yaml").write_text(GROUPED.format(**files, engine="embedded", tp=1, gpus=1))
    with caplog.at_level(logging.WARNING):
        config = load_config(PPOConfig, [], config_name="grpo", config_dir=tmp_path)
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2)
    assert actor.optim.lr_warmup_steps == 10
    assert "clip_ratio_high=1.2 are read as the bounds of the ratio" in caplog.text


def test_configuration_for_eight_devices(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo.yaml").write_text(GROUPED.format(**files, engine="vllm", tp=4, gpus=8))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    config = load_config(PPOConfig, [], config_name="grpo", config_dir=tmp_path)
    assert num_workers(config) == 8 and controller_of(config) == "ray"
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4
    changes = ["rollout.name=embedded", "rollout.tensor_model_parallel_size=1"]
    assert (
        load_config(PPOConfig, changes, config_name="grpo", config_dir=tmp_path).actor_rollout_ref.rollout.top_p == 0.9
    )


def test_a_configuration_with_a_critic(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gae.yaml").write_text(WITH_CRITIC.format(**files))
    config = load_config(PPOConfig, [], config_name="gae", config_dir=tmp_path)
    assert config.critic.model.fsdp_config.param_offload and config.critic.optim.lr == 5e-6
    assert config.algorithm.kl_ctrl.kl_coef == 0.01


def test_single_gpu_ppo_command(files: dict[str, str]) -> None:
    config = load_config(
        PPOConfig,
        [
            f"data.train_files={files['train']}",
            f"data.val_files={files['val']}",
            "data.train_batch_size=16",
            "data.max_prompt_length=512",
            "data.max_response_length=256",
            f"actor_rollout_ref.model.path={files['model']}",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
            f"critic.model.path={files['model']}",
            "critic.optim.lr=1e-5",
            "critic.ppo_micro_batch_size_per_gpu=4",
            "algorithm.kl_ctrl.kl_coef=0.001",
            "trainer.logger=console",
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=1",
            "trainer.nnodes=1",
            "trainer.save_freq=10",
            "trainer.test_freq=10",
            "trainer.total_epochs=3",
        ],
    )
    assert config.trainer.logger == ["console"] and config.critic.forward_micro_batch_size_per_gpu == 4


def test_kl_coefficient_turns_the_penalty_on_unless_disabled(caplog: pytest.LogCaptureFixture) -> None:
    on = load_config(overrides=["algorithm.kl_ctrl.kl_coef=0.01"], run_checks=False)
    assert on.algorithm.use_kl_in_reward
    assert "the KL penalty in the reward is on" in caplog.text
    off = load_config(
        overrides=["algorithm.kl_ctrl.kl_coef=0.01", "algorithm.use_kl_in_reward=false"], run_checks=False
    )
    assert not off.algorithm.use_kl_in_reward
    assert not load_config(run_checks=False).algorithm.use_kl_in_reward
