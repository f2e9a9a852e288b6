"""The one table of what the public system's configurations say differently.

ALIASES        other spellings of a key or a section, read as the canonical one (one notice each)
VALUE_ALIASES  other spellings of a value
UNSUPPORTED    keys for what this build does not have: values that ask for nothing pass in silence, others are a problem
REFUSED_VALUES values of real keys for what this build does not have
NO_EFFECT      keys that tune what is settled otherwise here: dropped, with a notice
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.errors import NO_VALUE, Problem, show
from lockstep.config.schema import explain_unknown_key, keys, sections

_ARR = "actor_rollout_ref"

ALIASES: dict[str, str] = {
    "actor": f"{_ARR}.actor",
    "rollout": f"{_ARR}.rollout",
    "ref": f"{_ARR}.ref",
    "model": f"{_ARR}.model",
    "multi_turn": f"{_ARR}.rollout.multi_turn",
    "ray_kwargs.ray_init": "ray_init",
    "ray_kwargs.timeline_json_file": "ray_init.timeline_json_file",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward_manager.name": "reward_model.reward_manager",
    "data.test_files": "data.val_files",
    f"{_ARR}.rollout.max_new_tokens": "data.max_response_length",
    f"{_ARR}.actor.max_grad_norm": f"{_ARR}.actor.grad_clip",
    f"{_ARR}.actor.ppo_micro_batch_size": f"{_ARR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_ARR}.actor.use_remove_padding": f"{_ARR}.model.use_remove_padding",
    f"{_ARR}.actor.optim.warmup_steps": f"{_ARR}.actor.optim.lr_warmup_steps",
    f"{_ARR}.actor.optim.warmup_style": f"{_ARR}.actor.optim.lr_scheduler_type",
    f"{_ARR}.rollout.log_prob_micro_batch_size": f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_ARR}.ref.log_prob_micro_batch_size": f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu",
    "critic.fsdp_config": "critic.model.fsdp_config",
    "critic.max_grad_norm": "critic.grad_clip",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "critic.optim.warmup_steps": "critic.optim.lr_warmup_steps",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
}

_KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}

VALUE_ALIASES: dict[str, dict[str, str]] = {
    "algorithm.kl_penalty": _KL_NAMES,
    f"{_ARR}.actor.kl_loss_type": _KL_NAMES,
}


@dataclass(frozen=True)
class Unsupported:
    """A public key or section for something that this build does not have.

    reason:   what the user hears.
    harmless: values that ask for nothing.
    switches: for a section, the keys that turn it on; the others mean nothing while these are harmless.
    """

    reason: str
    harmless: tuple[Any, ...] = (None, False)
    switches: tuple[str, ...] = field(default=())

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for what is not there."""
        if isinstance(value, Mapping):
            return any(self.asks(item) for item in value.values())
        return not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.harmless)


_LORA = Unsupported("this build trains all parameters; set lora_rank=0", harmless=(None, False, 0))
_PROFILER = Unsupported("this build has no profiler hooks; leave it off", switches=("enable",))
_VISION = Unsupported("this build trains text models only; leave it out")

UNSUPPORTED: dict[str, Unsupported] = {
    f"{_ARR}.rollout.multi_turn": Unsupported(
        "this build generates single-turn responses; set multi_turn.enable=false", switches=("enable",)
    ),
    f"{_ARR}.model.lora_rank": _LORA,
    f"{_ARR}.model.lora_adapter_path": _LORA,
    "critic.model.lora_rank": _LORA,
    f"{_ARR}.rollout.quantization": Unsupported("this build decodes with the trainer's own weights; leave it out"),
    f"{_ARR}.rollout.data_parallel_size": Unsupported("this build trains with one worker; set 1", harmless=(None, 1)),
    f"{_ARR}.rollout.pipeline_model_parallel_size": Unsupported(
        "this build trains with one worker; set 1", harmless=(None, 1)
    ),
    f"{_ARR}.rollout.skip_rollout": Unsupported("this build always generates; set false"),
    f"{_ARR}.actor.freeze_vision_tower": _VISION,
    f"{_ARR}.actor.profiler": _PROFILER,
    f"{_ARR}.rollout.profiler": _PROFILER,
    f"{_ARR}.ref.profiler": _PROFILER,
    f"{_ARR}.profiler": _PROFILER,
    "critic.profiler": _PROFILER,
    "reward_model.profiler": _PROFILER,
    "global_profiler": Unsupported("this build has no profiler hooks; leave it off", switches=("tool", "steps")),
    "trainer.profile_steps": Unsupported("this build has no profiler hooks; set null"),
    "trainer.default_hdfs_dir": Unsupported(
        "checkpoints are written to local or mounted folders; set default_local_dir"
    ),
    "trainer.del_local_ckpt_after_load": Unsupported("this build keeps the checkpoint that it loads; set false"),
    "reward_model.enable_resource_pool": Unsupported("all models share the worker's device; set false"),
    "reward_model.sandbox_fusion": Unsupported("this build has no code sandbox; leave url null", switches=("url",)),
    "reward_model.launch_reward_fn_async": Unsupported("rewards are computed within the step; set false"),
    "algorithm.use_pf_ppo": Unsupported("this build does not resample batches by preference; set false"),
    "algorithm.rollout_correction": Unsupported(
        "this build does not correct rollout log-probs; leave rollout_is and rollout_rs null",
        switches=("rollout_is", "rollout_rs", "bypass_mode"),
    ),
    "algorithm.filter_groups": Unsupported("this build does not filter groups; set enable=false", switches=("enable",)),
    "data.sampler": Unsupported("this build samples prompts uniformly; leave it null", switches=("class_path",)),
    "data.datagen": Unsupported("this build reads prompts from files; leave it null", switches=("path",)),
    "transfer_queue": Unsupported("batches travel in the controller's memory; set enable=false", switches=("enable",)),
}

