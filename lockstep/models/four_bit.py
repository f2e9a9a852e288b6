"""A frozen base in 4 bits (QLoRA): linear layers of bitsandbytes, NF4 with double quantisation.

    model without memory ─► `use_4bit_linears` ─► `WeightSource.fill`: each weight is read, quantised, and its full form freed

A weight takes 4 bits, every 64 of them share an 8-bit scale, and every 256 scales a float32 one. A layer dequantises its weight to
the compute dtype for each product. Embeddings, norms and the head keep the compute dtype.
"""

import sys
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.decoder import decoder_of
from lockstep.models.state_mixer import DIRECT_WEIGHTS

_FORM: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}


def linears_to_quantize(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The decoder's linear layers by their names in `model`."""
    inside = set(decoder_of(model).modules())
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside and name.rpartition(".")[2] not in DIRECT_WEIGHTS
    }


def use_4bit_linears(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the decoder's linear layers. Weights on the meta device are quantised when they are filled, others at once.

    dtype: in which the layers compute.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, linear in linears_to_quantize(model).items():
        size = (linear.in_features, linear.out_features)
        options = {"compute_dtype": dtype, **_FORM}
        layer = Linear4bit(*size, bias=linear.bias is not None, device="meta", **options)
        layer.support_avx512bf16_for_cpu = False  # would compute in bfloat16 without gradients, whatever the dtype
        weight = linear.weight.detach()
        layer.weight = Params4bit(weight, requires_grad=False, **_FORM) if weight.is_meta else quantized(weight)
        layer.bias = linear.bias
        model.set_submodule(name, layer)
    cast(Any, model).is_loaded_in_4bit = True  # read by peft


def is_4bit(parameter: Tensor) -> bool:
    """Whether it is a weight of `use_4bit_linears`, filled or not."""
    modules: Any = sys.modules.get("bitsandbytes.nn")  # without it nothing is quantised
    return modules is not None and isinstance(parameter, modules.Params4bit)


def has_4bit_linears(model: nn.Module) -> bool:
    return any(map(is_4bit, model.parameters()))


def quantized(weight: Tensor) -> nn.Parameter:
    """weight (O, I) in 4 bits, on its device."""
    from bitsandbytes.nn import Params4bit

    unquantized: Any = Params4bit(weight, requires_grad=False, **_FORM)
    return cast(nn.Parameter, unquantized.to(weight.device))  # which quantises it


def dequantized(parameter: Tensor) -> Tensor:
    """(O, I) in the compute dtype; any other parameter as it is, detached."""
    if not is_4bit(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return cast(Tensor, dequantize_4bit(parameter.data, cast(Any, parameter).quant_state))


def rounded_to_4bit(weight: Tensor) -> Tensor:
    """weight (O, I) as a 4-bit layer computes with it."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            'the adapter was trained on a base in 4 bits; to merge it, pip install "lockstep-rl[qlora]" (bitsandbytes)'
        )
    return dequantized(quantized(weight))


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's shape before it was quantised."""
    state = cast(Any, parameter).quant_state if is_4bit(parameter) else None
    return tuple(parameter.shape if state is None else state.shape)
