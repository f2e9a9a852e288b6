"""Gated DeltaNet: a depthwise causal convolution and the gated delta rule, on rows with their states (Yang et al. 2024, arXiv
2412.06464).

    q, k, v = silu(convolution(q, k, v)), then per head
    S = exp(g) S;  S += k (β (v - Sᵀ k))ᵀ;  out = Sᵀ q         g = -exp(A_log) softplus(a + dt_bias), β = sigmoid(b)

The mathematics is transformers' own: chunks of tokens in training and prefill, one token after another in decode. These functions
call the kernels of flash-linear-attention and causal-conv1d if the packages are installed. Decode on CUDA has our own kernel
(`kernels/delta_step.py`), in place on the states, and so have passes without gradients if flash-linear-attention does not serve
them (`kernels/delta_scan.py`).

Shapes: N rows of L tokens; HK key heads of DK, HV value heads of DV; states: conv (N, C, K), the last K inputs of the convolution,
and recurrent (N, HV, DK, DV) in float32.
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from lockstep.kernels.ops import HALF, on_gpu
from lockstep.models.state_rows import RowBounds, RowStates, StateName

logger = logging.getLogger(__name__)
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 64


def gated_delta(mixer: Any, x: Tensor) -> "GatedDelta":
    """The core of a transformers mixer. x: its input; see `kernels_serve` for the form without padding."""
    if not on_gpu(x) or mixer.activation != "silu" or mixer.conv1d.bias is not None:
        return GatedDelta(mixer)
    if kernels_serve(x):
        return PackedGatedDelta(mixer)
    if not torch.is_grad_enabled():
        return ScannedGatedDelta(mixer)
    return InPlaceGatedDelta(mixer)


@cache
def has_linear_attention_kernels() -> bool:
    """Whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


@cache
def trains_with_kernels() -> bool:
    """Whether its backward pass runs on this GPU: on Hopper it refuses the Triton versions that miscompile it."""
    if not has_linear_attention_kernels():
        return False
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return True
    version = triton_version()
    if not (3, 4) <= version < (3, 7, 1) or has_tilelang():
        return True
    logger.warning(
        "flash-linear-attention cannot train with Triton %s on this GPU: the gated delta rule trains in torch, which is slower. "
        "Install triton 3.7.1 or later, or tilelang and nvcc.",
        ".".join(map(str, version)),
    )
    return False


def triton_version() -> tuple[int, ...]:
    import triton  # its distribution has several names

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])


def has_tilelang() -> bool:
    """Whether flash-linear-attention leaves the backward pass to tilelang, which compiles with nvcc."""
    if find_spec("tilelang") is None:
        return False
    from fla.utils import has_usable_nvcc

    return bool(has_usable_nvcc())


def kernels_serve(x: Tensor) -> bool:
    """Whether flash-linear-attention computes x, and its gradient if one is asked for."""
    if not x.is_cuda or x.dtype not in HALF:
        return False
    return trains_with_kernels() if torch.is_grad_enabled() else has_linear_attention_kernels()