REFUSED_VALUES: dict[str, dict[str, str]] = {
    f"{section}.strategy": {"megatron": "this build trains with FSDP2; set fsdp"}
    for section in (f"{_ARR}.actor", f"{_ARR}.ref", "critic", "reward_model")
} | {
    f"{_ARR}.rollout.name": dict.fromkeys(
        ("vllm", "sglang", "trtllm"), "this build generates with its own engines; set embedded (or hf)"
    ),
    "trainer.device": {"npu": "this build runs on cuda and cpu"},
}

_ALWAYS_CHUNKED = "entropy and log-probs are always computed in chunks"
_OTHER_ENGINE = "it tunes an engine that keeps weights of its own"
_ONE_PROCESS = "responses are generated within the worker"

NO_EFFECT: dict[str, str] = {
    f"{_ARR}.actor.entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
    f"{_ARR}.actor.entropy_checkpointing": _ALWAYS_CHUNKED,
    f"{_ARR}.ref.entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
    f"{_ARR}.ref.entropy_checkpointing": _ALWAYS_CHUNKED,
    f"{_ARR}.actor.use_torch_compile": "layers run as they are",
    f"{_ARR}.ref.use_torch_compile": "layers run as they are",
    f"{_ARR}.model.use_fused_kernels": "the output head is always fused with the loss",
    f"{_ARR}.model.use_liger": "kernels are chosen by the device",
    f"{_ARR}.model.use_shm": "weights are read from the folder directly",
    f"{_ARR}.model.lora_alpha": "there is no adapter without lora_rank",
    f"{_ARR}.model.target_modules": "there is no adapter without lora_rank",
    f"{_ARR}.model.exclude_modules": "there is no adapter without lora_rank",
    f"{_ARR}.actor.fsdp_config.use_orig_params": "FSDP2 always keeps the original parameters",
    f"{_ARR}.rollout.load_format": _OTHER_ENGINE,
    f"{_ARR}.rollout.disable_log_stats": _OTHER_ENGINE,
    f"{_ARR}.rollout.engine_kwargs": _OTHER_ENGINE,
    f"{_ARR}.rollout.layered_summon": _OTHER_ENGINE,
    f"{_ARR}.rollout.checkpoint_engine": _OTHER_ENGINE,
    f"{_ARR}.rollout.agent": _ONE_PROCESS,
    f"{_ARR}.nccl_timeout": _ONE_PROCESS,
    "data.return_raw_input_ids": "the prompt's tokens are always kept",
    "data.return_full_prompt": "the prompt's messages are always kept",
    "data.image_key": "prompts are text",
    "data.video_key": "prompts are text",
    "data.use_shm": "rows are read from the files directly",
    "trainer.controller_nsight_options": "it counts only with trainer.profile_steps",
    "trainer.worker_nsight_options": "it counts only with trainer.profile_steps",
    "trainer.ray_wait_register_center_timeout": _ONE_PROCESS,
    "trainer.use_legacy_worker_impl": "there is one worker implementation",
}

_SPELLED = {*ALIASES, *UNSUPPORTED, *NO_EFFECT}


