"""Our layer with a state: the numbers of transformers' own layers row by row, on packed and padded tokens and in decode."""

import copy
import inspect
import sys
from functools import wraps
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from lockstep.kernels.packed import packed_view
from lockstep.models import gated_delta as gated_delta_module
from lockstep.models.attention import (
    ATTENTION_NAME,
    AttentionContext,
    LayerOptions,
    PackedAttention,
    PaddedAttention,
    no_mask,
)
from lockstep.models.decoder_layer import DecoderLayer
from lockstep.models.gated_delta import GatedDelta, PackedGatedDelta, gated_delta, kernels_serve, trains_with_kernels
from lockstep.models.known_models import KNOWN_MIXERS, install_decoder_layers
from lockstep.models.lora import adapter_layers
from lockstep.models.model_check import transformers_forward
from lockstep.models.packed_weights import pack_weights
from lockstep.models.split_weights import check_sizes
from lockstep.models.state_layer import StateLayer
from lockstep.models.state_rows import PackedRows, RowBounds, RowStates, StateCore
from tests.models.architectures import VOCAB, tiny_model, torch_forms

CPU = torch.device("cpu")
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": ("qwen3_next", {"mlp_only_layers": []}),
    "Qwen3-Next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1, 2]}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {}),
}
SLOW = ("Qwen3-Next, dense", "Qwen3.5-MoE")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in MODELS]
PROMPT = 7
"""Tokens of the prompt that the last two sequences share with the first."""
LENGTHS = [PROMPT + 30, 1, 2, 63, 64, 65, 130, 5, 1]
"""Own tokens of the packed sequences."""
PREFIXES = [(0, 0)] * (len(LENGTHS) - 2) + [(0, PROMPT)] * 2


