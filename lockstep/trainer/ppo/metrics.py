"""Metrics of a training step and of a validation, from the batch, the timers and the scores.

batch                       -> compute_data_metrics        critic/*, response_length/*, prompt_length/*, num_turns/* ..
batch, seconds per stage    -> compute_timing_metrics      timing_s/*, timing_per_token_ms/*
token counts, seconds, GPUs -> compute_throughout_metrics  perf/*
batch, ranks                -> compute_balance_metrics     global_seqlen/*
batch                       -> compute_entropy_metrics     actor/entropy
validation scores           -> process_validation_metrics  {data source: {variable: {metric: value}}}
                            -> name_validation_metrics     val-core/*, val-aux/*
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.protocol import DataProto
from lockstep.protocol.columns import Batch
from lockstep.protocol.tokens import entries, lengths_of, read, row_chunks, row_sums, shape_of
from lockstep.trainer.ppo.agent_rollout import COUNT_COLUMNS
from lockstep.trainer.ppo.mini_batches import spread
from lockstep.utils.seqlen import log_seqlen_unbalance

NUM_BOOTSTRAP = 1000
BOOTSTRAP_SEED = 42

# stages whose cost is per token of the sequence; generation is per response token
SEQUENCE_STAGES = ("ref", "values", "adv", "update_critic", "update_actor")

CONVERSATION_COLUMNS = {"__num_turns__": "num_turns", **{name: name for name in COUNT_COLUMNS.values()}}
"""Columns of conversations, and the names of their metrics."""

ValidationMetrics = dict[str, dict[str, dict[str, float]]]
"""Data source -> variable -> metric -> mean over its prompts."""
PromptMetrics = dict[str, dict[str, dict[str, list[float]]]]
"""Data source -> variable -> metric -> one value per prompt."""


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Scores, rewards, advantages, returns and lengths of a step's batch; with `use_critic` also the values.

    Scores and rewards are per sequence and exclude aborted ones (an empty response); advantages, returns and values are per
    response token. vf_explained_var = 1 - var(returns - values) / var(returns).
    """
    tensors = batch.tensors
    prompt_B, response_B = _lengths(batch)
    finished_B = response_B > 0
    max_response, max_prompt = shape_of(tensors, "responses")[-1], shape_of(tensors, "prompts")[-1]
    names = ["advantages", "returns", "values"] if use_critic else ["advantages", "returns"]
    mask, *columns = entries(tensors, "response_mask", *names)
    of_tokens = {name: _floats(column)[_bools(mask)] for name, column in zip(names, columns)}
    returns = of_tokens["returns"]

    score_B = _row_sums(tensors, "token_level_scores")
    metrics = {
        **_mean_max_min("critic/score", score_B[finished_B]),
        **_equal_groups(score_B, batch.non_tensor_batch.get("uid")),
        **_mean_max_min("critic/rewards", _row_sums(tensors, "token_level_rewards")[finished_B]),
        **_mean_max_min("critic/advantages", of_tokens["advantages"]),
        **_mean_max_min("critic/returns", returns),
    }
    if use_critic:
        values = of_tokens["values"]
        metrics |= _mean_max_min("critic/values", values)
        metrics["critic/vf_explained_var"] = 1.0 - _variance(returns - values) / (_variance(returns) + 1e-5)
    metrics |= {
        **_length_metrics("response_length", response_B, max_response),
        **_length_metrics("response_length_non_aborted", response_B[finished_B], max_response),
        "response/aborted_ratio": float((~finished_B).mean()),
        **_length_metrics("prompt_length", prompt_B, max_prompt),
    }
    for key, name in CONVERSATION_COLUMNS.items():
        if key in batch.non_tensor_batch:
            metrics |= _mean_max_min(name, batch.non_tensor_batch[key].astype(np.float64))
    return metrics


