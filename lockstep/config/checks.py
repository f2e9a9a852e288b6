"""Checks that the programs share: files, models, adapters, rollout engines, names.

The checks of each program are in `ppo_checks`, `sft_checks` and `generation_checks`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.config.actor_rollout_ref import quantization_of
from lockstep.config.compat import NOT_SUPPORTED
from lockstep.config.engines import (
    ROLLOUT_ENGINES,
    TRAIN_ENGINES,
    EngineRegistry,
    RolloutEngineInfo,
    TrainEngineInfo,
)
from lockstep.config.ensemble import reward_problems
from lockstep.config.errors import NO_VALUE, Problem, nearest
from lockstep.config.placement import controller_of, num_workers
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import REWARD_MANAGERS
from lockstep.config.roles import sections_of
from lockstep.config.server_checks import servers
from lockstep.config.sft import SupervisedConfig
from lockstep.config.trainer import LOGGERS, TrainerConfig
from lockstep.registry import find_registered, no_such_name
from lockstep.utils.dataset_files import FORMS as DATA_FORMS, Use, locate_data
from lockstep.utils.files import did_you_mean_path
from lockstep.utils.fs import masked
from lockstep.utils.model_path import FORMS as MODEL_FORMS, is_adapter, is_model_folder, locate_model
from lockstep.utils.sampling_limits import MIN_TEMPERATURE
from lockstep.utils.vision import vision_problem

_ACTOR = "actor_rollout_ref.actor"
SEPARATE = ("one_step_off", "fully_async")
"""Values of `trainer.async_mode` whose rollout has its own pool."""
Values = Mapping[str, Any]
"""Dotted key to value."""

_FIXED_VALUES: dict[str, tuple[Any, str]] = {
    "checkpoint.async_save": (False, "set false, and trainer.async_save=true to save in the background"),
    "actor_rollout_ref.hybrid_engine": (True, "set true, and trainer.placement=split to separate actor and rollout"),
}
"""Section and field, below any other section, to the only supported value and what to set."""


def fixed_values(values: Values) -> Iterator[Problem]:
    for name, value in values.items():
        only, hint = _FIXED_VALUES.get(".".join(name.rsplit(".", 2)[-2:]), (value, ""))
        if value != only:
            yield Problem(name, value, f"{NOT_SUPPORTED}: {hint}")


def data_files(values: Values, trains: bool = True) -> Iterator[Problem]:
    if trains and not values["data.train_files"]:
        yield Problem("data.train_files", NO_VALUE, f"must name the training data; {DATA_FORMS}")
    if trains:
        yield from _data_files(values, "data.train_files", "train")
    yield from _data_files(values, "data.val_files", "val")


def python_file(values: Values, name: str) -> Iterator[Problem]:
    """A Python file, with or without the name of an object in it."""
    path = values[name] or ""
    file = path if path.endswith(".py") else path.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).expanduser().is_file():
        yield Problem(name, path, f"no such file{did_you_mean_path(Path(file).expanduser())}")


def class_name(values: Values, path: str, name: str) -> Iterator[Problem]:
    if values[path] and not values[name] and ":" not in values[path].removeprefix("pkg://"):
        yield Problem(name, NO_VALUE, f"must name the class in {path}")


def resume_path(values: Values) -> Iterator[Problem]:
    if values["trainer.resume_mode"] == "resume_path":
        path = values["trainer.resume_from_path"]
        if not path:
            message = "must be the global_step_N folder to resume from, because trainer.resume_mode=resume_path"
            yield Problem("trainer.resume_from_path", NO_VALUE, message)
        elif "://" not in path and not Path(path).is_dir():
            yield Problem("trainer.resume_from_path", path, "no such folder")


def watchdog(values: Values, phases: Collection[str]) -> Iterator[Problem]:
    """phases: those of the program."""
    for name in values["trainer.watchdog.deadlines_s"]:
        if name not in phases and not name.startswith("reward "):  # a reward of an ensemble
            yield Problem("trainer.watchdog.deadlines_s", name, no_such_name(name, phases, "phase"))
    action = values["trainer.on_hang"]
    if action != "warn" and not values["trainer.watchdog.enable"]:
        message = "nothing watches the run; set trainer.watchdog.enable=true, or trainer.on_hang=warn"
        yield Problem("trainer.on_hang", action, message, also=("trainer.watchdog.enable",))
    elif action == "restart" and not values["trainer.max_restarts"]:
        message = "no restart is allowed; set trainer.max_restarts, or trainer.on_hang=stop"
        yield Problem("trainer.on_hang", action, message, also=("trainer.max_restarts",))


def remote_store(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    """URLs of remote checkpoints; a password in one would be saved with the config."""
    store, path = "trainer.default_hdfs_dir", "trainer.resume_from_path"
    for name, value in ((store, config.trainer.default_hdfs_dir), (path, config.trainer.resume_from_path)):
        if name == store and value and "://" not in value:
            message = "must be a URL such as s3://bucket/run or file:///mnt/run; local checkpoints are in trainer.default_local_dir"
            yield Problem(name, value, message)
        elif value and masked(value) != value and name not in config.from_environment:
            message = (
                "has a password or signature, which would be saved with the config; give it to fsspec by its configuration or "
                "environment variables (docs/remote_checkpoints.md), or write the URL as ${oc.env:NAME}"
            )
            yield Problem(name, masked(value), message)


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
    elif isinstance(place, Path) and (problem := vision_problem(place)):
        yield Problem(name, path, problem)


def adapters(values: Values, role: str) -> Iterator[Problem]:
    """The LoRA keys of a role's model."""
    section, strategy = sections_of(role).model, sections_of(role).strategy
    name = f"{section}.lora_adapter_path"
    path, rank = values[name], values[f"{section}.lora_rank"]
    if values[f"{section}.load_in_4bit"]:
        yield from _4bit_base(values, section, sections_of(role).fsdp)
    if rank:
        yield from _base_of_new_adapters(values, section)
    if rank and strategy in values and not TRAIN_ENGINES.info(values[strategy]).takes_adapters:
        message = f"{strategy}={values[strategy]} trains no adapters; set 0, or {strategy}=fsdp"
        yield Problem(f"{section}.lora_rank", rank, message, also=(strategy,))
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