def make_model(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """Transformers' own layers; small enough weights that rounding is not amplified."""
    model_type, changes = MODELS[name]
    model = tiny_model(model_type, max_position_embeddings=256, **LAYERS | changes | more)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    return model.to(dtype)


def ours_of(naive: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(naive)
    model.set_attn_implementation(ATTENTION_NAME)
    assert install_decoder_layers(model)
    return model


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def rows_of(ids: Tensor) -> list[Tensor]:
    """Whole rows, with their prompts."""
    own = ids.split(LENGTHS)
    return [torch.cat((ids[start : start + count], row)) for row, (start, count) in zip(own, PREFIXES)]


def by_row(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """log p (T, V) of transformers' own forward, one row at a time, for the own tokens of all rows."""
    logits = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows_of(ids)]
    return torch.cat([out[len(out) - own :] for out, own in zip(logits, LENGTHS)]).float().log_softmax(-1)


def call(model: PreTrainedModel, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    mask = no_mask(ids.device)
    options = {"position_ids": positions, "attention_mask": mask, "use_cache": False, "lockstep_context": context}
    out: Tensor = model(input_ids=ids, **options).logits
    return out.float().log_softmax(-1)


def packed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(before, before + own) for own, (_, before) in zip(LENGTHS, PREFIXES)])
    context = PackedAttention(LENGTHS, ids.device, PREFIXES)
    return call(model, ids[None], positions[None].to(ids.device), context)[0]


def padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Rows with padding on both sides."""
    rows, shifts = rows_of(ids), [n % 4 for n in range(len(LENGTHS))]
    width = max(map(len, rows)) + 4
    batch, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, (row, shift) in enumerate(zip(rows, shifts)):
        batch[number, shift : shift + len(row)] = row
        mask[number, shift : shift + len(row)] = 1
    out = call(model, batch, (mask.cumsum(1) - 1).clamp_min(0), PaddedAttention(mask))
    ends = [shift + len(row) for row, shift in zip(rows, shifts)]
    return torch.cat([out[number, end - own : end] for number, (end, own) in enumerate(zip(ends, LENGTHS))])


def backward(log_probs: Tensor, ids: Tensor) -> None:
    """Of a weighted sum of the log-probs of some tokens."""
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(5)).to(ids.device)
    (log_probs.gather(1, ids.roll(-1)[:, None])[:, 0] * weights).sum().backward()


def check_gradients(model: nn.Module, naive: nn.Module) -> None:
    """Each within 1e-5 of the norm of all, and close to its own."""
    got, expected = dict(model.named_parameters()), dict(naive.named_parameters())
    assert got.keys() == expected.keys()
    found = {name: parameter.grad for name, parameter in expected.items() if parameter.grad is not None}
    total = float(torch.stack([gradient.norm() for gradient in found.values()]).norm())
    for name, parameter in got.items():
        own = found.get(name, torch.zeros_like(parameter))
        error = float((torch.zeros_like(own) if parameter.grad is None else parameter.grad - own).norm())
        bound = min(1e-5 * total, 1e-4 * float(own.norm()) + 1e-6 * total)
        assert error <= bound, f"{name}: off by {error:.2g}, allowed {bound:.2g}"


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_equal_transformers_row_by_row(name: str) -> None:
    naive = make_model(name)
    ids = tokens()
    expected = by_row(naive, ids)
    backward(expected, ids)
    model = ours_of(naive)
    assert [type(layer) for layer in model.get_decoder().layers] == [StateLayer, DecoderLayer, StateLayer]
    pack_weights(model)
    for layout, checkpointed in ((packed, False), (padded, False), (packed, True)):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        model.zero_grad()
        got = layout(model, ids)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        backward(got, ids)
        check_gradients(model, naive)
    with transformers_forward(model.eval()), torch.no_grad():
        torch.testing.assert_close(by_row(model, ids), expected, atol=1e-6, rtol=0)


def test_sequences_of_a_pack_do_not_see_each_other() -> None:
    """Other tokens in the first sequence change its own log-probs and those after its prompt, and not a bit of any other."""
    model = ours_of(make_model("Qwen3-Next"))
    ids = tokens()
    other = ids.clone()
    other[: LENGTHS[0]] = ids[: LENGTHS[0]].flip(0)
    with torch.no_grad():
        before, after = (packed(model, tokens).split(LENGTHS) for tokens in (ids, other))
    same = [torch.equal(one, two) for one, two in zip(before, after)]
    assert same == [False] + [True] * (len(LENGTHS) - 3) + [False, False]


class Steps:
    """A context of N sequences that go on by L tokens in every call, as an engine has it."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.states: dict[int, RowStates] = {}

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        before = self.keys.get(layer.layer_idx)
        k, v = (key, value) if before is None else (torch.cat(pair, 2) for pair in zip(before, (key, value)))
        self.keys[layer.layer_idx] = [k, v]
        mask = torch.ones(query.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - query.shape[2])
        out = nn.functional.scaled_dot_product_attention(query, k, v, mask, scale=options.scaling, enable_gqa=True)
        return out.transpose(1, 2)

    def mix(self, layer: Any, core: StateCore, x: Tensor) -> Tensor:
        return core(x, self.states.setdefault(layer.layer_idx, RowStates()))


@pytest.mark.parametrize("name", NAMES)
def test_decode_equals_teacher_forcing(name: str) -> None:
    """A prefill, another one after it, then one token at a time."""
    naive = make_model(name)
    model = ours_of(naive)
    ids = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    context = Steps()
    found = []
    with torch.no_grad():
        for start, stop in [(0, 3), (3, 20), *((n, n + 1) for n in range(20, 40))]:
            before = {layer: dict(states.tensors) for layer, states in context.states.items()}
            values = {layer: [t.clone() for t in kept.values()] for layer, kept in before.items()}
            found.append(call(model, ids[:, start:stop], torch.arange(start, stop).expand(3, -1), context))
            for layer, kept in before.items():  # states are replaced, never written to
                assert all(torch.equal(a, b) for a, b in zip(kept.values(), values[layer]))
        expected = naive(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [pytest.param("Qwen3-Next, dense", marks=pytest.mark.slow), "Qwen3.5"])
def test_half_precision_is_as_close_to_float32_as_transformers(name: str) -> None:
    exact, half = make_model(name), make_model(name, torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        expected = by_row(exact, ids)
        theirs = (by_row(half, ids) - expected).abs().mean()
        ours = (packed(ours_of(half), ids) - expected).abs().mean()
    assert ours <= theirs


@pytest.mark.parametrize("name", [pytest.param("Qwen3-Next", marks=pytest.mark.slow), "Qwen3.5"])
def test_adapters_take_part_in_the_joint_product(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = ours_of(make_model(name))
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.inject_adapter_in_model(lora, model, "default")
    ids = tokens()
    torch.manual_seed(7)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    mixer = model.get_decoder().layers[0].linear_attn
    names = KNOWN_MIXERS[type(mixer).__name__].projections
    assert all(hasattr(getattr(mixer, name), "lora_A") for name in (*names, "out_proj"))
    pack_weights(model)
    assert packed_view([getattr(mixer, name).base_layer.weight for name in names]) is not None
    assert packed_view([getattr(mixer, name).lora_A["default"].weight for name in names]) is not None
    theirs = copy.deepcopy(model)
    with transformers_forward(theirs):
        expected = by_row(theirs, ids)
    backward(expected, ids)
    with pytest.MonkeyPatch.context() as patch:  # a module that is called is not part of a product
        patch.setattr(type(getattr(mixer, names[0])), "forward", None)
        patch.setattr(type(model.get_decoder().layers[0].mlp), "forward", lambda block, x: x)
        with torch.no_grad():
            packed(model, ids)
    got = packed(model, ids)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    backward(got, ids)
    check_gradients(model, theirs)


def fake_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """flash-linear-attention's function of this name, one sequence after another."""
    assert cu_seqlens is not None and len(q) == 1 and scale is None
    outputs, states = [], []
    for row, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        out, state = torch_chunk_gated_delta_rule(
            *(t[:, start:stop] for t in (q, k, v, g, beta)),
            initial_state=None if initial_state is None else initial_state[row : row + 1],
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None


@pytest.mark.parametrize("prefixes", [PREFIXES, None])
def test_the_form_without_padding_equals_padded_rows(
    prefixes: list[tuple[int, int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = fake_kernel
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    mixer = make_model("Qwen3.5").get_decoder().layers[0].linear_attn
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(LENGTHS), mixer.conv_dim + 2 * mixer.num_v_heads, generator=generator)
    assert type(gated_delta(mixer, x)) is GatedDelta
    rows = PackedRows(LENGTHS, CPU, prefixes)
    weights = torch.randn(1, sum(LENGTHS), mixer.value_dim, generator=generator)
    results = []
    for core in (GatedDelta(mixer), PackedGatedDelta(mixer)):
        inputs = x.clone().requires_grad_()
        mixer.zero_grad()
        out = rows.run(core, inputs)
        (out * weights).sum().backward()
        results.append([out, inputs.grad, mixer.conv1d.weight.grad, mixer.A_log.grad, mixer.dt_bias.grad])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3-Next, dense", "Qwen3.5"])
def test_kernels_are_about_as_close_to_float32_as_transformers_row_by_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and gradients of packed tokens with flash-linear-attention in bfloat16, a shared prompt included."""
    pytest.importorskip("fla")
    if not torch.cuda.is_available() or not trains_with_kernels():
        pytest.skip("needs a CUDA device, and a Triton version that flash-linear-attention trains with")
    calls: list[int] = []
    packed_form = PackedGatedDelta.packed

    def counted(core: PackedGatedDelta, x: Tensor, bounds: RowBounds, states: RowStates) -> Tensor:
        calls.append(len(bounds))
        return packed_form(core, x, bounds, states)

    monkeypatch.setattr(PackedGatedDelta, "packed", counted)
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
    exact, half = (make_model(name, dtype, **heads) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():  # the same weights
        for one, other in zip(exact.parameters(), half.parameters()):
            one.copy_(other)
    model, ids = ours_of(half).to("cuda"), tokens()
    with torch_forms(exact):
        expected, theirs = by_row(exact, ids), by_row(half, ids)
    ours = packed(model, ids.to("cuda"))
    assert len(calls) == 4  # in both layers the shared prompts, then everything else
    errors = [float((found.cpu() - expected).detach().abs().mean()) for found in (ours, theirs)]
    assert errors[0] <= 2 * errors[1], f"log-probs off by {errors[0]:.2g}, transformers' by {errors[1]:.2g}"
    for found, of_ids in ((expected, ids), (theirs, ids), (ours, ids.to("cuda"))):
        backward(found, of_ids)
    for (parameter, p_exact), p_theirs, p_ours in zip(exact.named_parameters(), half.parameters(), model.parameters()):
        assert p_exact.grad is not None and p_theirs.grad is not None and p_ours.grad is not None, parameter
        norm = float(p_exact.grad.norm())
        errors = [float((p.grad.cpu().float() - p_exact.grad).norm()) / norm for p in (p_ours, p_theirs)]
        assert errors[0] <= 3 * errors[1] + 0.02, (
            f"{parameter}: off by {errors[0]:.2g}, transformers' by {errors[1]:.2g}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3-Next, dense", "Qwen3.5"])
def test_the_forward_keeps_no_more_memory_than_counted(name: str) -> None:
    pytest.importorskip("fla")
    if not torch.cuda.is_available() or not trains_with_kernels():
        pytest.skip("needs a CUDA device, and a Triton version that flash-linear-attention trains with")
    sizes = {"hidden_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "intermediate_size": 512}
    model = ours_of(make_model(name, torch.bfloat16, **sizes)).to("cuda")
    layer: Any = model.get_decoder().layers[0]
    lengths, prefixes = [512] + [256] * 15, [(0, 0)] + [(0, 256)] * 15
    stream = torch.randn(1, sum(lengths), 256, device="cuda", requires_grad=True)
    context = PackedAttention(lengths, torch.device("cuda"), prefixes)
    for _ in range(2):  # the first call compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = layer(stream, lockstep_context=context)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        del out
    counted = layer.activation_bytes(sum(lengths), 2)
    assert 0.5 * counted <= kept <= counted, f"{kept / 2**20:.1f} MiB kept, {counted / 2**20:.1f} counted"


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_float32_does_not_reach_the_kernels_of_a_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = GatedDelta(make_model("Qwen3.5").get_decoder().layers[0].linear_attn)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the kernels compute in half precision")

    expected = inspect.unwrap(getattr(core.functions, name))
    monkeypatch.setattr(core.functions, name, wraps(expected)(refuse))
    assert core._rule(name, torch.zeros(1)) is expected


@pytest.mark.parametrize(
    ("major", "version", "tilelang", "nvcc", "trains"),
    [
        (9, "3.6.0", False, True, False),
        (9, "3.6.0", True, True, True),
        (9, "3.6.0", True, False, False),  # tilelang cannot compile
        (9, "3.7.1", False, False, True),
        (9, "3.3.1+git1", False, False, True),
        (8, "3.6.0", False, False, True),
        (9, "3.10.0", False, False, True),
    ],
)
def test_training_avoids_kernels_without_a_gradient(
    major: int,
    version: str,
    tilelang: bool,
    nvcc: bool,
    trains: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    modules: dict[str, Any] = {name: ModuleType(name) for name in ("fla", "fla.utils", "triton")}
    modules["fla.utils"].has_usable_nvcc = lambda: nvcc
    modules["triton"].__version__ = version
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = {"fla", "triton", "tilelang"} if tilelang else {"fla", "triton"}
    monkeypatch.setattr(gated_delta_module, "find_spec", lambda name: object() if name in found else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(gated_delta_module, "has_linear_attention_kernels", lambda: True)
    assert trains_with_kernels.__wrapped__() is trains
    assert ("trains in torch" in caplog.text) is not trains
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr(gated_delta_module, "trains_with_kernels", lambda: trains)
    assert kernels_serve(x) is trains
    with torch.no_grad():
        assert kernels_serve(x)


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM has layers with a state.*set 1, or .*name=vllm"):
        check_sizes(ours_of(make_model("Qwen3-Next")), 2)
