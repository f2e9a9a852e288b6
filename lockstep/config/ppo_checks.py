"""Checks of a whole PPO configuration: keys that must agree, batches, lengths, worker counts.

What is outside the config (folders, logins, the user's code) is checked by `trainer.preflight`.
"""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

from lockstep.config import checks, micro_batches
from lockstep.config.actor_rollout_ref import has_cut_log_probs, own_quantization
from lockstep.config.checks import SEPARATE, Values
from lockstep.config.engines import ROLLOUT_ENGINES, TRAIN_ENGINES
from lockstep.config.errors import ConfigError, Problem
from lockstep.config.estimators import BATCH_INPUTS, PARAMETERS, required_inputs
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.megatron_checks import EXPERT_SIZES, SIZES, difference, layout_problems
from lockstep.config.placement import ROLES, Pools, TooFewWorkers, needed_models, pools_of
from lockstep.config.plugin_settings import LOSS_KEY, setting_problems
from lockstep.config.policy_loss import LOSS_NAMES
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import SECTIONS, sections_of
from lockstep.config.run_names import earlier_default
from lockstep.config.schema import defaults, flat_values, get_in, keys, out_of_bounds
from lockstep.config.train_engines import engine_settings, ranks_per_sequence
from lockstep.config.watchdog import RL_PHASES
from lockstep.config.without_effect import without_effect

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_SAMPLER = ("data.sampler.class_path", "data.sampler.class_name")


def check(config: PPOConfig) -> tuple[list[Problem], list[str]]:
    """Everything that prevents the configuration from running, and warnings about likely mistakes."""
    values = flat_values(config)
    estimator_problems: tuple[Problem, ...] = ()
    try:
        inputs, models = required_inputs(config.algorithm.adv_estimator), needed_models(config)
    except ConfigError as error:
        inputs, models, estimator_problems = frozenset(), [], error.problems
    found = chain(
        estimator_problems,
        out_of_bounds(type(config), values),
        checks.tracker_names(values),
        _names(values),
        checks.fixed_values(values),
        _files(values, models),
        checks.remote_store(config),
        checks.watchdog(values, RL_PHASES),
        () if config.trainer.val_only else chain(_algorithm(values, inputs), _batches(values, models)),
        () if config.trainer.val_only else setting_problems(config),
        _lengths(config, values, models),
        checks.rollout_engine(values, _ROLLOUT),
        _routers(values),
        checks.history_drafts(values, _ROLLOUT),
        _exact(values, models),
        checks.sampling(values, _ROLLOUT, f"{_ROLLOUT}.val_kwargs"),
        _pool_keys(values),
    )
    inherited = _inherited(values)
    problems = [problem for problem in found if problem.key not in inherited]
    warnings = list(_warnings(config, values))
    warnings += [notice] if (notice := earlier_default(values)) else []
    if not any(part in problem.key for problem in problems for part in _POOL_SIZE_KEYS):
        problems += _workers(config, values, models)
        warnings += _unused_pools(config, models) if config.resource_pool_spec else []
    if not problems and not config.trainer.val_only:
        warnings += without_effect(config, values, models)
    return problems, warnings


def _inherited(values: Values) -> set[str]:
    """Keys whose value comes from another key: a problem is reported once, for that key."""
    tree = defaults(PPOConfig)
    found = set()
    for name in keys(PPOConfig):
        default = get_in(tree, name, None)
        if isinstance(default, str) and default.startswith("${"):
            source = default.removeprefix("${").removesuffix("}")
            if values.get(source) == values[name]:
                found.add(name)
    return found