def _4bit_base(values: Values, section: str, engine: str) -> Iterator[Problem]:
    name = f"{section}.load_in_4bit"
    if not values[f"{section}.lora_rank"]:
        message = f"a model in 4 bits cannot be trained, only adapters on it; set {section}.lora_rank, or false"
        yield Problem(name, True, message, also=(f"{section}.lora_rank",))
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


def tracker_names(values: Values) -> Iterator[Problem]:
    for name in values["trainer.logger"]:
        if name not in LOGGERS and ":" not in name and find_registered("tracker", name) is None:
            guess = nearest(name, LOGGERS)
            hint = f"did you mean {guess}?" if guess else f"known: {', '.join(LOGGERS)}"
            yield Problem("trainer.logger", name, f"no such tracker; {hint}")


def reward_manager(values: Values) -> Iterator[Problem]:
    yield from known_name(values, "reward_model.reward_manager", REWARD_MANAGERS, "class")
    yield from reward_problems(values)


def known_name(values: Values, key: str, known: Collection[str], named: str = "function") -> Iterator[Problem]:
    """named: what a file would define."""
    name = values[key]
    if name not in known and ":" not in name:
        yield Problem(key, name, no_such_name(name, known, named=named))


NEEDS_BITSANDBYTES = 'needs bitsandbytes: pip install "lockstep-rl[qlora]"'
_ENGINES: tuple[RolloutEngineInfo | TrainEngineInfo, ...] = (
    *ROLLOUT_ENGINES.built_in.values(),
    *TRAIN_ENGINES.built_in.values(),
)
NOT_INSTALLED = (NEEDS_BITSANDBYTES, *(info.if_missing for info in _ENGINES if info.package))
"""Problems of a machine, not of a config."""


def engine_name(values: Values, key: str, engines: EngineRegistry[Any]) -> Iterator[Problem]:
    if (problem := engines.problem(values[key])) is not None:
        yield Problem(key, values[key], problem)
    info = engines.info(values[key])
    if info.package is not None and not is_installed(info.package):
        yield Problem(key, values[key], info.if_missing)


