"""Settings that a run accepts but does not read: `without_effect` gives one notice per reason."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

from lockstep.config import micro_batches
from lockstep.config.actor_rollout_ref import quantization_of
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.config.model import TrainEngineConfig
from lockstep.config.placement import controller_of, need_reference_policy, pools_of
from lockstep.config.policy_loss import BUILT_IN_LOSSES
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import SECTIONS, Sections
from lockstep.config.schema import defaults, get_in

Values = Mapping[str, Any]
"""Dotted key to value."""
Reason = tuple[bool, str, tuple[str, ...]]
"""Whether it holds in this run, what it says, and the keys (or sections, ending in a dot) that have no effect then."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"

LORA_SETTINGS = ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path", "load_in_4bit")

NEVER_READ = {
    **{f"{role.fsdp}.wrap_policy.min_num_params": "models are sharded layer by layer" for role in SECTIONS.values()},
    **{
        f"{engine}.{name}": f"the {what} is not trained{more}"
        for role, what in (("ref", "reference policy"), ("rm", "reward model"))
        for engine in SECTIONS[role].engines().values()
        for name, more in (
            ("optimizer_offload", ""),
            ("seed", ""),
            ("model_dtype", f" and computes in {engine}.dtype"),
        )
    },
    **{
        f"{SECTIONS[role].fsdp}.full_determinism": f"the {what} is not trained"
        for role, what in (("ref", "reference policy"), ("rm", "reward model"))
    },
    **{
        f"{SECTIONS[role].of_engine('megatron')}.{name}": f"the {what} is not trained"
        for role, what in (("ref", "reference policy"), ("rm", "reward model"))
        for name in ("grad_offload", "use_distributed_optimizer", "override_ddp_config")
    },
    "reward_model.model.enable_gradient_checkpointing": "the reward model is not trained",
    **{f"reward_model.model.{name}": "the reward model is not trained" for name in ("lora_rank", *LORA_SETTINGS)},
    "critic.model.custom_chat_template": "prompts are rendered once; set actor_rollout_ref.model.custom_chat_template",
    "data.filter_overlong_prompts_workers": "the tokenizer's own threads measure the prompts",
}
"""Keys that no run reads, and why."""

MAX_KEYS = 4
"""A notice lists this many keys, and counts the others."""

_REWARD_POOL = ("enable_resource_pool", "n_gpus_per_node", "nnodes", "nccl_timeout", "ulysses_sequence_parallel_size")
_REWARD_BATCHES = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu")
_BATCHES = tuple(micro_batches.RL[phase] for phase in ("update actor", "old log-probs", "reference log-probs"))


def without_effect(config: PPOConfig, values: Values, models: Collection[str]) -> Iterator[str]:
    """Settings that differ from their default but that nothing reads in this run. models: see `needed_models`."""
    never_read = ((True, why, (key,)) for key, why in NEVER_READ.items())
    reasons = chain(
        _roles(config, values, models),
        _workers(config, values, models),
        _algorithm(values),
        _policy_loss(values),
        _batches(values),
        _optimizers(values),
        engine_reasons(values, [SECTIONS[role] for role in ("actor", *models)]),
        never_read,
    )
    yield from notices(reasons, values, defaults(PPOConfig))
    yield from _own_attention(values)


def notices(reasons: Iterable[Reason], values: Values, tree: Mapping[str, Any]) -> Iterator[str]:
    """One notice per reason that holds and has keys whose value is not the default in `tree`."""
    told: set[str] = set()
    for holds, reason, names in reasons:
        if not holds:
            continue
        matching = [
            key for name in names for key in values if key == name or (name[-1] == "." and key.startswith(name))
        ]
        changed = [key for key in matching if key not in told and _is_set(values, key, get_in(tree, key, None))]
        if changed:
            told.update(changed)
            listed = ", ".join(f"{key}={values[key]}" for key in changed[:MAX_KEYS])
            more = f" and {len(changed) - MAX_KEYS} more" if len(changed) > MAX_KEYS else ""
            yield f"{listed}{more} {'has' if len(changed) == 1 else 'have'} no effect: {reason}"


