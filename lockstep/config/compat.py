"""How verl's configurations differ from ours: the tables that `normalize` applies.

ALIASES             other spellings of a key or a section, read as the canonical one (one notice each)
VALUE_ALIASES       other spellings of a value
UNSUPPORTED_KEYS    keys of unsupported features: values that request nothing are accepted, others are a problem
UNSUPPORTED_VALUES  values of existing keys that select an unsupported feature
NO_EFFECT           keys that tune something which works differently here: ignored, with a notice

A key that gains support leaves its table; a test checks that. `TABLES` holds those of PPO; sft_compat.py and
generation_compat.py have those of the other programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from lockstep.config.algorithm import KL_ALIASES, KL_ESTIMATORS
from lockstep.config.roles import SECTIONS
from lockstep.config.trainer import LOGGERS

NOT_SUPPORTED = "not supported"
"""How the message about a missing feature begins."""

T = TypeVar("T")

_ARR = "actor_rollout_ref"
_ROLES = tuple(sections.role for sections in SECTIONS.values())
_MODELS = tuple(dict.fromkeys(sections.model for sections in SECTIONS.values()))
_ENGINES = tuple(sections.fsdp for sections in SECTIONS.values())
_MEGATRON = tuple(sections.of_engine("megatron") for sections in SECTIONS.values())
_OPTIMIZERS = (f"{_ARR}.actor.optim", "critic.optim")


def _in_each(sections: tuple[str, ...], entries: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries in each of `sections`."""
    return {f"{section}.{name}": entry for section in sections for name, entry in entries.items()}


PROFILER_ALIASES = {
    "profiler.tool": "global_profiler.tool",
    "profiler.save_path": "global_profiler.save_path",
    "profiler.tool_config": "global_profiler.global_tool_config",
    "profiler.discrete": "global_profiler.global_tool_config.nsys.discrete",
}
"""Keys that verl has in the `profiler` section of each role; here one tool profiles all roles."""

ALIASES: dict[str, str] = {
    "actor": f"{_ARR}.actor",
    "rollout": f"{_ARR}.rollout",
    "ref": f"{_ARR}.ref",
    "model": f"{_ARR}.model",
    "multi_turn": f"{_ARR}.rollout.multi_turn",
    f"{_ARR}.actor.freeze_vision_tower": f"{_ARR}.model.freeze_vision_tower",
    "profile_steps": "trainer.profile_steps",
    "global_profiler.steps": "trainer.profile_steps",
    f"{_ARR}.profiler": f"{_ARR}.actor.profiler",
    f"{_ARR}.rollout.profiler": f"{_ARR}.actor.profiler",
    "ray_kwargs.ray_init": "ray_init",
    "ray_kwargs.timeline_json_file": "ray_init.timeline_json_file",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward_manager.name": "reward_model.reward_manager",
    "reward_model.timeout": "reward_model.timeout_s",
    **{
        f"reward.{name}": f"reward_model.{name}"
        for name in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request")
    },
    "reward.timeout": "reward_model.timeout_s",
    "data.test_files": "data.val_files",
    f"{_ARR}.rollout.max_new_tokens": "data.max_response_length",
    f"{_ARR}.actor.max_grad_norm": f"{_ARR}.actor.grad_clip",
    f"{_ARR}.actor.ppo_micro_batch_size": f"{_ARR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_ARR}.rollout.router_replay": f"{_ARR}.actor.router_replay",
    f"{_ARR}.actor.use_remove_padding": f"{_ARR}.model.use_remove_padding",
    f"{_ARR}.rollout.log_prob_micro_batch_size": f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_ARR}.ref.log_prob_micro_batch_size": f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu",
    "critic.fsdp_config": "critic.model.fsdp_config",
    "critic.max_grad_norm": "critic.grad_clip",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
} | {
    f"{section}.{written}": f"{section}.{name}"
    for section in _OPTIMIZERS
    for written, name in {
        "warmup_steps": "lr_warmup_steps",
        "warmup_style": "lr_scheduler_type",
        "lr_decay_style": "lr_scheduler_type",
        "lr_decay_steps": "total_training_steps",
    }.items()
}
ALIASES |= _in_each(_ROLES, PROFILER_ALIASES) | {
    f"{section}{name}_nsight_options": f"global_profiler.global_tool_config.nsys.{name}_nsight_options"
    for section in ("", "trainer.")
    for name in ("controller", "worker")
}

VALUE_ALIASES: dict[str, dict[str, str]] = {
    "algorithm.kl_penalty": KL_ALIASES,
    f"{_ARR}.actor.kl_loss_type": KL_ALIASES,
    f"{_ARR}.rollout.name": {"naive": "hf"},
    f"{_ARR}.rollout.load_format": dict.fromkeys(("dummy_dtensor", "dummy_hf", "dummy_megatron"), "dummy")
    | dict.fromkeys(("dtensor", "hf", "megatron"), "auto"),
    **{f"{section}.optimizer": dict.fromkeys(("adam", "adamw"), "AdamW") for section in _OPTIMIZERS},
}


