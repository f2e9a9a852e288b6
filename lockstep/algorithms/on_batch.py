"""The algorithms as steps on the batch: response mask, and advantages and returns by the configured estimator.

attention_mask, responses                          -> compute_response_mask
token_level_rewards, response_mask, values, uid .. -> compute_advantage -> advantages, returns
"""

import inspect
from typing import Any

from torch import Tensor

from lockstep.algorithms.advantages import AdvantageFn, get_adv_estimator_fn, parameters_of, required_inputs
from lockstep.config.algorithm import AlgoConfig
from lockstep.protocol import DataProto


def compute_response_mask(data: DataProto) -> Tensor:
    """The part of attention_mask that covers the responses, (B, R): right where a response has no tool tokens."""
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
    """Write `advantages` and `returns` into the batch and return it; `response_mask` is computed where it is missing.

    The estimator is given what it has parameters for (everything, with **kwargs): `index` is the samples' uid, any
    other name is an argument of this function or a batch key. Estimators that read `config` get one made of gamma,
    lam and norm_adv_by_std_in_grpo where none is given. `num_repeat` (samples per prompt) is not needed: groups are
    found by uid.
    """
    assert data.batch is not None
    if "response_mask" not in data.batch:
        data.batch["response_mask"] = compute_response_mask(data)
    if config is None:
        config = AlgoConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    available: dict[str, Any] = {
        **data.batch,
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config,
        "batch": data.batch,
        "non_tensor_batch": data.non_tensor_batch,
    }
    if "uid" in data.non_tensor_batch:
        available["index"] = data.non_tensor_batch["uid"]
    missing = required_inputs(adv_estimator) - set(available)
    if missing:
        names = ", ".join("uid" if name == "index" else name for name in sorted(missing))
        raise ValueError(f"algorithm.adv_estimator={adv_estimator} needs what the batch does not have: {names}")
    estimator = get_adv_estimator_fn(adv_estimator)
    advantages, returns = estimator(**_accepted(estimator, available))
    data.batch["advantages"] = advantages
    data.batch["returns"] = returns
    return data


def _accepted(estimator: AdvantageFn, available: dict[str, Any]) -> dict[str, Any]:
    """What the estimator has parameters for; everything where it takes **kwargs."""
    parameters = parameters_of(estimator)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return available
    return {p.name: available[p.name] for p in parameters if p.name in available}
