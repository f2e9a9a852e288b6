"""Faster forwards, with gradients, for the modules of a transformers model that trains on a CUDA device.

    RMSNorm, rotary embedding ─► one kernel each      q, k, v ─► one product
    gated MLP ─► products + one kernel, the gated product not kept      residual + o_proj(...) ─► one product

Where all layers of a model are of the usual form, its residual stream is kept in float32: rounding the stream at every layer is
what makes two computations with the same weights differ most.

The kernels of the forward pass are those of the embedded rollout, so that both compute the same numbers. What a module computes is
found by trying it on small random tensors on the host: a class that rounds or combines otherwise is left alone. A replacement is a
method of the module object, not of its class: it survives sharding and copying, sees parameters that are exchanged or wrapped
later, and falls back to the class's own forward for tensors elsewhere.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lockstep.models.adjacent import ADJACENT

if TYPE_CHECKING:
    from lockstep.kernels.gated import Activation

ROTARY = "apply_rotary_pos_emb"
"""The name by which transformers' attention layers call the rotary embedding of queries and keys."""

JOINED = ADJACENT[0]
"""Linear layers of one module that take the same input."""

Forward = Callable[..., Any]


def fuse(model: nn.Module) -> list[str]:
    """Give the modules of `model` their faster forwards; returns the classes that got one. Nothing happens off CUDA."""
    fused: set[str] = set()
    if not _is_served(next(model.parameters())):
        return []
    verdicts: dict[tuple[object, ...], Forward | None] = {}
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        kind = type(module)
        key = (kind, *module._parameters, *module._modules)
        if key not in verdicts:
            verdicts[key] = _norm_forward(module) or _mlp_forward(module) or _attention_forward(module)
        forward = verdicts[key]
        if forward is not None:
            module.__dict__["forward"] = MethodType(forward, module)
            fused.add(kind.__name__)
        if _join_products(module):
            fused.add(f"{kind.__name__} ({', '.join(JOINED)})")
    for module in model.modules():
        fused |= _widen_stream(module)
    return sorted(fused)


def _is_served(tensor: Tensor) -> bool:
    return tensor.is_cuda


def has_rotary_table(module: nn.Module) -> bool:
    """Whether the module computes rotary embeddings; some have one table for each type of layer."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def norm_offset(module: nn.Module) -> bool | None:
    """False for a plain RMSNorm, True for one whose factor is 1 + weight, None for anything else."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or norm_eps(module) is None:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (8, 1))
    got = _tried(module, {"weight": weight[0]}, x)
    if got is None:
        return None
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm_eps(module))
    results = {False: weight * normed.bfloat16(), True: (normed * (1 + weight.float())).bfloat16()}
    return next((offset for offset, expected in results.items() if _same(got, expected)), None)