@dataclass(frozen=True)
class Unsupported:
    """A key or section of verl whose feature is missing here.

    reason:   what happens instead, and what to set.
    harmless: values that do not request the feature.
    switches: for a section, the keys that turn it on; the others are ignored while these are harmless.
    """

    reason: str
    harmless: tuple[Any, ...] = (None, False)
    switches: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return f"{NOT_SUPPORTED}: {self.reason}"

    def is_requested_by(self, value: Any) -> bool:
        """Whether `value` requests the feature; an interpolation does not."""
        if isinstance(value, Mapping):
            return any(self.is_requested_by(item) for name, item in value.items() if name != "_target_")
        if isinstance(value, str) and (value.startswith("${") or value == "???"):
            return False
        return not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.harmless)


_MEGATRON_LORA = Unsupported(
    "Megatron trains no adapters; set strategy=fsdp, and lora_rank, lora_alpha, target_modules and lora_adapter_path of the model",
    harmless=(None, False, 0),
    switches=("rank", "adapter_path"),
)
_8_BIT = Unsupported(
    "with lora_rank the frozen model is held in fsdp_config.dtype, or in 4 bits with load_in_4bit; set false"
)
_MTP = Unsupported(
    "models predict one token at a time; set enable=false", switches=("enable", "enable_train", "enable_rollout")
)
_ONE_WORKER = Unsupported("each worker holds the whole rollout model; set 1", harmless=(None, 1))
_REF_ROUTING = Unsupported(
    f"the reference policy chooses its own experts; set {_ARR}.actor.router_replay and leave this disabled",
    (None, False, "disabled"),
    ("mode",),
)
_ROUTE_FILE = Unsupported("experts are recorded in the batch, not in files; set null")
_NO_WSD = "schedules are constant, linear and cosine; set lr_scheduler_type to one of them"
_OTHER_PROGRAM = Unsupported("it is a key of `lockstep generate` and `lockstep eval`; remove it to train")
_OWN_MANAGER = Unsupported(
    "select your own reward manager with reward_model.reward_manager=path/to/file.py:Class",
    harmless=(None, "register"),
)

