"""Checks of whole configurations of generation and evaluation, composed of those that training shares and their own."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from lockstep.config import checks
from lockstep.config.checks import Values
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.config.errors import NO_VALUE, Problem, show
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig, as_validation
from lockstep.config.schema import flat_values, out_of_bounds
from lockstep.utils.dataset_files import FORMS as DATA_FORMS, locate_data

NEVER_READ = {
    "model.enable_gradient_checkpointing": "the model is not trained",
    "model.use_remove_padding": "the model is not trained",
}
"""Keys of `model` that generation does not read, and why."""


def check_generation(config: GenerationConfig) -> tuple[list[Problem], list[str]]:
    """Everything that prevents the configuration from running, and warnings about likely mistakes."""
    values = flat_values(config)
    problems = chain(
        out_of_bounds(type(config), values),
        checks.fixed_values(values),
        _data_path(values, "the prompts"),
        checks.model(values, "model.path", "the model that answers"),
        checks.tokenizers(values, "model.tokenizer_path"),
        checks.adapters(values, "model"),
        checks.rollout_engine(values, "rollout"),
        _tensor_parallel(values),
        _generating_workers(values),
        checks.history_drafts(values, "rollout"),
        checks.exact(values, "rollout"),
        checks.sampling(values, "rollout"),
        _output(values, "data.output_path", ".parquet", ".jsonl", required=True),
        _max_model_len(values),
        checks.controller(as_validation(config), values),
    )
    return list(problems), list(_generation_warnings(values))


def check_evaluation(config: EvaluationConfig) -> tuple[list[Problem], list[str]]:
    values = flat_values(config)
    problems = chain(
        out_of_bounds(type(config), values),
        checks.reward_manager(values),
        _data_path(values, "the rows with responses"),
        checks.python_file(values, "custom_reward_function.path"),
        _output(values, "data.output_path", ".json"),
        _output(values, "data.scores_path", ".jsonl"),
        _overlong_penalty(values),
    )
    return list(problems), []


def _data_path(values: Values, what: str) -> Iterator[Problem]:
    if not values["data.path"]:
        yield Problem("data.path", NO_VALUE, f"must name {what}; {DATA_FORMS}")
    for path in values["data.path"]:
        try:
            locate_data(path, "val")
        except ValueError as error:
            yield Problem("data.path", path, str(error))


def _overlong_penalty(values: Values) -> Iterator[Problem]:
    options, key = values["reward_model.reward_kwargs"], "data.max_response_length"
    buffer = options.get("overlong_buffer_cfg")
    if isinstance(buffer, Mapping) and buffer.get("enable") and "max_resp_len" not in options and not values[key]:
        yield Problem(key, values[key], "the overlong penalty needs it; set that of the generation")


def _output(values: Values, key: str, *suffixes: str, required: bool = False) -> Iterator[Problem]:
    path, listed = values[key], " or ".join(suffixes)
    if not path and required:
        yield Problem(key, NO_VALUE, f"must be the {listed} file to write")
    elif path and Path(path).suffix not in suffixes:
        yield Problem(key, path, f"must end in {listed}")
    elif path and Path(path).is_dir():
        yield Problem(key, path, "is a folder; set a file")


def _tensor_parallel(values: Values) -> Iterator[Problem]:
    key, sizes = "rollout.tensor_model_parallel_size", ("trainer.nnodes", "trainer.n_gpus_per_node")
    ranks, workers = values[key], values[sizes[0]] * values[sizes[1]]
    if ROLLOUT_ENGINES.info(values["rollout.name"]).tensor_parallel and ranks > 0 and workers % ranks:
        message = f"does not divide the number of workers ({workers}); set a divisor"
        yield Problem(key, ranks, message, also=sizes)


def _generating_workers(values: Values) -> Iterator[Problem]:
    if (count := values["rollout.n_gpus"]) is not None:
        message = "all workers generate; set null, and trainer.n_gpus_per_node to the number of workers"
        yield Problem("rollout.n_gpus", count, message, also=("trainer.n_gpus_per_node",))


def _max_model_len(values: Values) -> Iterator[Problem]:
    lengths = ("data.max_prompt_length", "data.max_response_length")
    longest, limit = sum(values[name] for name in lengths), values["rollout.max_model_len"]
    if limit is not None and 0 < limit < longest:
        message = f"{' + '.join(lengths)} is {longest}; set that or more, or null"
        yield Problem("rollout.max_model_len", limit, message, also=lengths)


def _generation_warnings(values: Values) -> Iterator[str]:
    if values["data.n_samples"] > 1 and not values["rollout.do_sample"]:
        yield f"rollout.do_sample=false: the {values['data.n_samples']} responses to a prompt will be identical"
    unread = {key: why for key, why in NEVER_READ.items() if values[key] is not True}
    defaults, engine = flat_values(GenerationConfig()), values["rollout.name"]
    info = ROLLOUT_ENGINES.info(engine)
    names = {*info.unread, *(("quantization",) if info.is_remote else ())} - {"dtype"}  # that of the model here
    keys = [key for key in values if key.removeprefix("rollout.") in names]
    unread |= {key: f"rollout.name is {engine}" for key in keys if values[key] != defaults[key]}
    if values["rollout.server.reload_command"] is not None:
        unread["rollout.server.reload_command"] = "the model is not trained"
    for key, why in unread.items():
        yield f"{key}={show(values[key])} has no effect: {why}"
