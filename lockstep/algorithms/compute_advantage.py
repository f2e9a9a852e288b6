"""Advantages on a batch: call the configured estimator with the columns it needs.

attention_mask, responses                          -> compute_response_mask
token_level_rewards, response_mask, values, uid .. -> compute_advantage -> advantages, returns
"""

import inspect
from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.algorithms.advantages import AdvantageFn, get_adv_estimator_fn, parameters_of, required_inputs
from lockstep.algorithms.advantages.registry import is_by_group
from lockstep.config.algorithm import AlgoConfig
from lockstep.config.plugin_settings import estimator_settings
from lockstep.protocol import DataProto
from lockstep.protocol.columns import names_of
from lockstep.protocol.tokens import pack, read, rows_per_part, shape_of
from lockstep.registry import defined_at, describe


def compute_response_mask(data: DataProto) -> Tensor:
    """The part of attention_mask that covers the responses, (B, R); correct for responses without tool tokens."""
    return read(data.tensors, "attention_mask")[:, -shape_of(data.tensors, "responses")[1] :]


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
) -> DataProto:
    """Write `advantages` and `returns` into the batch and return it; `response_mask` is computed if it is missing.

    The estimator receives the arguments it has parameters for (all of them if it takes **kwargs): `index` is the uid of
    each sample, any other name is an argument of this function, a batch key, or a setting of the estimator
    (`config.adv_kwargs`). Without a config, estimators that read one get a config made from gamma, lam and
    norm_adv_by_std_in_grpo. `num_repeat` (samples per prompt) is accepted for compatibility with verl and unused: groups
    are found by uid.
    """
    estimator = get_adv_estimator_fn(adv_estimator)
    if "response_mask" not in data.tensors:
        data.tensors["response_mask"] = compute_response_mask(data)
    if config is None:
        config = AlgoConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    given = dict(getattr(config, "adv_kwargs", None) or {})  # a program of verl may pass its own config
    settings = estimator_settings(estimator, given)
    others: dict[str, Any] = {
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config,
        **{name: settings[name] for name in given},
    }
    _check_columns(data, adv_estimator, {*settings, *others})

    def estimate(part: DataProto) -> dict[str, Tensor]:
        columns = {name: partial(read, part.tensors, name) for name in names_of(part.batch)}
        named: dict[str, Any] = {"batch": part.tensors, "non_tensor_batch": part.non_tensor_batch}
        if "uid" in part.non_tensor_batch:
            named["index"] = part.non_tensor_batch["uid"]
        result = estimator(**_accepted(estimator, settings | columns | named | others))
        shape = shape_of(part.tensors, "response_mask")
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or any(not isinstance(values, Tensor) or values.shape != shape for values in result):
            raise ValueError(
                f"algorithm.adv_estimator={adv_estimator}: {defined_at(estimator)} must return (advantages, returns), two "
                f"tensors of shape {tuple(shape)}; it returned {describe(result)}"
            )
        return dict(zip(("advantages", "returns"), result))

    if is_by_group(estimator) and len(data) > rows_per_part(data.tensors):
        parts = _by_prompt(data)
        columns = {p.name for p in parameters_of(estimator)} & set(names_of(data.batch))
        inputs = data.select([*columns, "responses"])
        outputs = DataProto.concat([part.outputs(estimate(part)) for part in map(inputs.select_idxs, parts)])
        found: Any = outputs.select_idxs(np.argsort(np.concatenate(parts))).tensors
        data.tensors.update(found)
    else:
        data.tensors.update(estimate(data))
    return pack(data)


def _check_columns(data: DataProto, adv_estimator: str, others: Collection[str]) -> None:
    available = {*names_of(data.batch), *others, "batch", "non_tensor_batch"}
    if "uid" in data.non_tensor_batch:
        available.add("index")
    missing = required_inputs(adv_estimator) - available
    if missing:
        names = ", ".join("uid" if name == "index" else name for name in sorted(missing))
        raise ValueError(f"algorithm.adv_estimator={adv_estimator} needs batch keys that are missing: {names}")


def _by_prompt(data: DataProto) -> list[np.ndarray]:
    """Row numbers in parts that are small enough to be padded; all samples of a prompt are in one."""
    rows_of: dict[Any, list[int]] = {}
    for row, uid in enumerate(data.non_tensor_batch.get("uid", range(len(data)))):
        rows_of.setdefault(uid, []).append(row)
    limit = rows_per_part(data.tensors)
    parts: list[list[int]] = [[]]
    for rows in rows_of.values():
        if parts[-1] and len(parts[-1]) + len(rows) > limit:
            parts.append([])
        parts[-1] += rows
    return [np.array(part) for part in parts]


def _accepted(estimator: AdvantageFn, available: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the estimator has parameters for; all of them if it takes **kwargs, unless it is `by_group`.

    Columns are read when they are needed.
    """
    parameters = parameters_of(estimator)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters) and not is_by_group(estimator)
    names = list(available) if takes_all else [p.name for p in parameters if p.name in available]
    return {name: v() if isinstance(v := available[name], partial) else v for name in names}