def _equal_groups(score_B: np.ndarray, uid_B: np.ndarray | None) -> dict[str, float]:
    """Share of the groups (samples of one prompt) whose scores are all equal; none if no prompt has several samples."""
    groups: dict[Any, list[float]] = {}
    for uid, score in zip(() if uid_B is None else uid_B.tolist(), score_B.tolist()):
        groups.setdefault(uid, []).append(score)
    compared = [len(set(scores)) == 1 for scores in groups.values() if len(scores) > 1]
    return {"critic/score/zero_variance_groups": sum(compared) / len(compared)} if compared else {}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Seconds per stage, and milliseconds per token of the stages whose cost depends on the tokens."""
    prompt_B, response_B = _lengths(batch)
    num_response_tokens = int(response_B.sum())
    num_tokens = dict.fromkeys(SEQUENCE_STAGES, int(prompt_B.sum()) + num_response_tokens)
    num_tokens["gen"] = num_response_tokens
    return {
        **{f"timing_s/{name}": seconds for name, seconds in timing_raw.items()},
        **{
            f"timing_per_token_ms/{name}": 1000.0 * timing_raw[name] / num_tokens[name]
            for name in timing_raw
            if num_tokens.get(name, 0) > 0
        },
    }


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step (from `meta_info["global_token_num"]`), seconds, and tokens per second and GPU."""
    total_num_tokens = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": total_num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": total_num_tokens / (seconds * n_gpus),
    }


def compute_balance_metrics(batch: DataProto, num_ranks: int) -> dict[str, float]:
    """Imbalance of tokens between ranks, before and after balancing; writes `meta_info["global_token_num"]`."""
    prompts, responses = lengths_of(batch.tensors)
    lengths: list[int] = (prompts + responses).tolist()
    batch.meta_info["global_token_num"] = lengths
    parts = spread(lengths, num_ranks, balance=True)
    return log_seqlen_unbalance(lengths, [part for part in parts if part], prefix="global_seqlen")


def compute_entropy_metrics(batch: DataProto, loss_agg_mode: str) -> dict[str, float]:
    num_tokens = row_sums(batch.tensors, "response_mask")
    entropy = sum(
        agg_loss(
            read(part, "entropys"),
            read(part, "response_mask"),
            loss_agg_mode,
            batch_num_tokens=int(num_tokens.sum()),
            global_batch_size=int((num_tokens > 0).sum()),
        )
        for part in row_chunks(batch.tensors)
    )
    return {"actor/entropy": float(entropy)}


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Any],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = BOOTSTRAP_SEED,
) -> ValidationMetrics:
    """Statistics of the responses to each prompt, averaged over the prompts of a data source.

    infos_dict has one value per response for each variable, or None; variables that are not numeric are skipped. With N
    responses per prompt: mean@N and std@N, and, for n = 2, 4, .. N, the best, the worst and (if `pred` is given) the majority
    of n responses drawn with replacement, as mean and standard deviation over 1000 draws with `seed`. A single response
    has only mean@1.
    """
    per_prompt = prompt_metrics(data_sources, sample_uids, infos_dict, seed)
    return {
        source: {
            variable: {name: float(np.mean(values)) for name, values in by_metric.items()}
            for variable, by_metric in variables.items()
        }
        for source, variables in per_prompt.items()
    }


def prompt_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Any],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = BOOTSTRAP_SEED,
) -> PromptMetrics:
    """The same before the average: one value per prompt that has the metric."""
    rows_of: dict[str, dict[Any, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids)):
        rows_of.setdefault(source, {}).setdefault(uid, []).append(row)
    numeric = {name: vals for name, vals in infos_dict.items() if is_numeric(vals)}
    predictions = infos_dict.get("pred")

    result: PromptMetrics = {}
    for source, prompts in rows_of.items():
        for variable, values in numeric.items():
            by_metric = result.setdefault(source, {}).setdefault(variable, {})
            for rows in prompts.values():
                present = [row for row in rows if values[row] is not None]
                if not present:
                    continue
                numbers = np.array([values[row] for row in present], dtype=np.float64)
                preds = None if predictions is None else [predictions[row] for row in present]
                for name, value in _prompt_metrics(numbers, preds, seed).items():
                    by_metric.setdefault(name, []).append(value)
    return result