def _files(values: Values, models: Collection[str]) -> Iterator[Problem]:
    yield from checks.data_files(values, trains=not values["trainer.val_only"])
    yield from checks.model(values, "actor_rollout_ref.model.path", "the model to train")
    yield from checks.adapters(values, "actor")
    yield from checks.tokenizers(values, "actor_rollout_ref.model.tokenizer_path", "data.tokenizer")
    if "critic" in models:
        yield from checks.model(values, "critic.model.path", "the critic's base model")
        yield from checks.adapters(values, "critic")
        yield from checks.tokenizers(values, "critic.model.tokenizer_path")
    if values["reward_model.enable"]:
        yield from checks.model(values, "reward_model.model.path", "the reward model")
        yield from checks.tokenizers(values, "reward_model.model.tokenizer_path", "reward_model.model.input_tokenizer")
    for name in ("custom_reward_function.path", "data.custom_cls.path", _SAMPLER[0], LOSS_KEY):
        yield from checks.python_file(values, name)
    for path, name in (("data.custom_cls.path", "data.custom_cls.name"), _SAMPLER):
        yield from checks.class_name(values, path, name)
    if values[_SAMPLER[0]] and values["data.dataloader_num_workers"] > 0:
        message = "a custom sampler runs in the controller; set 0"
        workers = values["data.dataloader_num_workers"]
        yield Problem("data.dataloader_num_workers", workers, message, also=_SAMPLER)
    if values["trainer.val_only"] and not values["data.val_files"]:
        yield Problem("trainer.val_only", True, "there is no validation data; set data.val_files")
    folders = ("trainer.rollout_data_dir", "trainer.validation_data_dir")
    if values["trainer.rollout_token_data"] and not any(values[name] for name in folders):
        message = "tokens are written beside the dumped responses; set trainer.rollout_data_dir=FOLDER"
        yield Problem("trainer.rollout_token_data", True, message, also=folders)
    yield from checks.resume_path(values)


def _algorithm(values: Values, inputs: Collection[str]) -> Iterator[Problem]:
    """inputs: what the advantage estimator needs; see `estimators`."""
    estimator = values["algorithm.adv_estimator"]
    if unknown := sorted(set(inputs) - BATCH_INPUTS):
        message = f"no run computes {', '.join(unknown)}; give these parameters a default. It can have {', '.join(PARAMETERS)}"
        yield Problem("algorithm.adv_estimator", estimator, message)
    if "values" in inputs and values["critic.enable"] is False:
        message = f"{estimator} needs a critic; set critic.enable to null, or choose another algorithm.adv_estimator"
        yield Problem("critic.enable", False, message, also=("algorithm.adv_estimator",))
    if "index" in inputs and values[f"{_ROLLOUT}.n"] == 1:
        message = f"{estimator} compares the samples of one prompt; set 2 or more"
        yield Problem(f"{_ROLLOUT}.n", 1, message, also=("algorithm.adv_estimator",))
    for name in ("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss"):
        if values[name] and values[f"{_REF}.enable"] is False:
            message = f"KL needs a reference policy, but {_REF}.enable is false; set that to null"
            yield Problem(name, True, message, also=(f"{_REF}.enable",))
    if values["algorithm.filter_groups.enable"] and values[f"{_ROLLOUT}.n"] == 1 and "index" not in inputs:
        message = "algorithm.filter_groups compares the samples of one prompt; set 2 or more"
        yield Problem(f"{_ROLLOUT}.n", 1, message, also=("algorithm.filter_groups.enable",))
    for name in (key for key in values if key.startswith(f"{_ACTOR}.policy_loss.rollout_correction.")):
        source = f"algorithm.rollout_correction.{name.rsplit('.', 1)[-1]}"
        if values[name] != values[source]:
            yield Problem(
                name, values[name], f"must equal {source}={values[source]}; set only that key", also=(source,)
            )
    for field in ("rollout_is", "rollout_rs", "bypass_mode"):
        name = f"algorithm.rollout_correction.{field}"
        if values[name] and not values[f"{_ROLLOUT}.calculate_log_probs"]:
            message = f"needs the rollout's log-probs; set {_ROLLOUT}.calculate_log_probs=true"
            yield Problem(name, values[name], message, also=(f"{_ROLLOUT}.calculate_log_probs",))
    for name, form in own_quantization(values, f"{_ROLLOUT}.").items():
        if not values[f"{_ROLLOUT}.calculate_log_probs"]:
            message = f"its drift is measured by the rollout's log-probs; set {_ROLLOUT}.calculate_log_probs=true"
            yield Problem(name, form, message, also=(f"{_ROLLOUT}.calculate_log_probs",))
    if values["data.gen_batch_size"] is not None and not values["algorithm.filter_groups.enable"]:
        message = "is used only with algorithm.filter_groups.enable=true; set data.train_batch_size instead"
        yield Problem("data.gen_batch_size", values["data.gen_batch_size"], message)
    yield from _over_sampling(values)
    if values["algorithm.filter_groups.metric"] == "seq_final_reward":
        message = "groups are filtered before the KL penalty is computed; set score, seq_reward or a column of the reward function"
        yield Problem("algorithm.filter_groups.metric", "seq_final_reward", message)
    yield from _bypass(values)