UNSUPPORTED_KEYS: dict[str, Unsupported] = {
    f"{_ARR}.rollout.multi_turn.num_repeat_rollouts": Unsupported("set rollout.n"),
    f"{_ARR}.rollout.agent.custom_async_server": Unsupported(
        "responses are generated in the worker process; set path to null", switches=("path",)
    ),
    f"{_ARR}.model.hf_config_path": Unsupported("the model's config.json is read from model.path; set null"),
    f"{_ARR}.model.mtp": _MTP,
    f"{_ARR}.rollout.mtp": _MTP,
    f"{_ARR}.rollout.quantization_config_file": Unsupported(
        "set quantization, or rollout.engine_kwargs.vllm.hf_overrides with rollout.name=vllm"
    ),
    f"{_ARR}.rollout.data_parallel_size": _ONE_WORKER,
    f"{_ARR}.rollout.expert_parallel_size": _ONE_WORKER,
    f"{_ARR}.rollout.pipeline_model_parallel_size": _ONE_WORKER,
    f"{_ARR}.rollout.skip_rollout": Unsupported("every step generates; set false"),
    f"{_ARR}.rollout.scheduling_policy": Unsupported("requests run in order of arrival; set fcfs", (None, "fcfs")),
    f"{_ARR}.actor.router_replay.record_file": _ROUTE_FILE,
    f"{_ARR}.actor.router_replay.replay_file": _ROUTE_FILE,
    f"{_ARR}.ref.router_replay": _REF_ROUTING,
    f"{_ARR}.rollout.trace": Unsupported(
        "there is no tracing service; set trainer.rollout_data_dir to write every rollout", switches=("backend",)
    ),
    f"{_ARR}.rollout.prometheus": Unsupported(
        "metrics go to trainer.logger; set prometheus.enable=false", switches=("enable",)
    ),
    "global_profiler.global_tool_config.torch_memory.kw_args": Unsupported(
        "set context, stacks or trace_alloc_max_entries next to it", (None, {})
    ),
    "trainer.del_local_ckpt_after_load": Unsupported("checkpoints are kept after loading; set false"),
    "trainer.esi_redundant_time": Unsupported("the end of a cloud instance is not detected; set 0", (None, False, 0)),
    "reward_manager.source": _OWN_MANAGER,
    "reward_manager.module": Unsupported(_OWN_MANAGER.reason, switches=("path",)),
    "reward_model.reward_loop_source": _OWN_MANAGER,
    "reward_model.reward_loop_module_path": _OWN_MANAGER,
    "reward_model.reward_loop_class_name": _OWN_MANAGER,
    "reward_model.rollout": Unsupported(
        "reward models are classifiers and do not generate; set name to null", switches=("name",)
    ),
    "reward_model.max_length": Unsupported("the reward model reads the whole sequence; set null"),
    "data.path": _OTHER_PROGRAM,
    "data.output_path": _OTHER_PROGRAM,
    "data.n_samples": _OTHER_PROGRAM,
    "data.batch_size": _OTHER_PROGRAM,
    "data.response_key": _OTHER_PROGRAM,
    "data.data_source_key": _OTHER_PROGRAM,
    "data.reward_model_key": _OTHER_PROGRAM,
    "data.datagen": Unsupported("prompts are read from files; set path to null", switches=("path",)),
    "transfer_queue": Unsupported(
        "batches are kept in the controller's memory; set enable=false", switches=("enable",)
    ),
}
UNSUPPORTED_KEYS |= _in_each(
    _ROLES,
    {"load_weight": Unsupported("weights are always loaded from the model's path; set true", (None, True))},
)
UNSUPPORTED_KEYS |= _in_each(
    _MODELS[:2],
    {
        "lora": _MEGATRON_LORA,
        "load_in_8bit": _8_BIT,
        "enable_activation_offload": Unsupported(
            "set enable_gradient_checkpointing=true to recompute activations instead"
        ),
        "tiled_mlp": Unsupported("MLPs are not tiled; set enabled=false", switches=("enabled",)),
    },
)
UNSUPPORTED_KEYS |= _in_each(
    _ENGINES,
    {
        "strategy": Unsupported(
            "these are settings of FSDP2; select the engine by strategy of the role", (None, "fsdp", "fsdp2")
        ),
    },
)
UNSUPPORTED_KEYS |= _in_each(
    _OPTIMIZERS,
    {
        "optimizer_impl": Unsupported("the optimizer is torch.optim.AdamW; set torch.optim", (None, "torch.optim")),
        "override_optimizer_config": Unsupported(
            "set the keys next to this one (betas, weight_decay), and optimizer_offload of the engine"
        ),
        "lr_warmup_init": Unsupported("the warm-up begins at 0; set 0", (None, 0)),
        "weight_decay_incr_style": Unsupported("weight decay is constant; set constant", (None, "constant")),
        "lr_wsd_decay_style": Unsupported(_NO_WSD, (None, "exponential")),
        "lr_wsd_decay_steps": Unsupported(_NO_WSD, (None,)),
        "use_checkpoint_opt_param_scheduler": Unsupported(
            "on resume the schedule has its position from the checkpoint and its settings from the config; set false"
        ),
    },
)

_SAMPLED_KL = f"KL is estimated from the sampled tokens; set one of {', '.join(KL_ESTIMATORS)}"

UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
    f"{_ARR}.rollout.name": {"trtllm": "set embedded, hf, vllm, sglang, tgi or server"},
    "trainer.device": {"npu": "training runs on cuda and cpu"},
    "global_profiler.tool": dict.fromkeys(("npu", "precision_debugger"), "set torch, nsys or torch_memory"),
    "trainer.logger": dict.fromkeys(
        ("vemlp_wandb", "clearml", "trackio", "rl_insight"), f"use any of {', '.join(LOGGERS)}"
    ),
    "algorithm.kl_penalty": {"full": _SAMPLED_KL},
    f"{_ARR}.actor.kl_loss_type": {"full": _SAMPLED_KL},
}

_ALWAYS_CHUNKED = "entropy and log-probs are always computed in chunks"
_NO_COMPILE = "torch.compile is not used"
_FUSED = "log-probs are always computed without the full logits"
_OTHER_ENGINE = "it tunes an engine with its own copy of the weights"
_NO_SHM = "files are not copied to shared memory"
_NPU = "training runs on cuda and cpu"
_NO_BRIDGE = "weights are converted by names and layouts of our own"
_FROM_PATH = "weights are loaded from the model's path, and checkpoints have one format for all engines"