class GatedDelta:
    """A `StateCore`: (N, L, C) of q, k (HK * DK each), v (HV * DV), b and a (HV each) -> (N, L, HV * DV)."""

    def __init__(self, mixer: Any) -> None:
        self.mixer = mixer
        self.functions: Any = sys.modules[type(mixer).__module__]

    def __call__(self, rows: Tensor, states: RowStates) -> Tensor:
        if rows.shape[1] == 1 and states.tensors:
            return self.step(rows, states)
        mixer = self.mixer
        length = rows.shape[1]
        qkv, b, a = self._split(rows)
        before = states.tensors.get(("recurrent", 0))
        inputs = states.update_conv_state(qkv.transpose(1, 2), conv_kernel_size=mixer.conv_kernel_size)
        qkv = self._convolution(inputs)[..., -length:].transpose(1, 2)
        out, after = self._rule("torch_chunk_gated_delta_rule", rows)(
            *self._heads(qkv, b, a),
            chunk_size=min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 1 << (length - 1).bit_length())),
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        states.update_recurrent_state(after)
        return out.flatten(2)

    def step(self, rows: Tensor, states: RowStates) -> Tensor:
        """One token per row, after others: (N, 1, C) -> (N, 1, HV * DV). No synchronisation with the host, nothing in place."""
        mixer = self.mixer
        qkv, b, a = self._split(rows)
        states.update_conv_state(qkv.transpose(1, 2))
        window, weight = states.tensors["conv", 0].float(), mixer.conv1d.weight.squeeze(1).float()
        qkv = ACT2FN[mixer.activation]((window * weight).sum(-1)).to(rows.dtype)
        out, after = self._rule("torch_recurrent_gated_delta_rule", rows)(
            *self._heads(qkv[:, None], b, a),
            initial_state=states.tensors["recurrent", 0],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        states.update_recurrent_state(after)
        return out.flatten(2)

    def _rule(self, name: str, x: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        """A function of the model's module, or its torch form if the kernels do not serve x."""
        function = getattr(self.functions, name)
        return function if kernels_serve(x) else inspect.unwrap(function)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixer = self.mixer
        qkv, b, a = x.split((mixer.conv_dim, mixer.num_v_heads, mixer.num_v_heads), -1)
        return qkv, b, a

    def _convolution(self, inputs: Tensor) -> Tensor:
        """(N, C, L) -> (N, C, L); the first tokens see zeros before them."""
        conv = self.mixer.conv1d
        out: Tensor = self.functions.causal_conv1d_fn(
            inputs.contiguous(), conv.weight.squeeze(1), conv.bias, activation=self.mixer.activation
        )
        return out

    def _heads(self, qkv: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (N, L, HV, D), g and β (N, L, HV), as the delta rule takes them."""
        mixer = self.mixer
        q, k, v = qkv.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), -1)
        q, k, v = (
            t.unflatten(-1, (-1, size))
            for t, size in ((q, mixer.head_k_dim), (k, mixer.head_k_dim), (v, mixer.head_v_dim))
        )
        if (copies := mixer.num_v_heads // mixer.num_k_heads) > 1:
            q, k = q.repeat_interleave(copies, 2), k.repeat_interleave(copies, 2)
        g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
        return q, k, v, g, b.sigmoid()


class InPlaceGatedDelta(GatedDelta):
    """With a kernel for decode (`kernels/delta_step.py`): an `InPlaceCore`."""

    def step_in_place(self, rows: Tensor, tensors: Mapping[StateName, Tensor], slots: Tensor) -> Tensor:
        from lockstep.kernels.delta_step import delta_step

        mixer = self.mixer
        out = delta_step(
            rows[:, 0],
            mixer.conv1d.weight.squeeze(1),
            mixer.A_log,
            mixer.dt_bias,
            tensors["conv", 0],
            tensors["recurrent", 0],
            slots,
            mixer.num_k_heads,
        )
        return out[:, None]


class PackedGatedDelta(InPlaceGatedDelta):
    """With the variable-length kernel of flash-linear-attention too: a `PackedCore`."""

    def packed(self, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        qkv, b, a = self._split(x)
        before = states.tensors.get(("recurrent", 0))
        qkv = self._packed_convolution(qkv[0], bounds, states)[None]
        q, k, v, g, beta = self._heads(qkv, b, a)
        out, after = chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds.tensor,
        )
        states.update_recurrent_state(after)
        return out.flatten(2)

    def _packed_convolution(self, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        """(T, C) -> (T, C)."""
        return self._convolution_kernel(x, bounds, states) if on_gpu(x) else self._one_row(x, bounds, states)

    def _convolution_kernel(self, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        from lockstep.kernels.packed_conv import packed_convolution

        before = states.tensors.get(("conv", 0))
        states.tensors["conv", 0] = bounds.last_inputs(x, before, self.mixer.conv_kernel_size)
        return packed_convolution(x, self.mixer.conv1d.weight.squeeze(1), before, *bounds.tokens, bounds.tensor[:-1])

    def _one_row(self, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        """One row, with the K inputs before each sequence in front of it."""
        width = self.mixer.conv_kernel_size
        place, starts, ends = bounds.spaced(width)
        inputs = x.new_zeros(len(x) + len(bounds) * width, x.shape[1]).index_copy(0, place, x)
        before = states.tensors.get(("conv", 0))
        if before is not None:
            inputs = inputs.index_copy(0, starts, before.transpose(1, 2).flatten(0, 1).to(x.dtype))
        states.tensors["conv", 0] = inputs.index_select(0, ends).unflatten(0, (len(bounds), width)).transpose(1, 2)
        return self._convolution(inputs.t()[None])[0].t().index_select(0, place)


class ScannedGatedDelta(PackedGatedDelta):
    """With our own kernel for the rule: no gradient, any dtype."""

    def packed(self, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        from lockstep.kernels.delta_scan import delta_scan

        mixer = self.mixer
        before = states.tensors.get(("recurrent", 0))
        qkv = self._packed_convolution(self._split(x)[0][0], bounds, states)
        keys, values = (mixer.num_k_heads, mixer.head_k_dim), (mixer.num_v_heads, mixer.head_v_dim)
        out, after = delta_scan(qkv, x[0], mixer.A_log, mixer.dt_bias, before, bounds.tensor, keys, values)
        states.update_recurrent_state(after)
        return out[None]