def _over_sampling(values: Values) -> Iterator[Problem]:
    rate = f"{_ROLLOUT}.over_sample_rate"
    if values[rate] and values[f"{_ROLLOUT}.mode"] == "sync":
        message = f"a synchronous step waits for all samples; set {_ROLLOUT}.mode=async"
        yield Problem(rate, values[rate], message, also=(f"{_ROLLOUT}.mode",))


def _names(values: Values) -> Iterator[Problem]:
    yield from checks.known_name(values, LOSS_KEY, LOSS_NAMES)
    for role in SECTIONS.values():
        yield from checks.engine_name(values, role.strategy, TRAIN_ENGINES)
    yield from checks.reward_manager(values)


def _bypass(values: Values) -> Iterator[Problem]:
    section, loss = "algorithm.rollout_correction", f"{_ACTOR}.policy_loss.loss_mode"
    if not values[f"{section}.bypass_mode"]:
        return
    for field in ("rollout_is", "rollout_rs"):
        name = f"{section}.{field}"
        if values[name] is not None and values[loss] not in ("vanilla", "bypass_mode"):
            message = f"{values[loss]} does not apply it in bypass mode; set {loss}=vanilla"
            yield Problem(name, values[name], message, also=(loss,))
    if values[f"{section}.rollout_is_batch_normalize"]:
        message = "the mean weight of a mini-batch is unknown in bypass mode; set false"
        yield Problem(f"{section}.rollout_is_batch_normalize", True, message)


def _batches(values: Values, models: Collection[str]) -> Iterator[Problem]:
    batch = values["data.train_batch_size"]
    critic = ["critic.ppo_mini_batch_size"] if "critic" in models else []
    for name in (f"{_ACTOR}.ppo_mini_batch_size", *critic):
        mini = values[name]
        if mini <= 0 or batch <= 0:
            continue
        if batch < mini:
            message = f"is larger than data.train_batch_size={batch}; set it to {batch} or less"
            yield Problem(name, mini, message, also=("data.train_batch_size",))
        elif batch % mini:
            message = f"does not divide data.train_batch_size={batch}; both count prompts"
            yield Problem(name, mini, message, also=("data.train_batch_size",))


_SIZES = ("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.placement", "resource_pool_spec")
_POOL_SIZE_KEYS = (
    *(*_SIZES, "resource_pool_mapping", "reward_model.n", "ulysses_sequence_parallel_size", "fsdp_size"),
    *(f"megatron.{name}" for name in (*SIZES, *EXPERT_SIZES)),
)
"""Parts of keys: a problem with one of them leaves the pool sizes unknown."""


def _lengths(config: PPOConfig, values: Values, models: Collection[str]) -> Iterator[Problem]:
    lengths = ("data.max_prompt_length", "data.max_response_length")
    longest = sum(values[name] for name in lengths)
    unused = {"critic", "rm"} - set(models)
    for switch, _, name, role in micro_batches.RL.values():
        if role in unused:
            continue
        ranks = ranks_per_sequence(sections_of(role).config(config))
        if values[switch] and 0 < values[name] * ranks < longest:
            message = f"a sequence can have {longest} tokens (data.max_prompt_length + data.max_response_length)"
            yield Problem(name, values[name], f"{message}; set {-(-longest // ranks)} or more", also=lengths)
    rollout = values[f"{_ROLLOUT}.prompt_length"] + values[f"{_ROLLOUT}.response_length"]
    limit = values[f"{_ROLLOUT}.max_model_len"]
    if limit is not None and 0 < limit < rollout:
        message = f"prompt_length + response_length is {rollout}; set that or more, or null"
        yield Problem(f"{_ROLLOUT}.max_model_len", limit, message, also=lengths)
    if values[f"{_ROLLOUT}.prompt_length"] < values["data.max_prompt_length"]:
        message = f"is less than data.max_prompt_length={values['data.max_prompt_length']}; set only that key"
        yield Problem(f"{_ROLLOUT}.prompt_length", values[f"{_ROLLOUT}.prompt_length"], message, also=lengths)