def _roles(config: PPOConfig, values: Values, models: Collection[str]) -> Iterator[Reason]:
    """Models that the run does not have. The broader reason first: a key is reported once."""
    estimator = values["algorithm.adv_estimator"]
    built_in = estimator in set(AdvantageEstimator)
    critic = tuple(key for key in values if key.startswith("critic.") and key != "critic.enable")
    no_critic = ("trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep", *critic)
    yield built_in and "critic" not in models, f"{estimator} has no critic", no_critic
    reference = tuple(key for key in values if key.startswith(f"{_REF}.") and key != f"{_REF}.enable")
    no_reference = f"there is no KL term ({_ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are false)"
    yield not need_reference_policy(config), no_reference, reference
    adapters_off = "with actor_rollout_ref.model.lora_rank the reference is the actor with its adapters off"
    ref_engine = (
        *(f"{section}." for section in SECTIONS["ref"].engines().values()),
        f"{_REF}.ulysses_sequence_parallel_size",
    )
    yield "ref" not in models, adapters_off, ref_engine
    for section in ("actor_rollout_ref.model", "critic.model"):
        settings = tuple(f"{section}.{name}" for name in LORA_SETTINGS)
        yield not values[f"{section}.lora_rank"], f"{section}.lora_rank is 0", settings
    reward_keys = tuple(f"reward_model.{name}" for name in (*_REWARD_POOL, *_REWARD_BATCHES))
    rm_sections = ("reward_model.model.", *(f"{section}." for section in SECTIONS["rm"].engines().values()))
    yield "rm" not in models, "reward_model.enable is false", (*rm_sections, *reward_keys)
    sources = [entry.get("source") for entry in values["reward_model.ensemble"].values()]
    no_judge = "nothing is judged; set reward_model.judge.enable=true"
    yield not (values["reward_model.judge.enable"] or "judge" in sources), no_judge, ("reward_model.judge.",)
    estimate = ("reward_model.estimated_tokens_per_request",)
    yield values["reward_model.max_tpm"] is None, "reward_model.max_tpm is null", estimate
    no_pool = "reward_model.enable_resource_pool is false"
    yield (
        not values["reward_model.enable_resource_pool"],
        no_pool,
        ("reward_model.n_gpus_per_node", "reward_model.nnodes"),
    )


def _workers(config: PPOConfig, values: Values, models: Collection[str]) -> Iterator[Reason]:
    """Ray, profiles, and the rollout's engine and place."""
    yield controller_of(config) == "local", "the run does not use Ray", ("ray_init.",)
    mode = values["trainer.async_mode"]
    yield mode is None, "trainer.async_mode is null", ("trainer.max_staleness", "trainer.stale_samples")
    yield mode == "one_step_off", "one_step_off drops no samples", ("trainer.stale_samples",)
    sections = tuple(f"{role.role}.profiler" for role in SECTIONS.values())
    yield from profiler_reasons(values, sections, is_on_ray=controller_of(config) == "ray")
    separate = "rollout" in pools_of(config, models).role_pools
    yield not separate, "actor and rollout share their workers", (f"{_ROLLOUT}.checkpoint_engine.",)
    name = values[f"{_ROLLOUT}.name"]
    info = ROLLOUT_ENGINES.info(name)
    reason = "the servers have their own settings" if info.is_remote else f"{_ROLLOUT}.name is {name}"
    yield True, reason, tuple(f"{_ROLLOUT}.{key}" for key in info.unread)
    max_gap = (f"{_ROLLOUT}.quantization_max_gap",)
    yield not info.quantizes, reason, max_gap
    is_quantized = bool(quantization_of(values, f"{_ROLLOUT}."))
    yield not is_quantized, f"{_ROLLOUT}.quantization and kv_cache_dtype are null", max_gap


