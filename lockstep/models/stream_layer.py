"""What our layers share: the float32 residual stream, its norms, the gated MLP, and the sums over ranks.

`models/decoder_layer.py` is the layer with attention, `models/state_layer.py` the layer with a state.
"""

from typing import Any, Self

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.kernels.linear import Activation, gated_linear, joint_linear
from lockstep.kernels.ops import NormKind, norm, norm_stream
from lockstep.models.tensor_group import TensorGroup


class StreamLayer(GradientCheckpointingLayer):
    """layer: the transformers layer that this one replaces; both have the same children.

    width:        entries of a token's residual stream.
    norm_kind:    of all its norms.
    hidden_act:   name of the MLP's activation, as in the model's config.
    tensor_group: ranks that hold the weights together (`models/split_weights.py`).
    """

    mlp: Any
    reference: Any

    def __init__(self, layer: Any, width: int, norm_kind: NormKind, hidden_act: str) -> None:
        super().__init__()
        self._modules = layer._modules
        self.__dict__["reference"] = layer  # not a child
        self.width = width
        self.norm_kind: NormKind = norm_kind
        self.activation = gate_activation(layer.mlp, hidden_act)
        self.tensor_group: TensorGroup | None = None

    def train(self, mode: bool = True) -> Self:
        self.reference.training = mode
        return super().train(mode)

    def activation_bytes(self, num_tokens: int, itemsize: int) -> int | None:
        """What one forward keeps for the backward on CUDA without checkpointing; None if that is not known."""
        return None

    def _norm_stream(self, name: str, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The norm before attention, mixer or MLP, and the stream to add to."""
        module = getattr(self, name)
        return norm_stream(stream, module.weight, norm_eps(module), self.norm_kind)

    def _norm(self, owner: Any, name: str, x: Tensor) -> Tensor:
        """The owner's norm of that name, if it has one."""
        module = getattr(owner, name, None)
        return x if module is None else norm(x, module.weight, norm_eps(module), self.norm_kind)

    def _mlp(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """The MLP's output, added to `stream` if given. Experts: `models/experts.py`, in their own block."""
        mlp = self.mlp
        if self.activation is None:
            out = mlp(x)
            out = self._sum(out[0] if isinstance(out, tuple) else out)
            return out if stream is None else stream + out
        gate_up = joint_linear(x, self._gate_up())
        own_stream = None if stream is None else self._once(stream)
        return self._sum(gated_linear(gate_up, mlp.down_proj, self.activation, own_stream))

    def _gate_up(self) -> list[nn.Module]:
        names = ("gate_up_proj",) if hasattr(self.mlp, "gate_up_proj") else ("gate_proj", "up_proj")
        return [getattr(self.mlp, name) for name in names]

    def _once(self, stream: Tensor) -> Tensor:
        """The stream as this rank's share of it: the sum over ranks contains it once."""
        return stream if self.tensor_group is None else self.tensor_group.once(stream)

    def _sum(self, share: Tensor) -> Tensor:
        """The sum of what the ranks computed with their weights."""
        return share if self.tensor_group is None else self.tensor_group.sum(share)


def norm_eps(module: Any) -> float:
    eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return eps


def gate_activation(mlp: Any, hidden_act: str) -> Activation | None:
    """The activation of a gated MLP of two or three linear layers; None for any other block."""
    names = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
    if not any(all(hasattr(mlp, name) for name in linears) for linears in names):
        return None
    known: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    return known.get(hidden_act)
