"""Checks of a whole configuration of SFT or preference training, composed of those that the programs share and its own."""

import os
from collections.abc import Iterator
from itertools import chain

from lockstep.config import checks
from lockstep.config.checks import Values
from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.errors import Problem, show
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.megatron_checks import layout_problems
from lockstep.config.preference import DPOConfig
from lockstep.config.roles import SUPERVISED
from lockstep.config.schema import defaults, flat_values, out_of_bounds
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.config.train_engines import engine_settings, ranks_per_sequence
from lockstep.config.watchdog import SUPERVISED_PHASES
from lockstep.config.without_effect import Reason, engine_reasons, notices, profiler_reasons

_ENGINE, _STRATEGY = SUPERVISED.fsdp, SUPERVISED.strategy
_RANKS = f"{_ENGINE}.ulysses_sequence_parallel_size"

NEVER_READ = {
    f"{_ENGINE}.wrap_policy.min_num_params": "models are sharded layer by layer",
    f"{_ENGINE}.param_offload": f"training is the only phase; set {_ENGINE}.offload_policy=true to keep parameters on the host",
    f"{SUPERVISED.of_engine('megatron')}.param_offload": "training is the only phase",
}
"""Keys that no run reads, and why."""


def check_supervised(config: SupervisedConfig) -> tuple[list[Problem], list[str]]:
    """Everything that prevents the configuration from running, and warnings about likely mistakes."""
    values = flat_values(config)
    problems = chain(
        out_of_bounds(type(config), values),
        checks.tracker_names(values),
        checks.fixed_values(values),
        checks.data_files(values),
        checks.model(values, "model.path", "the model to train"),
        checks.engine_name(values, _STRATEGY, TRAIN_ENGINES),
        checks.adapters(values, "model"),
        checks.tokenizers(values, "model.tokenizer_path"),
        checks.python_file(values, "data.custom_cls.path"),
        checks.class_name(values, "data.custom_cls.path", "data.custom_cls.name"),
        checks.resume_path(values),
        checks.remote_store(config),
        checks.watchdog(values, SUPERVISED_PHASES),
        _ranks(config, values),
        _budget(config, values, sequences=1 if isinstance(config, SFTConfig) else 2),
        _dpo(values) if isinstance(config, DPOConfig) else (),
    )
    return list(problems), [*checks.run_warnings(values), *_without_effect(values, defaults(type(config)))]


def _dpo(values: Values) -> Iterator[Problem]:
    if values["dpo.label_smoothing"] and values["dpo.loss_type"] != "sigmoid":
        message = f"dpo.loss_type={values['dpo.loss_type']} has none; set 0, or dpo.loss_type=sigmoid"
        yield Problem("dpo.label_smoothing", values["dpo.label_smoothing"], message, also=("dpo.loss_type",))


def _ranks(config: SupervisedConfig, values: Values) -> Iterator[Problem]:
    """How the processes of torchrun shard the model and split sequences."""
    processes, settings = int(os.environ.get("WORLD_SIZE", "1")), engine_settings(config.model)
    if isinstance(settings, McoreEngineConfig):
        where, key_of_processes = "the number of processes", "torchrun's --nproc_per_node"
        section = SUPERVISED.of_engine("megatron")
        yield from layout_problems(settings, section, processes, where, key_of_processes)
    ranks, shard = values[_RANKS], values[f"{_ENGINE}.fsdp_size"]
    if SUPERVISED.engine(values) != _ENGINE:
        return  # a notice says that these keys have no effect
    if ranks < 1 or shard < -1 or shard == 0:
        return  # reported by `out_of_bounds`
    yield from checks.engine_ranks(values, _STRATEGY, processes, ranks, _RANKS)
    if processes % ranks:
        message = f"does not divide the number of processes ({processes}; torchrun --nproc_per_node); set a divisor"
        yield Problem(_RANKS, ranks, message)
    elif ranks > 1 and not values["model.use_remove_padding"]:
        message = f"splitting sequences across ranks ({_RANKS}={ranks}) needs packed sequences; set true"
        yield Problem("model.use_remove_padding", False, message, also=(_RANKS,))
    if shard != -1 and processes % shard:
        message = f"does not divide the number of processes ({processes}); set a divisor, or -1 for all"
        yield Problem(f"{_ENGINE}.fsdp_size", shard, message)


def _budget(config: SupervisedConfig, values: Values, sequences: int) -> Iterator[Problem]:
    """sequences: how many of them share a micro-batch in any case."""
    ranks, longest = ranks_per_sequence(config.model), sequences * values["data.max_length"]
    budget = values["data.max_token_len_per_gpu"]
    if values["data.use_dynamic_bsz"] and ranks > 0 and 0 < budget * ranks < longest:
        what = "a sequence" if sequences == 1 else "the two sequences of a pair"
        message = f"{what} can have {longest} tokens (data.max_length); set {-(-longest // ranks)} or more"
        yield Problem("data.max_token_len_per_gpu", budget, message, also=("data.max_length",))


def _without_effect(values: Values, default: Values) -> Iterator[str]:
    discrete = tuple(f"global_profiler.global_tool_config.{tool}.discrete" for tool in ("torch", "nsys"))
    of_profiler = profiler_reasons(values, ("profiler",), is_on_ray=False)
    profiled_whole: Reason = (True, "a step is profiled as a whole", discrete)
    yield from notices((*of_profiler, profiled_whole, *engine_reasons(values, [SUPERVISED])), values, default)
    reasons = dict(NEVER_READ)
    if values["data.use_dynamic_bsz"]:
        reasons["data.micro_batch_size_per_gpu"] = "data.use_dynamic_bsz fills micro-batches by tokens"
    if values["trainer.test_freq"] < 1:
        reasons["data.val_files"] = "set trainer.test_freq to validate"
    for name, reason in reasons.items():
        if values[name]:
            yield f"{name}={show(values[name])} has no effect: {reason}"
