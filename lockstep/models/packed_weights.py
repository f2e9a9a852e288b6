"""Weights of linear layers with the same input, adjacent in memory: one product serves q, k and v, another gate and up.

`kernels/packed.py` sees adjacent weights as one tensor; weights that are apart are concatenated on every call.
"""

import torch
from torch import nn

from lockstep.kernels.packed import packed_view

PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module with the same input."""


@torch.no_grad()
def pack_weights(model: nn.Module) -> None:
    """Make the parameters that `PACKED` names adjacent in memory, module by module; the parameter objects stay."""
    for module in model.modules():
        for names in PACKED:
            linears = [getattr(module, name, None) for name in names]
            if not all(type(linear) is nn.Linear for linear in linears):
                continue
            for kind in ("weight", "bias"):
                parameters = [getattr(linear, kind) for linear in linears]
                if any(p is None or p.is_meta for p in parameters) or packed_view(parameters) is not None:
                    continue
                joint = torch.cat([p.data for p in parameters])
                for parameter, part in zip(parameters, joint.split([len(p) for p in parameters])):
                    parameter.data = part
