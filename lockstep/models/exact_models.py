"""Which models exact mode serves: those whose layers are all `DecoderLayer`, with a plain MLP and a plain head."""

from typing import Any

from torch import Tensor

from lockstep.kernels.exact import depends_on_other_rows, depends_on_place
from lockstep.kernels.linear import is_plain, linear_and_adapter
from lockstep.kernels.ops import HALF
from lockstep.kernels.packed import packed
from lockstep.models.decoder import decoder_of
from lockstep.models.decoder_layer import DecoderLayer
from lockstep.models.exact_attention import depends_on_other_queries
from lockstep.models.log_probs import vocabulary_head

_KEY = "actor_rollout_ref.rollout.exact"


def check_exact(model: Any) -> None:
    """ValueError if the model has a part that exact mode does not compute, or if this machine's products are not exact."""
    if reason := _why_inexact(model):
        raise ValueError(f"{_KEY}=true is not possible for {type(model).__name__}: {reason}; set {_KEY}=false")
    head: Any = model.get_output_embeddings()
    layers = decoder_of(model).layers
    shape = depends_on_other_rows([*(weight for layer in layers for weight in _weights(layer)), head.weight])
    culprit = None if shape is None else f"its product with a weight of {shape[0]} x {shape[1]} gives a row"
    if culprit is None and depends_on_other_queries(layers[0].head_dim, head.weight.dtype, head.weight.device):
        culprit = "its attention gives a query"
    if culprit is None and not head.weight.is_cuda and depends_on_place(layers[0].activation, head.weight.dtype):
        culprit = "its activation gives a row"
    if culprit is not None:
        raise ValueError(
            f"{_KEY}=true is not possible on this machine: {culprit} another result in another batch; set {_KEY}=false"
        )


def _why_inexact(model: Any) -> str | None:
    layers = getattr(decoder_of(model), "layers", ())
    if not layers:
        return "its layers are not ours (docs/models.md)"
    for layer in layers:
        if not isinstance(layer, DecoderLayer):
            return f"{type(layer).__name__} is not one of our decoder layers (docs/models.md)"
        if layer.activation is None:
            return f"{type(layer.mlp).__name__} is not a gated MLP"
        if any(linear_and_adapter(module) is None for modules in layer.products() for module in modules):
            return "a linear layer has weights or adapters of another kind"
    if getattr(model.config, "vision_config", None) is not None:
        return "its images are not computed exactly"
    head = vocabulary_head(model)
    if head.before or not is_plain(head.module) or head.module.bias is not None:
        return "its vocabulary head is not a plain product"
    if not head.module.weight.is_cuda:
        return None
    if head.module.weight.dtype not in HALF:
        return "on a GPU the exact kernels are those of half precision"
    if any(setting is not None for setting in (head.factor, head.divisor, head.cap)):
        return "its logits are scaled or capped, which is exact on a CPU only"
    if any(layer.norm_kind == "layer" for layer in layers):
        return "its norms subtract the mean, which is exact on a CPU only"
    return None


def _weights(layer: DecoderLayer) -> list[Tensor]:
    """The weight of each product, and those of adapters."""
    weights = []
    for linears in layer.products():
        found = [pair for pair in map(linear_and_adapter, linears) if pair is not None]
        weights.append(packed([linear.weight for linear, _ in found]))
        weights += [tensor for _, adapter in found if adapter is not None for tensor in (adapter.a, adapter.b)]
    return weights