def _routers(values: Values) -> Iterator[Problem]:
    """Recording, replaying and balancing the experts of tokens."""
    mode_key, record_key = f"{_ACTOR}.router_replay.mode", f"{_ROLLOUT}.enable_rollout_routing_replay"
    loss_key, strategy_key, name_key = f"{_ACTOR}.router_aux_loss_coef", f"{_ACTOR}.strategy", f"{_ROLLOUT}.name"
    bypass_key = "algorithm.rollout_correction.bypass_mode"
    mode, records, name = values[mode_key], values[record_key], values[name_key]
    if mode == "R3" and not records:
        message = f"{mode_key}=R3 replays the experts of the rollout; set true, or remove the key"
        yield Problem(record_key, False, message, also=(mode_key,))
    if mode == "R2" and records:
        message = f"{mode_key}=R2 replays the experts of the old-log-prob pass; set false, or {mode_key}=R3"
        yield Problem(record_key, True, message, also=(mode_key,))
    if mode == "R2" and values[bypass_key]:
        message = f"{bypass_key}=true has no old-log-prob pass, whose experts R2 replays; set R3, or {bypass_key}=false"
        yield Problem(mode_key, mode, message, also=(bypass_key,))
    if (mode == "R3" or records) and not ROLLOUT_ENGINES.info(name).records_routes:
        key = mode_key if mode == "R3" else record_key
        message = (
            f"{name_key}={name} does not return the experts of its tokens; set {name_key}=embedded, or {mode_key}=R2"
        )
        yield Problem(key, values[key], message, also=(name_key,))
    if TRAIN_ENGINES.info(values[strategy_key]).reads_routers:
        return
    advice = (
        f"{strategy_key}={values[strategy_key]} does not give access to the routers of experts; set {strategy_key}=fsdp"
    )
    for key, off in ((mode_key, "disabled"), (record_key, False), (loss_key, 0)):
        if values[key] != off:
            yield Problem(key, values[key], f"{advice}, or {str(off).lower()}", also=(strategy_key,))


def _exact(values: Values, models: Collection[str]) -> Iterator[Problem]:
    key = f"{_ROLLOUT}.exact"
    if not values[key]:
        return
    yield from checks.exact(values, _ROLLOUT)
    sequence_ranks = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    yield from checks.requirements(
        values,
        key,
        *((f"{role}.strategy", ("fsdp", "fsdp2"), "other engines have their own layers") for role in (_ACTOR, _REF)),
        *(
            (f"{role}.{ranks}", (1,), "attention split over ranks is not exact")
            for role in (_ACTOR, _REF)
            for ranks in sequence_ranks
        ),
        (f"{_ROLLOUT}.calculate_log_probs", (True,), "it is about the rollout's log-probs"),
    )
    if "ref" in models:
        dtypes = _equal_dtypes(values[f"{_ACTOR}.fsdp_config.dtype"], values["trainer.device"])
        need = (f"{_REF}.fsdp_config.dtype", dtypes, "the reference must compute in the actor's dtype")
        yield from checks.requirements(values, key, need)
    for name in ("rollout_is", "rollout_rs"):
        correction = f"algorithm.rollout_correction.{name}"
        if values[correction] is not None and not _is_stale(values):
            message = f"there is no gap to correct; remove {correction}, or set {key}=false"
            yield Problem(key, True, message, also=(correction,))


def _equal_dtypes(dtype: str, device: str) -> tuple[str, ...]:
    """The names of a dtype, itself first; `auto` has others if the device is known."""
    names = [{"float32", "fp32"}, {"bfloat16", "bf16"}, {"float16", "fp16"}]
    if device != "auto":
        names[device == "cuda"].add("auto")
    return dtype, *sorted(other for same in names if dtype in same for other in same)