def name_validation_metrics(metrics: ValidationMetrics) -> dict[str, float]:
    """The logged names: `val-core/{data source}/{variable}/{metric}` for the main metrics, `val-aux/` for the rest.

    Main are mean, majority and best over the largest number of responses, of the variable `acc` or else `reward`.
    """
    named = {}
    for source, variables in metrics.items():
        main = core_variable(variables)
        for variable, values in variables.items():
            largest = max((_num_responses(name) for name in values), default=0)
            for name, value in values.items():
                core_metric = name.startswith(("mean@", "maj@", "best@")) and not name.endswith("/std")
                core = variable == main and core_metric and _num_responses(name) == largest
                named[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return named


def core_variable(variables: Mapping[str, Any]) -> str:
    """The variable of a data source's main metrics."""
    return "acc" if variables.get("acc") else "reward"


def _num_responses(name: str) -> int:
    """The n in a name like best@n/mean."""
    return int(name.split("@")[1].split("/")[0])


def _prompt_metrics(values: np.ndarray, predictions: Sequence[Any] | None, seed: int) -> dict[str, float]:
    """mean, std, best, worst and majority of the responses to one prompt."""
    num_responses = len(values)
    metrics = {f"mean@{num_responses}": float(values.mean())}
    if num_responses == 1:
        return metrics
    metrics[f"std@{num_responses}"] = float(values.std())
    for n in subset_sizes(num_responses):
        draws = np.random.RandomState(seed).choice(num_responses, size=(NUM_BOOTSTRAP, n), replace=True)
        outcomes = {"best": values[draws].max(axis=1), "worst": values[draws].min(axis=1)}
        if predictions is not None:
            outcomes["maj"] = np.array([_majority_value(values, predictions, draw) for draw in draws])
        for name, drawn in outcomes.items():
            metrics[f"{name}@{n}/mean"] = float(drawn.mean())
            metrics[f"{name}@{n}/std"] = float(drawn.std())
    return metrics


def subset_sizes(num_responses: int) -> list[int]:
    """2, 4, 8, .. and `num_responses`."""
    powers = [2**k for k in range(1, num_responses.bit_length()) if 2**k < num_responses]
    return [*powers, num_responses]


def _majority_value(values: np.ndarray, predictions: Sequence[Any], draw: np.ndarray) -> float:
    """The value of the first response with the most frequent prediction; ties go to the one drawn first."""
    votes: dict[Any, list[int]] = {}
    for i in draw:
        votes.setdefault(predictions[i], []).append(i)
    winners = max(votes.values(), key=len)
    return float(values[winners[0]])


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether there are values besides None, and all of them are numbers."""
    present = [value for value in values if value is not None]
    return bool(present) and all(isinstance(value, int | float | np.number | np.bool_) for value in present)


def _lengths(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each prompt and of each response (including tool output), (B,)."""
    prompts, responses = lengths_of(batch.tensors)
    return prompts.numpy(), responses.numpy()


def _row_sums(tensors: Batch, name: str) -> np.ndarray:
    return np.concatenate([_floats(read(part, name)).sum(-1) for part in row_chunks(tensors)])


def _floats(tensor: Tensor) -> np.ndarray:
    """float32 on the host: numpy is faster than torch for small arrays."""
    array: np.ndarray = tensor.detach().float().cpu().numpy()
    return array


def _bools(mask: Tensor) -> np.ndarray:
    array: np.ndarray = mask.bool().cpu().numpy()
    return array


def _mean_max_min(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, maximum and minimum; 0 if there are no values (every response aborted)."""
    mean, largest, least = (values.mean(dtype=np.float64), values.max(), values.min()) if values.size else (0, 0, 0)
    return {f"{name}/mean": float(mean), f"{name}/max": float(largest), f"{name}/min": float(least)}


def _length_metrics(name: str, lengths_B: np.ndarray, limit: int) -> dict[str, float]:
    """Mean, maximum, minimum and the fraction at the limit."""
    clipped = float((lengths_B == limit).mean()) if lengths_B.size else 0.0
    return {**_mean_max_min(name, lengths_B), f"{name}/clip_ratio": clipped}


def _variance(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # non-finite values give NaN
        return float(values.var(ddof=1, dtype=np.float64)) if values.size > 1 else 0.0