NO_EFFECT: dict[str, str] = {
    f"{_ARR}.actor.use_prefix_grouper": "a prompt shared by several samples is always computed once (packed sequences)",
    f"{_ARR}.actor.use_fused_kernels": _FUSED,
    f"{_ARR}.actor.sum_pi_squared_checkpointing": _ALWAYS_CHUNKED,
    **{
        f"{section}.rollout_n": f"it follows {_ARR}.rollout.n" for section in (f"{_ARR}.actor", f"{_ARR}.ref", "critic")
    },
    f"{_ARR}.model.use_fused_kernels": _FUSED,
    f"{_ARR}.model.fused_kernel_options": _FUSED,
    f"{_ARR}.model.impl_backend": _FUSED,  # where verl's legacy_ppo_trainer.yaml has an option of fused_kernel_options
    f"{_ARR}.model.use_liger": "fused kernels are applied automatically to the layers that have them",
    f"{_ARR}.rollout.layered_summon": _OTHER_ENGINE,
    f"{_ARR}.rollout.layer_name_map": _OTHER_ENGINE,
    f"{_ARR}.rollout.checkpoint_engine.engine_kwargs": _OTHER_ENGINE,
    f"{_ARR}.rollout.multi_stage_wake_up": _OTHER_ENGINE,
    f"{_ARR}.rollout.skip_tokenizer_init": _OTHER_ENGINE,
    f"{_ARR}.rollout.cudagraph_capture_sizes": "CUDA graphs are captured when a batch size is first used",
    f"{_ARR}.rollout.logprobs_mode": "log-probs are always those of the policy at the sampling temperature",
    f"{_ARR}.rollout.skip_dump_dir": "it is used only with skip_rollout",
    f"{_ARR}.rollout.agent.max_concurrent_requests": f"{_ARR}.rollout.max_num_seqs limits how many sequences decode at once",
    f"{_ARR}.rollout.multi_turn.tokenization_sanity_check_mode": "sampled tokens are never tokenized again",
    "data.tool_config_path": f"prompts are rendered with the tools of {_ARR}.rollout.multi_turn.tool_config_path",
    "reward_model.launch_reward_fn_async": f"rewards are computed while others are generated ({_ARR}.rollout.mode=async)",
    "reward_model.use_reward_loop": "there is one reward implementation",
    "reward_model.num_workers": "set reward_model.reward_kwargs.num_workers instead",
    "reward_model.model.use_fused_kernels": _FUSED,
    "data.return_raw_input_ids": "the prompt's tokens are always kept",
    "data.return_full_prompt": "the prompt's messages are always kept",
    "data.return_multi_modal_inputs": "the processor's tensors of images are always kept",
    "data.image_patch_size": "the model's processor has it",
    "data.use_shm": _NO_SHM,
    "trainer.npu_profile": _NPU,
    "global_profiler.global_tool_config.npu": _NPU,
    "global_profiler.global_tool_config.torch_memory.stack_depth": "stack traces are complete",
    "trainer.ray_wait_register_center_timeout": "the controller waits until workers respond or die",
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
}
NO_EFFECT |= _in_each(
    (*_ROLES[:2], *_ENGINES),
    {
        "entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
        "entropy_checkpointing": _ALWAYS_CHUNKED,
        "use_torch_compile": _NO_COMPILE,
    },
)
NO_EFFECT |= _in_each(
    _ENGINES,
    {
        "use_orig_params": "FSDP2 always keeps the original parameters",
        "forward_only": "the role decides whether a model is trained",
    },
)
NO_EFFECT |= _in_each(
    _MEGATRON,
    {
        "use_mbridge": _NO_BRIDGE,
        "vanilla_mbridge": _NO_BRIDGE,
        "use_dist_checkpointing": _FROM_PATH,
        "dist_checkpointing_path": _FROM_PATH,
        "dist_checkpointing_prefix": _FROM_PATH,
        "dist_ckpt_optim_fully_reshardable": _FROM_PATH,
        "distrib_optim_fully_reshardable_mem_efficient": _FROM_PATH,
        "forward_only": "the role decides whether a model is trained",
        "use_remove_padding": "Megatron's rows are always packed",
        "override_mcore_model_config": "set override_transformer_config, or override_config of the model",
    },
)
NO_EFFECT |= _in_each(_MODELS, {"use_shm": _NO_SHM})


def moved(table: Mapping[str, T], sections: Mapping[str, str]) -> dict[str, T]:
    """The entries of a table of PPO that apply to another program, under their names there.

    sections: section or key of PPO -> of the program.
    """
    return {
        here + name.removeprefix(there): entry
        for name, entry in table.items()
        for there, here in sections.items()
        if name.startswith(there)
    }


@dataclass(frozen=True)
class Tables:
    """The tables of one program; see the top of this file."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    value_aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unsupported_keys: Mapping[str, Unsupported] = field(default_factory=dict)
    unsupported_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    no_effect: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def keys(self) -> set[str]:
        """Keys that are not part of the schema."""
        return {*self.aliases, *self.unsupported_keys, *self.no_effect}


TABLES = Tables(ALIASES, VALUE_ALIASES, UNSUPPORTED_KEYS, UNSUPPORTED_VALUES, NO_EFFECT)
