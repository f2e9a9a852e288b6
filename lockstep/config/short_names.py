"""Short names of the settings that most runs need, for the command line, YAML files and `lockstep.train`.

    lockstep grpo model=Qwen/Qwen2.5-0.5B-Instruct data=train.jsonl reward=my_reward.py n=8 lr=1e-6 steps=100

`model` and `data` are also sections: a mapping is the section, any other value the short name.
"""

from collections.abc import Mapping
from typing import Any

from lockstep.config.batch_sizes import MINI
from lockstep.config.errors import nearest
from lockstep.config.estimators import ADV_KWARGS
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.plugin_settings import LOSS_KEY, LOSS_KWARGS
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import keys, sections
from lockstep.config.sft import SFTConfig

_LENGTHS = {
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
}
_TRAINING = {
    "data": "data.train_files",
    "val_data": "data.val_files",
    "steps": "trainer.total_training_steps",
    "batch_size": "data.train_batch_size",
    "run_dir": "trainer.default_local_dir",
}
_SUPERVISED = {"model": "model.path", **_TRAINING, "lr": "optim.lr", "max_length": "data.max_length"}
RL = {
    "model": "actor_rollout_ref.model.path",
    **_TRAINING,
    "reward": "custom_reward_function.path",
    "n": "actor_rollout_ref.rollout.n",
    "lr": "actor_rollout_ref.actor.optim.lr",
    **_LENGTHS,
    "loss": LOSS_KEY,
    "loss_kwargs": LOSS_KWARGS,
    "adv_kwargs": ADV_KWARGS,
}
SHORT_NAMES: dict[type, dict[str, str]] = {
    PPOConfig: RL,
    SFTConfig: _SUPERVISED,
    RMConfig: _SUPERVISED,
    DPOConfig: _SUPERVISED,
    GenerationConfig: {
        "model": "model.path",
        "data": "data.path",
        "n": "data.n_samples",
        "batch_size": "data.batch_size",
        **_LENGTHS,
    },
    EvaluationConfig: {"data": "data.path", "reward": "custom_reward_function.path"},
}
"""Root config class -> short name -> key. A name of `reward` that is no file is a scorer's (`reward_setting`)."""

USUAL_NAMES = {
    **dict.fromkeys(("learning_rate", "actor_lr"), "lr"),
    **dict.fromkeys(("num_generations", "group_size", "num_samples", "n_samples"), "n"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "train_steps"), "steps"),
    **dict.fromkeys(("output_dir", "save_dir", "checkpoint_dir"), "run_dir"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "rollout_batch_size"), "batch_size"),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_tokens", "response_length"), "max_response_length"
    ),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "model_id"), "model"),
    **dict.fromkeys(("train_dataset", "train_data", "dataset", "train_files"), "data"),
    **dict.fromkeys(("eval_dataset", "val_dataset", "test_data", "val_files"), "val_data"),
    **dict.fromkeys(("reward_funcs", "reward_fn", "reward_function", "compute_score"), "reward"),
    **dict.fromkeys(("max_seq_length", "max_seq_len"), "max_length"),
    **dict.fromkeys(("num_train_epochs", "epochs", "num_epochs"), "trainer.total_epochs"),
    **dict.fromkeys(("beta", "kl_coef", "kl_coeff"), "actor_rollout_ref.actor.kl_loss_coef"),
    **dict.fromkeys(("epsilon", "clip_range", "cliprange"), "actor_rollout_ref.actor.clip_ratio"),
    "epsilon_high": "actor_rollout_ref.actor.clip_ratio_high",
    "num_iterations": "actor_rollout_ref.actor.ppo_epochs",
    "mini_batch_size": MINI,
    "gradient_accumulation_steps": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
    "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "warmup_ratio": "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "lora_r": "actor_rollout_ref.model.lora_rank",
    "tools": "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "use_vllm": "actor_rollout_ref.rollout.name=vllm",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "loss_type": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
    "seed": "trainer.seed",
    "num_gpus": "trainer.n_gpus_per_node",
}
"""Names in other libraries -> ours, for suggestions. Keys are those of PPO."""


def short_setting(cls: type, name: str, value: Any) -> tuple[str, Any] | None:
    """The key that `name` stands for, with its value; None if it is no short name, or the section of that name is meant."""
    key = SHORT_NAMES.get(cls, {}).get(name)
    is_section = name in sections(cls) or name in ("model", "reward")
    if key is None or (is_section and (value is None or isinstance(value, Mapping))):
        return None
    return reward_setting(value) if name == "reward" else (key, value)


def reward_setting(value: Any) -> tuple[str, Any]:
    """A reward that is a file or `module:function` is the user's function, any other name a built-in scorer."""
    text = str(value)
    if ":" in text or text.endswith(".py"):
        return "custom_reward_function.path", value
    return "custom_reward_function.reward_kwargs", {"scorer": value}


def suggestion(cls: type, name: str) -> str | None:
    """Our name for an unknown key of one word: of another library, or a misspelt short name."""
    short = SHORT_NAMES.get(cls, {})
    ours = USUAL_NAMES.get(name)
    if ours in short:
        return f"{ours} ({short[ours]})"
    if ours is not None:
        is_known = ours.partition("=")[0] in keys(cls)
        return ours if is_known else next((key for key in keys(cls) if key.endswith(_last(ours))), None)
    near = None if "." in name else nearest(name, short, cutoff=0.7)
    return f"{near} ({short[near]})" if near else None


def _last(key: str) -> str:
    return f".{key.rpartition('.')[2]}"
