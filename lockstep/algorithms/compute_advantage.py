"""Advantages on a batch: call the configured estimator with the columns it needs.

attention_mask, responses                          -> compute_response_mask
token_level_rewards, response_mask, values, uid .. -> compute_advantage -> advantages, returns
"""

import inspect
from typing import Any

from torch import Tensor

from lockstep.algorithms.advantages import AdvantageFn, get_adv_estimator_fn, parameters_of, required_inputs
from lockstep.config.algorithm import AlgoConfig
from lockstep.config.plugin_settings import estimator_settings
from lockstep.protocol import DataProto
from lockstep.registry import defined_at, describe


def compute_response_mask(data: DataProto) -> Tensor:
    """The part of attention_mask that covers the responses, (B, R); correct for responses without tool tokens."""
    assert data.batch is not None
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


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
    assert data.batch is not None
    estimator = get_adv_estimator_fn(adv_estimator)
    if "response_mask" not in data.batch:
        data.batch["response_mask"] = compute_response_mask(data)
    if config is None:
        config = AlgoConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    given = dict(getattr(config, "adv_kwargs", None) or {})  # a program of verl may pass its own config
    settings = estimator_settings(estimator, given)
    available: dict[str, Any] = {
        **settings,
        **data.batch,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config,
        "batch": data.batch,
        "non_tensor_batch": data.non_tensor_batch,
        **{name: settings[name] for name in given},
    }
    if "uid" in data.non_tensor_batch:
        available["index"] = data.non_tensor_batch["uid"]
    missing = required_inputs(adv_estimator) - set(available)
    if missing:
        names = ", ".join("uid" if name == "index" else name for name in sorted(missing))
        raise ValueError(f"algorithm.adv_estimator={adv_estimator} needs batch keys that are missing: {names}")
    result = estimator(**_accepted(estimator, available))
    shape = data.batch["response_mask"].shape
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or any(not isinstance(part, Tensor) or part.shape != shape for part in result):
        raise ValueError(
            f"algorithm.adv_estimator={adv_estimator}: {defined_at(estimator)} must return (advantages, returns), two "
            f"tensors of shape {tuple(shape)}; it returned {describe(result)}"
        )
    data.batch["advantages"], data.batch["returns"] = result
    return data


def _accepted(estimator: AdvantageFn, available: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the estimator has parameters for; all of them if it takes **kwargs."""
    parameters = parameters_of(estimator)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return available
    return {p.name: available[p.name] for p in parameters if p.name in available}
