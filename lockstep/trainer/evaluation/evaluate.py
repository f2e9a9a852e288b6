"""Evaluation: the second half of a validation, on the responses in a file.

rows with responses ─► reward function, as in training ─► scores ─► val-core/…, val-aux/…, pass@k ─► table, JSON
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.config.evaluation import EvaluationConfig, as_validation
from lockstep.data.files import FileRow, read_rows
from lockstep.data.rows import rows_by_source, to_schema
from lockstep.observability.rollout_log import write_generations
from lockstep.observability.step_line import format_number
from lockstep.rewards.managers import DapoRewardManager, NaiveRewardManager, check_scorers, load_reward_manager
from lockstep.rewards.managers.naive import ScoringRow
from lockstep.trainer.evaluation.accuracy import Intervals, accuracy, prompts_of
from lockstep.trainer.generation.generated_rows import COLUMNS
from lockstep.trainer.ppo.sampling import fill_failed
from lockstep.trainer.ppo.validation import Responses
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.files import atomic_write_json
from lockstep.utils.progress import phase
from lockstep.utils.untrusted import printable

logger = logging.getLogger(__name__)

LENGTHS, ROLLOUT_INFOS = "response_lengths", "rollout_infos"
"""Columns that `lockstep generate` writes: the responses' lengths in tokens, and what agents tell the reward function."""


def evaluate(config: EvaluationConfig) -> dict[str, float]:
    """Score the responses of the file, show and write the metrics, and return them."""
    with phase("read the data"):
        rows = [
            _complete(row, number, config)
            for number, row in enumerate(read_rows(local_data_files(config.data.path, "val", "data.path")))
        ]
        responses, scoring = responses_of(rows, config)
    manager = load_manager(config, rows)
    if "raw_prompt" in getattr(manager.compute_score, "columns", {}):
        scoring = [
            replace(row, extra_info=row.extra_info | {"raw_prompt": text})
            for row, text in zip(scoring, responses.inputs)
        ]
    logger.info("scoring %d responses to %d prompts", len(scoring), len(rows))
    with phase("rewards"):
        scores, extra = manager.score_rows(scoring)
    for number, rewards in enumerate(extra.pop("turn_rewards", ())):
        scores[number] += sum(rewards or ())
    responses.scores = np.asarray(scores, dtype=np.float32).tolist()  # as in a validation's batch
    responses.extra = fill_failed(extra)
    metrics, intervals = accuracy(responses, config.data.correct_score)
    console, threshold = Console(highlight=False), config.data.correct_score
    console.print(table_of(responses, metrics, intervals))
    console.print(
        f"pass@k: a response is correct if its acc, else its score, is {threshold:g} or more (data.correct_score)"
    )
    if config.data.output_path:
        write_metrics(Path(config.data.output_path).expanduser(), responses, metrics, intervals, threshold)
    if config.data.scores_path:
        write_scores(Path(config.data.scores_path).expanduser(), responses)
    return metrics


def _complete(row: FileRow, number: int, config: EvaluationConfig) -> FileRow:
    """The row with the columns that scoring reads; what was generated is no part of its `extra_info`."""
    keys = config.data
    given = {name: value for name, value in row.columns.items() if name not in (keys.response_key, *COLUMNS)}
    full = to_schema(given, number, keys.prompt_key, keys.data_source_key, keys.reward_model_key)
    return replace(row, columns=row.columns | full | {"reward_model": full.get(keys.reward_model_key)})


def load_manager(config: EvaluationConfig, rows: Sequence[FileRow]) -> NaiveRewardManager:
    """The reward manager of a validation; ValueError if it cannot score texts or a data source has no scorer."""
    manager: Any = load_reward_manager(as_validation(config), tokenizer=None, num_examine=0)
    if not isinstance(manager, NaiveRewardManager):
        raise ValueError(
            f"reward_model.reward_manager={config.reward_model.reward_manager}: evaluation has texts, not a batch; set a "
            "built-in manager (naive, batch, dapo, prime) and custom_reward_function.path"
        )
    if isinstance(manager, DapoRewardManager) and manager.overlong.enable:
        for row in rows:
            if not row.columns.get(LENGTHS):
                raise ValueError(
                    f"{row.location} has no {LENGTHS!r}, which the overlong penalty needs; add the column, or set "
                    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=false"
                )
    check_scorers(manager, rows_by_source(rows, config.data.data_source_key))
    return manager