def _is_stale(values: Values) -> bool:
    return values["trainer.async_mode"] is not None and values["trainer.max_staleness"] > 0


def _pool_keys(values: Values) -> Iterator[Problem]:
    spec, mapping = values["resource_pool_spec"], values["resource_pool_mapping"]
    if spec and values["trainer.placement"] != "colocate":
        message = "conflicts with resource_pool_spec; set only one of them"
        yield Problem("trainer.placement", values["trainer.placement"], message, also=("resource_pool_spec",))
    for pool, machines in spec.items():
        if not isinstance(machines, list) or not machines or not all(isinstance(n, int) and n > 0 for n in machines):
            yield Problem(
                f"resource_pool_spec.{pool}", machines, "must be a list of processes per machine, such as [8, 8]"
            )
    for role, pool in mapping.items():
        if role not in ROLES:
            yield Problem(f"resource_pool_mapping.{role}", pool, f"unknown role; roles are {', '.join(ROLES)}")
        elif pool not in list(spec):
            message = f"unknown pool; resource_pool_spec has {', '.join(spec) or 'none'}"
            yield Problem(f"resource_pool_mapping.{role}", pool, message, also=("resource_pool_spec",))
    if values["reward_model.enable"] and values["reward_model.enable_resource_pool"]:
        if spec and "reward_pool" not in spec and "rm" not in mapping:
            message = "conflicts with resource_pool_spec; add a reward_pool to it, or set false"
            yield Problem("reward_model.enable_resource_pool", True, message, also=("resource_pool_spec",))
        elif not spec and not values["reward_model.nnodes"]:
            yield Problem("reward_model.nnodes", 0, "must be 1 or more with reward_model.enable_resource_pool")


def _async_training(pools: Pools, values: Values) -> Iterator[Problem]:
    mode, key = values["trainer.async_mode"], "trainer.async_mode"
    if mode is None:
        return
    if values[f"{_ROLLOUT}.mode"] == "sync":
        yield Problem(f"{_ROLLOUT}.mode", "sync", f"{key}={mode} generates by single requests; set async", also=(key,))
    if values[f"{_ROLLOUT}.over_sample_rate"]:
        message = f"{key}={mode} keeps unfinished responses for later steps instead of aborting them; set 0"
        yield Problem(f"{_ROLLOUT}.over_sample_rate", values[f"{_ROLLOUT}.over_sample_rate"], message, also=(key,))
    if pools.role_pools.get("rm") in [pool for role, pool in pools.role_pools.items() if role != "rm"]:
        message = f"{key}={mode} scores during updates, so the reward model needs its own workers; set true"
        yield Problem("reward_model.enable_resource_pool", False, message, also=(key,))
    has_own_pool = "rollout" in pools.role_pools
    if mode in SEPARATE and not has_own_pool:
        message = "needs a pool for the rollout; set trainer.placement=split and trainer.n_gpus_per_node=2 or more"
        yield Problem(key, mode, message, also=_SIZES)
    if mode == "colocated" and has_own_pool:
        message = "the rollout has its own pool here; set one_step_off or fully_async, or trainer.placement=colocate"
        yield Problem(key, mode, message, also=_SIZES)
    if mode == "one_step_off" and values["trainer.max_staleness"] > 1:
        message = f"{mode} is never more than 1 update behind; set 1, or {key}=fully_async"
        yield Problem("trainer.max_staleness", values["trainer.max_staleness"], message, also=(key,))


def _workers(config: PPOConfig, values: Values, models: Collection[str]) -> Iterator[Problem]:
    yield from checks.controller(config, values)
    try:
        yield from _async_training(pools_of(config, models), values)
        yield from _ranks(pools_of(config, models), values)
        yield from _layouts(config, pools_of(config, models))
        yield from _profiled(pools_of(config, models), values)
    except TooFewWorkers as error:
        yield Problem("trainer.placement", values["trainer.placement"], error.reason, also=_SIZES[:2])