def _algorithm(values: Values) -> Iterator[Reason]:
    """What the estimator and the switches of `algorithm` do not use; nothing is known of an estimator of the user's."""
    estimator = values["algorithm.adv_estimator"]
    built_in = estimator in set(AdvantageEstimator)
    read = AdvantageEstimator(estimator).keys if built_in else frozenset()
    shared = {"gamma": "does not discount", "lam": "does not use it", "norm_adv_by_std_in_grpo": "does not use it"}
    for key, what in shared.items():
        yield built_in and key not in read, f"{estimator} {what}", (f"algorithm.{key}",)
    for other in AdvantageEstimator:
        unread = tuple(f"algorithm.{key}" for key in sorted(other.keys - read - shared.keys()))
        yield built_in, f"algorithm.adv_estimator is {estimator}", unread
    for switch, names in {
        "algorithm.use_kl_in_reward": ("algorithm.kl_penalty", "algorithm.kl_ctrl."),
        f"{_ACTOR}.use_kl_loss": (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        "algorithm.use_pf_ppo": ("algorithm.pf_ppo.",),
        "algorithm.filter_groups.enable": ("algorithm.filter_groups.",),
        f"{_ROLLOUT}.history_drafts.enable": (f"{_ROLLOUT}.history_drafts.",),
        f"{_ACTOR}.shuffle": (f"{_ACTOR}.data_loader_seed",),
        "critic.shuffle": ("critic.data_loader_seed",),
    }.items():
        yield not values[switch], f"{switch} is false", names
    adaptive = ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl")
    yield values["algorithm.kl_ctrl.type"] != "adaptive", "algorithm.kl_ctrl.type is not adaptive", adaptive
    correction = "algorithm.rollout_correction"
    by_weights = (f"{correction}.rollout_is_threshold", f"{correction}.rollout_is_batch_normalize")
    yield values[f"{correction}.rollout_is"] is None, f"{correction}.rollout_is is null", by_weights
    no_criteria = f"{correction}.rollout_rs is null"
    yield values[f"{correction}.rollout_rs"] is None, no_criteria, (f"{correction}.rollout_rs_threshold",)
    yield not values[f"{correction}.bypass_mode"], f"{correction}.bypass_mode is false", (f"{correction}.loss_type",)


def _policy_loss(values: Values) -> Iterator[Reason]:
    """Nothing is known of a loss of the user's."""
    loss = values[f"{_ACTOR}.policy_loss.loss_mode"]
    needs = BUILT_IN_LOSSES.get(loss)
    known_loss, read = needs is not None, needs.keys if needs else ()
    for other in BUILT_IN_LOSSES.values():
        unread = tuple(f"{_ACTOR}.{key}" for key in other.keys if key not in read)
        yield known_loss, f"{_ACTOR}.policy_loss.loss_mode is {loss}", unread
    normalized = values[f"{_ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm"
    other_mode = f"{_ACTOR}.loss_agg_mode is not seq-mean-token-sum-norm"
    yield known_loss and not normalized, other_mode, (f"{_ACTOR}.loss_scale_factor",)


def _batches(values: Values) -> Iterator[Reason]:
    """The limit of a micro-batch is in tokens or in sequences."""
    for switch, rows, tokens, _ in _BATCHES:
        yield bool(values[switch]), f"{switch} is true", (rows,)
        followers = [keys for keys in _BATCHES if values[keys.switch] and values[keys.tokens] == values[tokens]]
        yield not values[switch] and not followers, f"{switch} is false", (tokens,)


def _optimizers(values: Values) -> Iterator[Reason]:
    for section in (f"{_ACTOR}.optim", "critic.optim"):
        schedule = values[f"{section}.lr_scheduler_type"]
        floors = (f"{section}.min_lr_ratio", f"{section}.min_lr")
        yield schedule == "constant", f"{section}.lr_scheduler_type is constant", floors
        yield schedule != "cosine", f"{section}.lr_scheduler_type is {schedule}", (f"{section}.num_cycles",)
        ratio = (f"{section}.lr_warmup_steps_ratio",)
        yield values[f"{section}.lr_warmup_steps"] >= 0, f"{section}.lr_warmup_steps is set", ratio


def engine_reasons(values: Values, roles: Iterable[Sections]) -> Iterator[Reason]:
    """Settings of engines that a role does not select. What every engine has is to be set in the selected one's section."""
    for role in roles:
        selected, reason = role.engine(values), f"{role.strategy} is {values[role.strategy]}"
        for section in role.engines().values():
            for name in (field.name for field in fields(TrainEngineConfig)):
                yield section != selected, f"{reason}; set {selected}.{name}", (f"{section}.{name}",)
            yield section != selected, reason, (f"{section}.",)
        is_megatron = selected == role.of_engine("megatron")
        yield is_megatron, "Megatron's rows are always packed", (f"{role.model}.use_remove_padding",)


def _own_attention(values: Values) -> Iterator[str]:
    """An entry that every Megatron file of verl has."""
    key = "override_transformer_config"
    actor, *others = (sections.of_engine("megatron") for sections in SECTIONS.values())
    for section in (actor, *(other for other in others if values[f"{other}.{key}"] != values[f"{actor}.{key}"])):
        if backend := values[f"{section}.{key}"].get("attention_backend"):
            yield f"{section}.{key}.attention_backend={backend} has no effect: attention is our own, with packed rows"


def profiler_reasons(values: Values, sections: Collection[str], is_on_ray: bool) -> Iterator[Reason]:
    """sections: those of the roles' profilers."""
    ranks = tuple(f"{section}.{name}" for section in sections for name in ("all_ranks", "ranks"))
    yield not values["trainer.profile_steps"], "trainer.profile_steps is empty", ("global_profiler.", *ranks)
    tool, tools = values["global_profiler.tool"] or "torch", "global_profiler.global_tool_config"
    for name in ("torch", "nsys", "torch_memory"):
        yield name != tool, f"global_profiler.tool is {tool}", (f"{tools}.{name}.",)
    options = tuple(f"{tools}.nsys.{name}_nsight_options" for name in ("controller", "worker"))
    yield not is_on_ray, "nsys is started with the command, not by Ray", options
    for section in sections:
        yield bool(values[f"{section}.all_ranks"]), f"{section}.all_ranks is true", (f"{section}.ranks",)


def _is_set(values: Values, key: str, default: Any) -> bool:
    """Whether a value differs from its default (for one that follows another key: from that) and is not null or 0."""
    value = values[key]
    if value is None or (value == 0 and not isinstance(value, bool)):
        return False
    if isinstance(default, str) and default.startswith("${"):
        default = values.get(default.removeprefix("${").removesuffix("}"), value)
    return bool(value != default)
