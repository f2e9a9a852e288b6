"""Losses on preference pairs (P), one number per pair: of reward models and of direct preference optimization.

bradley_terry   -log σ(r_c - r_r - m)                    r: scores of the chosen and the rejected answer, m: margin
sigmoid (DPO)   -(1-ε) log σ(β h) - ε log σ(-β h)        h = log π_c/ref_c - log π_r/ref_r
hinge (SLiC)    max(0, 1 - β h)
ipo             (h - 1/(2β))²                            h of mean log-probs per token
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lockstep.config.preference import DPOLoss


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """The negative log-likelihood of the preference under Bradley and Terry's model (1952).

    margin: by how much the chosen score should be higher (Llama 2, Touvron et al. 2023).
    """
    difference = chosen - rejected
    return -logsigmoid(difference if margin is None else difference - margin)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(r_c + r_r)², which is least if a pair's scores have mean 0 (Eisenstein et al. 2023): preferences leave the mean open."""
    return (chosen + rejected).square()


def dpo_loss(margin: Tensor, loss_type: DPOLoss, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """margin: h, how much more the policy prefers the chosen answer than the reference does.

    sigmoid is DPO (Rafailov et al. 2023), with label smoothing for labels that are wrong with that probability; hinge is SLiC's
    (Zhao et al. 2023), ipo is IPO's (Azar et al. 2023).
    """
    if loss_type == "sigmoid":
        return -(1 - label_smoothing) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)
    if loss_type == "hinge":
        return torch.relu(1 - beta * margin)
    return (margin - 1 / (2 * beta)).square()