def _profiled(pools: Pools, values: Values) -> Iterator[Problem]:
    """Which roles and ranks `trainer.profile_steps` profiles."""
    steps = values["trainer.profile_steps"]
    sections = {sections_of(role).role: role for role in pools.role_pools}
    enabled = {section: role for section, role in sections.items() if values[f"{section}.profiler.enable"]}
    if steps and not enabled:
        keys = tuple(f"{section}.profiler.enable" for section in sections)
        yield Problem("trainer.profile_steps", steps, f"no role is profiled; set {keys[0]}=true", also=keys)
    for section, role in enabled.items() if steps else ():
        key, size = f"{section}.profiler.ranks", pools.world_size(role)
        if beyond := [rank for rank in values[key] if not 0 <= rank < size]:
            yield Problem(key, values[key], f"{role} has no rank {beyond[0]}, but 0 to {size - 1}", also=_SIZES)


def _unused_pools(config: PPOConfig, models: Collection[str]) -> Iterator[str]:
    for name in config.resource_pool_spec.keys() - pools_of(config, models).spec.keys():
        yield f"resource_pool_spec.{name}: no role uses this pool"


def _layouts(config: PPOConfig, pools: Pools) -> Iterator[Problem]:
    """How Megatron divides the models of a pool; a layout of several roles is checked once."""
    first: dict[str, tuple[McoreEngineConfig, str]] = {}
    for role, pool in pools.role_pools.items():
        sections = sections_of(role)
        settings, section = engine_settings(sections.config(config)), sections.of_engine("megatron")
        if role == "rollout" or not isinstance(settings, McoreEngineConfig):
            continue
        if pool not in first:
            first[pool] = settings, section
            where = f"the number of workers in {pool}"
            yield from layout_problems(settings, section, pools.world_size(role), where, "trainer.n_gpus_per_node")
        elif (differs := difference(settings, section, *first[pool])) is not None:
            yield differs


def _generating_ranks(role: str, workers: int, shared: int, values: Values) -> Iterator[Problem]:
    """`rollout.n_gpus`: the part of the actor's workers that generate. shared: workers of a rollout engine."""
    key, count = f"{_ROLLOUT}.n_gpus", values[f"{_ROLLOUT}.n_gpus"]
    info = ROLLOUT_ENGINES.info(values[f"{_ROLLOUT}.name"])
    if count is None:
        return
    if role == "rollout":
        message = "the rollout has its own pool, all of whose workers generate; set null, or trainer.placement=colocate or hybrid"
        yield Problem(key, count, message, also=("trainer.placement", "resource_pool_mapping"))
    elif not info.shares_weights:
        message = f"rollout.name={values[f'{_ROLLOUT}.name']} generates on all workers of the actor; set null, or name=embedded"
        yield Problem(key, count, message, also=(f"{_ROLLOUT}.name",))
    elif count > workers:
        yield Problem(
            key, count, f"is more than the {workers} workers of the actor; set at most that, or null", also=_SIZES
        )
    elif count % max(1, shared):
        message = f"is not a multiple of tensor_model_parallel_size={shared}, the workers of an engine; set one"
        yield Problem(key, count, message, also=(f"{_ROLLOUT}.tensor_model_parallel_size",))