def responses_of(rows: Sequence[FileRow], config: EvaluationConfig) -> tuple[Responses, list[ScoringRow]]:
    """The responses of the file, and the same as the reward function gets them. ValueError for a row that has none."""
    responses = Responses(details={"index": [], "length": [], "finish_reason": [], "messages": []})
    scoring: list[ScoringRow] = []
    for number, row in enumerate(rows):
        texts = _texts(row, config.data.response_key)
        source = str(_column(row, config.data.data_source_key, "data.data_source_key"))
        truth = _ground_truth(row, config.data.reward_model_key)
        extra_info = row.columns.get("extra_info") or {}
        if not isinstance(extra_info, Mapping):
            raise ValueError(f"{row.location}: 'extra_info' must be an object, not {extra_info!r:.80}")
        lengths = _per_response(row, LENGTHS, texts, 0)
        index = extra_info.get("index")
        responses.inputs += [_prompt_text(row.columns.get(config.data.prompt_key))] * len(texts)
        responses.outputs += texts
        responses.ground_truths += [truth] * len(texts)
        responses.uids += [str(number)] * len(texts)
        responses.data_sources += [source] * len(texts)
        responses.details["index"] += [number if index is None else index] * len(texts)
        responses.details["length"] += lengths
        responses.details["finish_reason"] += _per_response(row, "finish_reasons", texts, None)
        conversations = [json.loads(given) for given in _per_response(row, ROLLOUT_INFOS, texts, "{}")]
        responses.details["messages"] += [conversation.get("messages") for conversation in conversations]
        scoring += [
            ScoringRow(source, text, truth, {**extra_info, **conversation}, length)
            for text, conversation, length in zip(texts, conversations, lengths)
        ]
    if not any(responses.details["messages"]):
        del responses.details["messages"]
    return responses, scoring


def _texts(row: FileRow, name: str) -> list[str]:
    texts = _column(row, name, "data.response_key")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{row.location}: {name!r} must be a list of texts; set data.response_key to the column of responses"
        )
    return texts


def _per_response(row: FileRow, name: str, texts: list[str], default: Any) -> list[Any]:
    """An optional column with an entry for each text. ValueError if it belongs to other responses."""
    values = row.columns.get(name) or [default] * len(texts)
    if not isinstance(values, list) or len(values) != len(texts):
        raise ValueError(
            f"{row.location}: {name!r} must have one entry for each of the {len(texts)} responses; remove the column if it is "
            "not about them"
        )
    return values


def _ground_truth(row: FileRow, name: str) -> Any:
    answer = _column(row, name, "data.reward_model_key")
    if not isinstance(answer, Mapping) or "ground_truth" not in answer:
        raise ValueError(
            f"{row.location}: {name!r} has no `ground_truth`; set data.reward_model_key to a column that has"
        )
    return answer["ground_truth"]


def _column(row: FileRow, name: str, key: str) -> Any:
    if row.columns.get(name) is None:
        raise ValueError(f"{row.location} has no {name!r}; set {key} to one of its columns: {', '.join(row.columns)}")
    return row.columns[name]


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return "" if prompt is None else str(prompt)


def table_of(responses: Responses, metrics: Mapping[str, float], intervals: Intervals) -> Table:
    """The metrics that have an interval, per data source."""
    table = Table("data source", "prompts", "metric", "value", "95 % interval", box=None)
    sources = prompts_of(responses)
    for source, prompts in sources.items():
        first = [escape(printable(source)), str(len(prompts))]
        for name, bounds in intervals.items():
            path = name.partition("/")[2]
            # a data source may be the beginning of another
            if source == max((s for s in sources if path.startswith(f"{s}/")), key=len):
                metric = escape(printable(path.removeprefix(f"{source}/")))
                low, high = map(format_number, bounds)
                table.add_row(*first, metric, format_number(metrics[name]), f"{low} to {high}")
                first = ["", ""]
    return table


def write_metrics(
    path: Path, responses: Responses, metrics: Mapping[str, float], intervals: Intervals, correct_score: float
) -> None:
    counts = {source: len(prompts) for source, prompts in prompts_of(responses).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(
        path, {"metrics": metrics, "intervals_95": intervals, "num_prompts": counts, "correct_score": correct_score}
    )
    logger.info("wrote %s", path)


def write_scores(path: Path, responses: Responses) -> None:
    texts = (responses.inputs, responses.outputs, responses.ground_truths, responses.scores)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_generations(*texts, responses.dumped_details, responses.extra, path)
    logger.info("wrote %s; `lockstep rollouts %s` shows it", path, path)
