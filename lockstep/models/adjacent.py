"""Weights of linear layers that take the same input, laid one behind the other: one product then serves them all.

Training and rollout find them so by `joined`, and compute layer by layer, or from a copy, where they lie apart.
"""

import torch
from torch import nn

from lockstep.kernels.joined import joined

__all__ = ["ADJACENT", "joined", "lay_adjacent"]

ADJACENT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that take the same input."""


@torch.no_grad()
def lay_adjacent(model: nn.Module) -> None:
    """Move the parameters that `ADJACENT` names one behind the other, module by module; the parameter objects stay."""
    for module in model.modules():
        for names in ADJACENT:
            linears = [getattr(module, name, None) for name in names]
            if not all(type(linear) is nn.Linear for linear in linears):
                continue
            for kind in ("weight", "bias"):
                parameters = [getattr(linear, kind) for linear in linears]
                if any(p is None for p in parameters) or joined(parameters) is not None:
                    continue
                both = torch.cat([p.data for p in parameters])
                for parameter, part in zip(parameters, both.split([len(p) for p in parameters])):
                    parameter.data = part