def _ranks(pools: Pools, values: Values) -> Iterator[Problem]:
    """How the ranks of a pool shard models and split sequences; a problem of several roles in one pool is reported once."""
    reported: set[Any] = set()
    for role, pool in pools.role_pools.items():
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        is_shared = "rollout" in role and ROLLOUT_ENGINES.info(values[f"{_ROLLOUT}.name"]).tensor_parallel
        shared = values[key] if is_shared else 1
        if shared > 0 and pools.world_size(role) % shared:
            message = f"does not divide the number of workers in {pool} ({pools.world_size(role)}); set a divisor"
            yield Problem(key, shared, message, also=_SIZES)
        if "rollout" in role:
            yield from _generating_ranks(role, pools.world_size(role), shared, values)
        if role == "rollout":
            continue
        section, engine, model, strategy = sections_of(role)
        workers, is_fsdp = pools.world_size(role), sections_of(role).engine(values) == engine
        key, engine_key = (f"{part}.ulysses_sequence_parallel_size" for part in (section, engine))
        size, engine_size = values[key], values[engine_key] if is_fsdp else 1
        shard = values[f"{engine}.fsdp_size"] if is_fsdp else -1
        if size > 1 and engine_size > 1 and size != engine_size:
            yield Problem(engine_key, engine_size, f"differs from {key}={size}; set only that key", also=(key,))
            continue
        key, size = (key, size) if size > 1 else (engine_key, engine_size)
        refused = [p for p in checks.engine_ranks(values, strategy, workers, size, key) if p.message not in reported]
        reported |= {problem.message for problem in refused}
        yield from refused
        if workers % size and (pool, size) not in reported:
            reported.add((pool, size))
            message = f"does not divide the number of workers in {pool} ({workers}); set a divisor, or change the number of workers"
            yield Problem(key, size, f"{message} (trainer.n_gpus_per_node)", also=_SIZES)
        if size > 1 and not values[f"{model}.use_remove_padding"] and model not in reported:
            reported.add(model)
            message = f"splitting sequences across ranks ({key}={size}) needs packed sequences; set true"
            yield Problem(f"{model}.use_remove_padding", False, message, also=(key,))
        if shard != -1 and workers % shard:
            message = f"does not divide the number of workers in {pool} ({workers}); set a divisor, or -1 for all"
            yield Problem(f"{engine}.fsdp_size", shard, message, also=_SIZES)


def _warnings(config: PPOConfig, values: Values) -> Iterator[str]:
    low, high = values[f"{_ACTOR}.clip_ratio_low"], values[f"{_ACTOR}.clip_ratio_high"]
    if low > 0.5:
        yield (
            f"{_ACTOR}.clip_ratio_low={low:g} is a distance from 1: the ratio is clipped at 1-{low:g}={1 - low:.4g}; "
            f"set {1 - low:.4g} to clip at {low:g}"
        )
    if high >= 1:
        yield (
            f"{_ACTOR}.clip_ratio_high={high:g} is a distance from 1: the ratio is clipped at 1+{high:g}={1 + high:.4g}; "
            f"set {high - 1:.4g} to clip at {high:g}"
        )
    if has_cut_log_probs(config.actor_rollout_ref.rollout):
        yield (
            f"{_ROLLOUT}.name={values[f'{_ROLLOUT}.name']} with top_p, top_k or min_p at temperature "
            f"{values[f'{_ROLLOUT}.temperature']:g}: "
            "rollout_log_probs are of the cut distribution, old_log_probs of the full one, so the gap between them is reported and "
            "not checked"
        )
    samples = values[f"{_ROLLOUT}.n"]
    if samples > 1 and not values[f"{_ROLLOUT}.do_sample"]:
        yield f"{_ROLLOUT}.do_sample=false: the {samples} samples of a prompt will be identical"
    if values[f"{_ROLLOUT}.response_length"] != values["data.max_response_length"]:
        yield (
            f"{_ROLLOUT}.response_length={values[f'{_ROLLOUT}.response_length']} differs from "
            f"data.max_response_length={values['data.max_response_length']}; set only data.max_response_length"
        )
    validation = f"{_ROLLOUT}.val_kwargs"
    if values[f"{validation}.n"] > 1 and not values[f"{validation}.do_sample"]:
        yield f"{validation}.do_sample=false: the {values[f'{validation}.n']} responses to a prompt will be identical"
    yield from checks.run_warnings(values)
    if values["trainer.dashboard"] and values["trainer.val_only"]:
        yield "trainer.dashboard=true has no effect: trainer.val_only=true trains nothing; `lockstep dashboard` shows a folder"
    if values["trainer.max_restarts"] and values["trainer.save_freq"] < 1:
        yield "trainer.max_restarts without trainer.save_freq: there are no checkpoints, so a restart begins at step 0"
    if values["reward_model.enable"] and values["custom_reward_function.path"]:
        yield "reward_model.enable: scores come from the reward model; custom_reward_function.path is not called"
    if values["algorithm.use_kl_in_reward"] and values[f"{_ACTOR}.use_kl_loss"]:
        yield f"algorithm.use_kl_in_reward and {_ACTOR}.use_kl_loss are both on: KL is penalized in the reward and in the loss"