@dataclass
class Layer:
    """One source of settings (a file, an override) in canonical spelling.

    values:      canonical key to value; only real keys.
    unsupported: canonical key to the problem with what it asks for, or None where it asks for nothing.
    problems:    unknown keys and contradictions.
    notices:     what was read differently from how it was written.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, Problem | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def canonical_layer(cls: type, tree: Mapping[str, Any]) -> Layer:
    """Nested settings as a user wrote them (dotted names allowed anywhere), in the spelling of `cls`."""
    layer = Layer()
    spelled: dict[str, str] = {}
    for written, name, value in _settings(cls, tree, "", "", layer):
        value = _canonical_value(name, value, layer)
        if name in spelled and layer.values[name] != value:
            other = f"{spelled[name]}={show(layer.values[name])}"
            layer.problems.append(Problem(written, value, f"contradicts {other}, which sets the same thing"))
        spelled[name] = written
        layer.values[name] = value
    return layer


def canonical_name(cls: type, written: str) -> str:
    """The canonical spelling of a dotted key."""
    name = ""
    for part in written.split("."):
        name = f"{name}.{part}" if name else part
        name = _alias(cls, name) or name
    return name


def implied_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values that follow from what is set, with a notice each.

    A KL coefficient that controls nothing is never what its author meant, so it turns the penalty in the reward on; an
    explicit `algorithm.use_kl_in_reward` decides otherwise.
    """
    coefficients = sorted(name for name in values if name.startswith("algorithm.kl_ctrl."))
    if not coefficients or "algorithm.use_kl_in_reward" in values:
        return {}, []
    notice = (
        f"{coefficients[0]} is set, so the KL penalty in the reward is on; "
        "algorithm.use_kl_in_reward=false trains without it"
    )
    return {"algorithm.use_kl_in_reward": True}, [notice]


def refused_values(values: Mapping[str, Any]) -> list[Problem]:
    """Problems with values that name something which this build does not have."""
    return [
        Problem(name, values[name], reasons[values[name]])
        for name, reasons in REFUSED_VALUES.items()
        if isinstance(values.get(name), str) and values[name] in reasons
    ]


def _alias(cls: type, name: str) -> str | None:
    return None if name in keys(cls) or name in sections(cls) else ALIASES.get(name)


def _settings(
    cls: type, tree: Mapping[str, Any], written: str, name: str, layer: Layer
) -> Iterator[tuple[str, str, Any]]:
    """Every setting in `tree` as (key as written, canonical key, value); the rest goes to `layer`."""
    for part, value in tree.items():
        if "." in str(part):
            first, rest = str(part).split(".", 1)
            part, value = first, {rest: value}
        if part == "_target_":
            continue
        written_here = f"{written}.{part}" if written else str(part)
        name_here = f"{name}.{part}" if name else str(part)
        target = _alias(cls, name_here)
        if target and value is None:
            continue
        if target:
            below = ".*" if isinstance(value, Mapping) else ""
            layer.notices.append(f"{written_here}{below} is read as {target}{below}")
        yield from _setting(cls, value, written_here, target or name_here, layer)


def _setting(cls: type, value: Any, written: str, name: str, layer: Layer) -> Iterator[tuple[str, str, Any]]:
    if name in keys(cls):
        yield written, name, value
    elif name in UNSUPPORTED:
        layer.unsupported.update(_asked(UNSUPPORTED[name], value, written, name))
    elif name in NO_EFFECT:
        if value is not None:
            layer.notices.append(f"{written} has no effect: {NO_EFFECT[name]}")
    elif name == "critic" and value is None:
        yield written, "critic.enable", False
    elif name in sections(cls) and value is None:
        return
    elif isinstance(value, Mapping) and (name in sections(cls) or any(key.startswith(f"{name}.") for key in _SPELLED)):
        yield from _settings(cls, value, written, name, layer)
    else:
        layer.problems.append(_unknown(cls, value, written, name))


def _unknown(cls: type, value: Any, written: str, name: str) -> Problem:
    while isinstance(value, Mapping) and len(value) == 1:  # name a.b.c=1 in full, but a whole section once
        part, value = next(iter(value.items()))
        written, name = f"{written}.{part}", f"{name}.{part}"
    shown = NO_VALUE if isinstance(value, Mapping) else value
    return Problem(written, shown, explain_unknown_key(name, cls))


def _asked(entry: Unsupported, value: Any, written: str, name: str) -> Iterator[tuple[str, Problem | None]]:
    if isinstance(value, Mapping) and entry.switches:
        for switch in entry.switches:
            if switch in value:
                yield from _asked(entry, value[switch], f"{written}.{switch}", f"{name}.{switch}")
    else:
        yield name, Problem(written, value, entry.reason) if entry.asks(value) else None


def _canonical_value(name: str, value: Any, layer: Layer) -> Any:
    if isinstance(value, str) and value in VALUE_ALIASES.get(name, {}):
        layer.notices.append(f"{name}={value} is read as {VALUE_ALIASES[name][value]}")
        return VALUE_ALIASES[name][value]
    return value
