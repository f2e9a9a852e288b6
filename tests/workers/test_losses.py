"""A user's policy loss: independent of micro-batches without its doing, or refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.algorithms.losses.policy import prepare_policy_loss, register_policy_loss
from lockstep.algorithms.losses.preparation import MiniBatch
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.policy_loss import PolicyLossConfig
from lockstep.engines.train.trial import SplitCheck
from lockstep.utils.audit import AuditError
from lockstep.utils.masked import masked_mean
from lockstep.workers.losses import actor_loss_fn

INFO = {"dp_size": 1, "batch_num_tokens": 20, "global_batch_size": 6, "loss_scale_factor": None}


def plain_agg_loss(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str, **_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """As the docs show it: without counts."""
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}


def counts_of_the_config(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str, config: Any, **_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """As verl's losses do it."""
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info), {}


def mean_of_the_call(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return masked_mean(-advantages * log_prob, response_mask), {}


def only_the_loss(log_prob: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    return (log_prob * response_mask).sum()


def not_reduced(log_prob: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return log_prob * response_mask, {}


def detached(log_prob: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return (log_prob.detach() * response_mask).sum(), {}


def config_of(loss: Any, mode: str = "token-mean") -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{__name__}:{loss.__name__}"), loss_agg_mode=mode)


def micro_batch(num_rows: int = 4) -> tuple[dict[str, Tensor], TensorDict]:
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(num_rows, 5, generator=generator) for _ in range(2))
    lengths = torch.tensor([5, 1, 3, 4])[:num_rows, None]
    rows = {"advantages": advantages, "response_mask": (torch.arange(5) < lengths).long()}
    return {"log_probs": log_probs.requires_grad_()}, TensorDict(rows, batch_size=[num_rows])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("loss", [plain_agg_loss, counts_of_the_config])
def test_agg_loss_in_a_users_loss_counts_the_whole_mini_batch(loss: Any, mode: str) -> None:
    outputs, rows = micro_batch()
    loss_fn = actor_loss_fn(config_of(loss, mode), INFO, check=SplitCheck())
    whole, _ = loss_fn(outputs, rows)
    parts = [loss_fn({"log_probs": outputs["log_probs"][i : i + 1]}, rows[i : i + 1])[0] for i in range(4)]
    torch.testing.assert_close(sum(parts), whole)
    matrix, mask = -rows["advantages"] * outputs["log_probs"], rows["response_mask"]
    torch.testing.assert_close(whole, agg_loss(matrix, mask, mode, **INFO))


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_loss_that_depends_on_the_split_is_refused_by_name(num_rows: int) -> None:
    outputs, rows = micro_batch(num_rows)
    loss_fn = actor_loss_fn(config_of(mean_of_the_call), INFO, check=SplitCheck())
    idle = rows.clone()
    idle["advantages"] = torch.zeros_like(idle["advantages"])
    loss_fn(outputs, idle)  # says nothing about the loss
    with pytest.raises(AuditError, match=r"mean_of_the_call \(.*test_losses.py:\d+\): the loss of \d rows .*agg_loss"):
        loss_fn(outputs, rows)


@pytest.mark.parametrize(
    ("loss", "found"), [(only_the_loss, r"Tensor of shape \(\)"), (not_reduced, r"tuple of \(Tensor of shape \(4, 5\)")]
)
def test_a_wrong_return_value_is_named(loss: Any, found: str) -> None:
    outputs, rows = micro_batch()
    with pytest.raises(ValueError, match=rf"loss_mode: {loss.__name__} \(.*test_losses.py:\d+\) must return .*{found}"):
        actor_loss_fn(config_of(loss), INFO)(outputs, rows)


def test_a_loss_without_a_gradient_is_named() -> None:
    outputs, rows = micro_batch()
    with pytest.raises(ValueError, match=r"loss_mode: the loss of detached \(.*test_losses.py:\d+\) has no gradient"):
        actor_loss_fn(config_of(detached), INFO)(outputs, rows)
    with pytest.raises(ValueError, match="has no gradient"):  # though the KL loss has one
        actor_loss_fn(replace(config_of(detached), use_kl_loss=True), INFO)(outputs, rows)


def scaled(
    log_prob: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    level: Tensor | None = None,
    *,
    beta: float = 1.0,
    mode: str = "plain",
    **_: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    assert config.policy_loss.loss_kwargs == {"beta": beta, "mode": mode} and type(beta) is float
    matrix = beta * log_prob if level is None else beta * log_prob * level
    return agg_loss(matrix, response_mask, loss_agg_mode), {}


@pytest.mark.usefixtures("no_registrations")
def test_settings_reach_the_loss_and_its_preparation() -> None:
    """Also of a loss with a preparation, whose columns are ordinary parameters."""
    outputs, rows = micro_batch()

    def loss_of(config: ActorConfig, prepared: tuple[str, ...] = ()) -> Tensor:
        return actor_loss_fn(config, INFO, prepared, check=SplitCheck())(outputs, rows)[0]

    plain = config_of(scaled)
    halved = replace(plain, policy_loss=replace(plain.policy_loss, loss_kwargs={"beta": "0.5"}))
    torch.testing.assert_close(loss_of(halved), 0.5 * loss_of(plain))
    seen: list[dict[str, Any]] = []

    def level(mini_batch: MiniBatch, config: ActorConfig) -> dict[str, Tensor]:
        seen.append(config.policy_loss.loss_kwargs)
        return {"level": torch.full((4, 1), 3.0)}

    assert prepare_policy_loss(halved.policy_loss.loss_mode, rows, halved) == {}
    register_policy_loss("scaled", prepare=level)(scaled)
    rows["level"] = prepare_policy_loss(halved.policy_loss.loss_mode, rows, halved)["level"]  # by its path, too
    assert torch.equal(prepare_policy_loss("scaled", rows, halved)["level"], rows["level"])
    del scaled.prepare  # type: ignore[attr-defined]
    torch.testing.assert_close(loss_of(halved, ("level",)), 1.5 * loss_of(plain))
    assert seen == [{"beta": 0.5, "mode": "plain"}] * 2


def test_wrong_settings_of_a_worker_name_the_key() -> None:
    config = replace(config_of(scaled), policy_loss=PolicyLossConfig(f"{__name__}:scaled", {"betta": 1}))
    with pytest.raises(ValueError, match=r"policy_loss\.loss_kwargs\.betta=1: scaled has no such setting.*'beta'"):
        actor_loss_fn(config, INFO)