def gate_activation(module: nn.Module) -> "Activation | None":
    """The activation of a module that computes down(activation(gate(x)) * up(x)), by three linear layers or two."""
    children = dict(module.named_children())
    names = [name for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj") if name in children]
    if names not in (["gate_proj", "up_proj", "down_proj"], ["gate_up_proj", "down_proj"]):
        return None
    if not all(type(children[name]) is nn.Linear for name in names):
        return None
    generator = torch.Generator().manual_seed(0)
    width, inner = 12, 20
    sizes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    parameters = {}
    for name, parameter in module.named_parameters():
        size = sizes.get(name.split(".")[0], (inner, width))
        parameters[name] = torch.randn(size[: parameter.dim()], generator=generator)
    x = torch.randn(1, 9, width, generator=generator)
    got = _tried(module, parameters, x)
    if got is None:
        return None
    linear = {name: F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias")) for name in names[:-1]}
    gate, up = linear["gate_up_proj"].chunk(2, -1) if len(linear) == 1 else linear.values()
    activations: dict[Activation, Tensor] = {"silu": F.silu(gate), "gelu_tanh": F.gelu(gate, approximate="tanh")}
    for activation, value in activations.items():
        expected = F.linear(value * up, parameters["down_proj.weight"], parameters.get("down_proj.bias"))
        if torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
            return activation
    return None


def rotates_halves(function: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether `function(q, k, cos, sin)` is x * cos + rotate_half(x) * sin, rounded in the tensors' own type."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator).bfloat16() for heads in (3, 2))
    cos, sin = (torch.randn(1, 5, 16, generator=generator).bfloat16() for _ in range(2))
    try:
        got = function(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    expected = [x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin for x in (q, k)]
    return all(_same(a, b) for a, b in zip(got, expected))


def _norm_forward(module: nn.Module) -> Forward | None:
    offset = norm_offset(module)
    if offset is None:
        return None
    from lockstep.kernels.layer_gradients import rms_norm

    def forward(self: Any, x: Tensor) -> Tensor:
        if _is_served(x):
            return rms_norm(x, self.weight, norm_eps(self), offset=offset)
        return type(self).forward(self, x)

    return forward


def _mlp_forward(module: nn.Module) -> Forward | None:
    activation = gate_activation(module)
    if activation is None:
        return None
    from lockstep.kernels.layer_gradients import gated_mlp, gated_product

    def three(self: Any, x: Tensor) -> Tensor:
        if not _is_served(x):
            return type(self).forward(self, x)
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if is_plain_mlp(self):
            return gated_mlp(x, gate.weight, up.weight, down.weight, activation)
        return down(gated_product(gate(x), up(x), activation))

    def two(self: Any, x: Tensor) -> Tensor:
        if not _is_served(x):
            return type(self).forward(self, x)
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(gated_product(gate, up, activation))

    return three if hasattr(module, "gate_proj") else two


def rotary_forward(
    module: nn.Module, fits: Callable[[Tensor, Tensor, Tensor], bool], rotate: Callable[..., tuple[Tensor, Tensor]]
) -> Forward | None:
    """The forward of the module's class, with `rotate` for the usual rotary embedding among the names that it looks up.

    fits: whether `rotate` takes this q, k, cos; None is returned for a class that embeds positions otherwise.
    """
    plain = type(module).forward
    if not isinstance(plain, FunctionType) or ROTARY not in plain.__code__.co_names:
        return None
    original = plain.__globals__.get(ROTARY)
    if original is None or not rotates_halves(original):
        return None

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if more or options or not fits(q, k, cos):
            turned: tuple[Tensor, Tensor] = original(q, k, cos, sin, *more, **options)
            return turned
        return rotate(q, k, cos, sin)

    names = {**plain.__globals__, ROTARY: apply}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return forward


def one_row(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Whether `kernels/rotary.py` takes these: packed tokens, of one type."""
    return q.shape[0] == 1 and cos.shape == (1, q.shape[2], q.shape[3]) and q.dtype == k.dtype == cos.dtype


def _attention_forward(module: nn.Module) -> Forward | None:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from lockstep.kernels.layer_gradients import rotary

        return rotary(q, k, cos, sin)

    return rotary_forward(module, lambda q, k, cos: _is_served(q) and one_row(q, k, cos), rotate)


class _JointProduct:
    """Linear layers of one input: the call of the first computes all of them, the others take their part if it is for them."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linears = linears
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def __call__(self, index: int, x: Tensor) -> Tensor:
        if not _is_served(x):
            return nn.Linear.forward(self._linears[index], x)
        if index == 0:
            from lockstep.kernels.layer_gradients import joint_linear

            weights, biases = [m.weight for m in self._linears], [m.bias for m in self._linears]
            self._input, self._parts = x, joint_linear(x, weights, biases)
        elif self._input is not x:
            return nn.Linear.forward(self._linears[index], x)
        part = self._parts[index]
        if index == len(self._linears) - 1:
            self._input, self._parts = None, ()
        return part


def _join_products(module: nn.Module) -> bool:
    linears = [getattr(module, name, None) for name in JOINED]
    plain = [m for m in linears if type(m) is nn.Linear and "forward" not in m.__dict__]
    if len(plain) < len(JOINED) or len({m.bias is None for m in plain}) > 1:
        return False
    joint = _JointProduct(plain)
    for index, linear in enumerate(plain):
        linear.__dict__["forward"] = partial(joint, index)
    return True


class _AddingProduct:
    """The forward of a linear layer whose product is added to a residual stream, when it is given one."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.stream: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        from lockstep.kernels.layer_gradients import add_product

        stream, self.stream = self.stream, None
        if stream is None:
            return nn.Linear.forward(self._linear, x)
        return add_product(stream, x, self._linear.weight)


def _widen_stream(decoder: Any) -> set[str]:
    """Keep the residual stream of a decoder in float32, if all its layers are of the usual form; returns their classes."""
    parts: list[Any] = [getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm")]
    if not all(isinstance(part, nn.Module) for part in parts):
        return set()
    embedding, layers, norm = parts
    if "forward" in embedding.__dict__ or norm_offset(norm) is None or not all(map(is_usual_layer, layers)):
        return set()
    forwards = {(type(layer), type(layer.mlp)): _layer_forward(layer) for layer in layers}
    for layer in layers:
        projection = layer.get_submodule("self_attn.o_proj")
        assert isinstance(projection, nn.Linear)
        projection.__dict__["forward"] = _AddingProduct(projection)
        layer.__dict__["forward"] = MethodType(forwards[type(layer), type(layer.mlp)], layer)
    embedding.__dict__["forward"] = MethodType(_wide_embedding, embedding)
    for module in decoder.modules():
        if has_rotary_table(module):
            module.__dict__["forward"] = _CosAndSin(module, embedding)
    return {kind.__name__ for kind, _ in forwards}


def _wide_embedding(self: Any, ids: Tensor) -> Tensor:
    if type(self) is nn.Embedding and self.max_norm is None and _is_served(self.weight):
        from lockstep.kernels.layer_gradients import embed_wide

        return embed_wide(ids, self.weight, self.padding_idx)
    out: Tensor = type(self).forward(self, ids)
    return out.float() if _is_served(out) else out


class _CosAndSin:
    """The forward of a rotary embedding that gives cos and sin in the type of the weights, whatever that of the stream."""

    def __init__(self, module: nn.Module, embedding: Any) -> None:
        self._module, self._embedding = module, embedding

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Any:
        like = x.new_empty(0, dtype=self._embedding.weight.dtype)
        return type(self._module).forward(self._module, like, *args, **options)


def is_usual_layer(layer: Any) -> bool:
    """x += attention(norm(x)); x += mlp(norm(x)), told by numbers that stand for the four parts."""
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    parts = [getattr(layer, name, None) for name in names]
    if not all(isinstance(part, nn.Module) for part in parts):
        return False
    projection = getattr(layer.self_attn, "o_proj", None)
    if type(projection) is not nn.Linear or projection.bias is not None:
        return False
    if any(norm_offset(norm) is None for norm in (layer.input_layernorm, layer.post_attention_layernorm)):
        return False
    trial = copy.copy(layer)
    trial.__dict__["_modules"] = dict(layer._modules)
    for name, factor in zip(names, (2.0, 3.0, 5.0, 7.0)):
        trial._modules[name] = _Times(factor, pair=name == "self_attn")
    try:
        out = type(layer).forward(trial, torch.ones(1, 1, 1))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    return isinstance(out, Tensor) and out.tolist() == [[[(1 + 2 * 3) * (1 + 5 * 7)]]]


class _Times(nn.Module):
    def __init__(self, factor: float, *, pair: bool) -> None:
        super().__init__()
        self._factor, self._pair = factor, pair

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        out = self._factor * hidden_states
        return (out, None) if self._pair else out


def _layer_forward(layer: Any) -> Forward:
    from lockstep.kernels.layer_gradients import gated_mlp, stream_norm

    before, after = norm_offset(layer.input_layernorm), norm_offset(layer.post_attention_layernorm)
    assert before is not None and after is not None
    activation = gate_activation(layer.mlp)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        if args or not _is_served(hidden_states):
            return type(self).forward(self, hidden_states, *args, **options)
        norm = self.input_layernorm
        x, stream = stream_norm(hidden_states, norm.weight, norm_eps(norm), offset=before)
        adding = self.self_attn.o_proj.__dict__.get("forward")
        if isinstance(adding, _AddingProduct):
            adding.stream = stream
            stream, _ = self.self_attn(hidden_states=x, **options)
        else:
            stream = stream + self.self_attn(hidden_states=x, **options)[0]
        norm = self.post_attention_layernorm
        x, stream = stream_norm(stream, norm.weight, norm_eps(norm), offset=after)
        mlp = self.mlp
        if activation is None or not is_plain_mlp(mlp):
            return stream + mlp(x)
        return gated_mlp(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, activation, stream)

    return forward


def is_plain_mlp(mlp: Any) -> bool:
    """Three linear layers without bias, not wrapped in anything since."""
    parts = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(part) is nn.Linear and part.bias is None for part in parts)


def norm_eps(module: nn.Module) -> Any:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _tried(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """What the module's class gives for x with these parameters; None where it cannot be called so."""
    plain = copy.copy(module)
    plain.__dict__.pop("forward", None)
    try:
        out = functional_call(plain, parameters, (x,))
    except (TypeError, ValueError, RuntimeError):
        return None
    return out if isinstance(out, Tensor) and out.shape == x.shape else None


def agree(got: Tensor, expected: Tensor, leave: float = 1.0) -> bool:
    """Up to rounding in the tensors' own type. leave: how many times the error of one operation may come up."""
    bound = leave * (1e-4 if got.dtype == torch.float32 else 2e-2)
    error = (got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20)
    return got.shape == expected.shape and bool(error < bound)


def _same(got: Tensor, expected: Tensor) -> bool:
    """Equal but for rare roundings; another order of rounding differs in every third entry."""
    return got.shape == expected.shape and bool((got != expected).float().mean() < 0.01)
