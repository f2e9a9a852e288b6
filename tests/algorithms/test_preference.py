"""Losses on preference pairs, against their formulas computed number by number."""

import math

import pytest
import torch

from lockstep.algorithms.preference import bradley_terry, centering, dpo_loss

CHOSEN, REJECTED, MARGIN = [0.5, -1.0, 3.0], [0.2, 1.5, -2.0], [0.0, 0.5, 2.0]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_reward_model_losses() -> None:
    chosen, rejected, margin = (torch.tensor(values) for values in (CHOSEN, REJECTED, MARGIN))
    plain = [-log_sigmoid(c - r) for c, r in zip(CHOSEN, REJECTED)]
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx(plain)
    with_margin = [-log_sigmoid(c - r - m) for c, r, m in zip(CHOSEN, REJECTED, MARGIN)]
    assert bradley_terry(chosen, rejected, margin).tolist() == pytest.approx(with_margin)
    assert centering(chosen, rejected).tolist() == pytest.approx([(c + r) ** 2 for c, r in zip(CHOSEN, REJECTED)])
    far = torch.tensor([-200.0])  # a naive log(sigmoid) is -inf
    assert bradley_terry(far, -far).tolist() == [400.0]


def test_dpo_losses() -> None:
    margins, beta, epsilon = [-3.0, 0.0, 0.7, 25.0], 0.2, 0.1
    h = torch.tensor(margins)
    smoothed = [-(1 - epsilon) * log_sigmoid(beta * m) - epsilon * log_sigmoid(-beta * m) for m in margins]
    assert dpo_loss(h, "sigmoid", beta).tolist() == pytest.approx([-log_sigmoid(beta * m) for m in margins])
    assert dpo_loss(h, "sigmoid", beta, epsilon).tolist() == pytest.approx(smoothed)
    assert dpo_loss(h, "hinge", beta).tolist() == pytest.approx([max(0.0, 1 - beta * m) for m in margins])
    assert dpo_loss(h, "ipo", beta).tolist() == pytest.approx([(m - 1 / (2 * beta)) ** 2 for m in margins])
