"""Norms and products of a decoder that computes on the CPU without its modules; a token is a column."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_COPY = 1 << 18
"""Weights of so many elements are copied where that makes their product faster."""


class NormRoom:
    """Where norms of tensors (…, E, T) of one shape compute."""

    def __init__(self, like: Tensor) -> None:
        *others, _, num_tokens = like.shape
        self.wide, self.scale = torch.empty(like.shape), torch.empty(*others, 1, num_tokens)


class Norm:
    """Over the last dimension but one; what it gives may lie in the room."""

    def __init__(self, module: Any, offset: bool) -> None:
        weight = module.weight.detach()
        self.factor = 1 + weight if offset else weight
        self._column = self.factor[:, None]
        self._share = 1 / len(weight)
        self._eps = torch.tensor((getattr(module, "variance_epsilon", None) or module.eps) * self._share)

    def __call__(self, x: Tensor, room: NormRoom) -> Tensor:
        return self.without_factor(x, room).mul_(self._column)

    def without_factor(self, x: Tensor, room: NormRoom) -> Tensor:
        wide = x if x.dtype == torch.float32 else x.float()
        squares = torch.addcmul(self._eps, wide, wide, value=self._share, out=room.wide)
        torch.sum(squares, -2, keepdim=True, out=room.scale).rsqrt_()
        normed = torch.mul(wide, room.scale, out=room.wide)
        return normed if wide is x else normed.to(x.dtype)


class Product:
    """Linear layers of one input, which a norm gives."""

    def __init__(self, norm: Norm, *linears: nn.Linear) -> None:
        weights = [m.weight.detach() for m in linears]
        biases = [None if m.bias is None else m.bias.detach()[:, None] for m in linears]
        self._normed: Callable[[Tensor, NormRoom], Tensor] = norm
        if sum(weight.numel() for weight in weights) <= LARGEST_COPY and len({bias is None for bias in biases}) == 1:
            weights = [torch.cat(weights)]  # one product is faster than two
            biases = [None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])]
            if weights[0].dtype == torch.float32:  # in half precision a weight times the factor would be rounded
                weights[0] *= norm.factor
                self._normed = norm.without_factor
        self._parts = list(zip(weights, biases))
        self.sizes = [len(weight) for weight in weights]

    def places_in(self, outputs: Tensor) -> Sequence[Tensor]:
        """The parts of `outputs` (O, T) that the products go to, the layers' below each other."""
        return outputs.split(self.sizes)

    def put(self, x: Tensor, room: NormRoom, places: Sequence[Tensor]) -> None:
        """x: (I, T)"""
        normed = self._normed(x, room)
        for (weight, bias), out in zip(self._parts, places):
            if bias is None:
                torch.mm(weight, normed, out=out)
            else:
                torch.addmm(bias, weight, normed, out=out)