def is_installed(package: str) -> bool:
    """Whether a package can be found, of a dotted name also its parents."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def engine_ranks(values: Values, strategy: str, ranks: int, per_sequence: int, key: str) -> Iterator[Problem]:
    """What the training engine of `ranks` processes cannot do. per_sequence: ranks that split a sequence, by `key`."""
    info = TRAIN_ENGINES.info(values[strategy])
    if ranks > 1 and not info.is_distributed:
        yield Problem(strategy, values[strategy], f"trains in one process, not {ranks}; set fsdp")
    elif per_sequence > 1 and not info.sequence_parallel:
        message = f"{strategy}={values[strategy]} does not split sequences by Ulysses; set 1"
        yield Problem(key, per_sequence, message, also=(strategy,))


def rollout_engine(values: Values, section: str) -> Iterator[Problem]:
    name, tp = values[f"{section}.name"], values[f"{section}.tensor_model_parallel_size"]
    info = ROLLOUT_ENGINES.info(name)
    yield from engine_name(values, f"{section}.name", ROLLOUT_ENGINES)
    if tp > 1 and not info.tensor_parallel:
        message = (
            f"{NOT_SUPPORTED}: each worker holds the whole rollout model; set 1, or {section}.name=embedded or vllm"
        )
        if info.is_remote:
            message = f"{NOT_SUPPORTED}: servers are started with their own parallelism; set 1"
        yield Problem(f"{section}.tensor_model_parallel_size", tp, message, also=(f"{section}.name",))
    yield from _quantization(values, section)
    if info.is_remote:
        yield from servers(values, section, info.server_kind)


def _quantization(values: Values, section: str) -> Iterator[Problem]:
    name, ranks = f"{section}.name", f"{section}.tensor_model_parallel_size"
    info = ROLLOUT_ENGINES.info(values[name])
    for key, form in quantization_of(values, f"{section}.").items():
        if key.removeprefix(f"{section}.") in info.unread:
            message = f"{NOT_SUPPORTED} by {name}={values[name]}; set null, or {name}=embedded or vllm"
            yield Problem(key, form, message, also=(name,))
        elif info.quantizes and form not in info.quantizes:
            message = f"{name}={values[name]} quantises to {' or '.join(info.quantizes)}; set that or null"
            yield Problem(key, form, message, also=(name,))
        elif info.quantizes and values[ranks] > 1:
            message = f"{NOT_SUPPORTED} if several ranks hold the rollout model together; set null, or {ranks}=1"
            yield Problem(key, form, message, also=(ranks,))


def sampling(values: Values, *sections: str) -> Iterator[Problem]:
    for section in sections:
        temperature = values[f"{section}.temperature"]
        if values[f"{section}.do_sample"] and temperature < MIN_TEMPERATURE:
            message = (
                f"sampling needs a temperature above 0 (at least {MIN_TEMPERATURE:g}); set one, or do_sample=false"
            )
            yield Problem(f"{section}.temperature", temperature or 0, message, also=(f"{section}.do_sample",))


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


def run_warnings(values: Values) -> Iterator[str]:
    """Warnings about the keys of `trainer` that every training program has."""
    if values["trainer.resume_from_path"] and values["trainer.resume_mode"] != "resume_path":
        yield (
            "trainer.resume_from_path is used only with trainer.resume_mode=resume_path, "
            f"not {values['trainer.resume_mode']}"
        )
    if values["trainer.default_hdfs_dir"] and values["trainer.save_freq"] == 0:
        yield "trainer.default_hdfs_dir: nothing is copied, because trainer.save_freq=0 never saves"
    wait_s = values["trainer.hdfs_wait_s"]
    if wait_s != TrainerConfig.hdfs_wait_s and not values["trainer.default_hdfs_dir"]:
        yield f"trainer.hdfs_wait_s={wait_s:g} has no effect: set trainer.default_hdfs_dir"
    if values["trainer.test_freq"] > 0 and not values["data.val_files"]:
        yield f"trainer.test_freq={values['trainer.test_freq']} without data.val_files: there is no validation data"


def history_drafts(values: Values, section: str) -> Iterator[Problem]:
    """section: that of the rollout."""
    key, name_key, ranks_key = (
        f"{section}.{name}" for name in ("history_drafts.enable", "name", "tensor_model_parallel_size")
    )
    if not values[key]:
        return
    if not ROLLOUT_ENGINES.info(values[name_key]).drafts:
        message = f"{name_key}={values[name_key]} has no drafts from history; set false, or {name_key}=embedded"
        yield Problem(key, True, message, also=(name_key,))
    elif values[ranks_key] > 1:
        message = (
            f"each rank measures its own step times, but the ranks of {ranks_key}={values[ranks_key]} must take the same steps; "
            f"set false, or {ranks_key}=1"
        )
        yield Problem(key, True, message, also=(ranks_key,))


def exact(values: Values, section: str) -> Iterator[Problem]:
    """What the rollout of exact mode cannot do. section: that of the rollout."""
    key = f"{section}.exact"
    if not values[key]:
        return
    yield from requirements(
        values,
        key,
        (f"{section}.name", ("embedded",), "only the embedded engine computes with the trainer's own layers"),
        (f"{section}.tensor_model_parallel_size", (1,), "sums over ranks have another order"),
        (f"{section}.enable_rollout_routing_replay", (False,), "models with experts are not exact"),
    )
    for form in quantization_of(values, f"{section}."):
        message = f"the trainer does not compute in 8 bits; set {form}=null, or {key}=false"
        yield Problem(key, True, message, also=(form,))


def requirements(values: Values, key: str, *needs: tuple[str, tuple[Any, ...], str]) -> Iterator[Problem]:
    """key: a switch that is on. needs: other keys, the values that they may have then, and why."""
    for other, allowed, why in needs:
        if values[other] not in allowed:
            wanted = str(allowed[0]).lower() if isinstance(allowed[0], bool) else allowed[0]
            yield Problem(key, True, f"{why}; set {other}={wanted}, or {key}=false", also=(other,))
