"""Attention over packed and padded sequences against the formula: values and gradients, with softcap, sinks, windows, prefixes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.models import attention
from lockstep.models.attention import (
    ATTENTION_NAME,
    AttentionContext,
    FlashWithSinks,
    LayerOptions,
    PackedAttention,
    PaddedAttention,
    lockstep_attention,
    no_mask,
)
from tests.models.attention_reference import naive_attention

CPU = torch.device("cpu")
LENGTHS = [9, 5, 30, 70, 33]
PREFIXES = [(0, 0), (0, 6), (0, 6), (0, 0), (44, 60)]
"""The second and third sequence share the first one's first six tokens, the last 60 of the fourth's."""
SHORT_LENGTHS = [9, 12, 9, 3, 8, 1]
SHORT_PREFIXES = [(0, 0), (0, 0), (0, 3), (9, 9), (0, 3), (9, 9)]
"""Rows of one bucket with prompts of different lengths, some of them padded beyond their last key."""
PACKS: list[tuple[list[int], list[tuple[int, int]] | None]] = [
    (LENGTHS, None),
    (LENGTHS, PREFIXES),
    (SHORT_LENGTHS, SHORT_PREFIXES),
]
SOFTCAPS_AND_SINKS = [(None, False), (1.5, False), (None, True), (1.5, True)]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_inputs(num_tokens: int, kv_heads: int, head_dim: int, sinks: bool) -> tuple[list[Tensor], Tensor]:
    """query, key, value (1, heads, T, D) and sinks (6,), if any; gradient of the output."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, num_tokens, head_dim) for heads in (6, kv_heads, kv_heads)]
    return [*tensors, *([torch.randn(6)] if sinks else [])], torch.randn(1, num_tokens, 6, head_dim)


def values_and_gradients(
    context: AttentionContext, tensors: list[Tensor], grad: Tensor, window: int | None, softcap: float | None
) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    query, key, value, *sinks = leaves
    options = LayerOptions(0.4, window, softcap, *sinks)
    out = context.attend(nn.Identity(), query, key, value, options)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


class NaivePack:
    """`PackedAttention` by the formula, one sequence at a time."""

    def __init__(self, lengths: list[int], prefixes: list[tuple[int, int]] | None) -> None:
        self.lengths, self.prefixes = lengths, prefixes or [(0, 0)] * len(lengths)

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        outputs, start = [], 0
        for length, (prefix, before) in zip(self.lengths, self.prefixes):
            seen = [*range(prefix, prefix + before), *range(start, start + length)]
            outputs.append(naive_attention(q[start : start + length], k[seen], v[seen], options))
            start += length
        return torch.cat(outputs)[None]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("softcap", "sinks"), SOFTCAPS_AND_SINKS)
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_packed_sequences(softcap: float | None, sinks: bool, window: int | None, pack: Any, kv_heads: int) -> None:
    tensors, grad = make_inputs(sum(pack[0]), kv_heads, 16, sinks)
    got = values_and_gradients(PackedAttention(pack[0], CPU, pack[1]), tensors, grad, window, softcap)
    exact = values_and_gradients(NaivePack(*pack), [t.double() for t in tensors], grad.double(), window, softcap)
    assert_close(got, exact)


@pytest.mark.parametrize("max_scores", [1, 6 * 70, 6 * 70 * 9, 6 * 70 * 100])
def test_eager_attention_in_pieces(monkeypatch: pytest.MonkeyPatch, max_scores: int) -> None:
    sizes: list[int] = []
    piece = attention._eager_piece
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)

    def noted(q: Tensor, p: Tensor, k: Tensor, *rest: Any) -> Tensor:
        sizes.append(q[..., 0].numel() * k.shape[2])
        return piece(q, p, k, *rest)

    monkeypatch.setattr(attention, "_eager_piece", noted)
    tensors, grad = make_inputs(sum(LENGTHS), 2, 16, sinks=True)
    got = values_and_gradients(PackedAttention(LENGTHS, CPU, PREFIXES), tensors, grad, 8, 1.5)
    exact = values_and_gradients(NaivePack(LENGTHS, PREFIXES), [t.double() for t in tensors], grad.double(), 8, 1.5)
    assert_close(got, exact)
    longest_query = 6 * 93  # scores of one query, below which a piece cannot be cut
    assert max(sizes) <= max(max_scores, longest_query)


@pytest.mark.parametrize(("softcap", "sinks"), SOFTCAPS_AND_SINKS)
@pytest.mark.parametrize("window", [None, 3])
def test_padded_rows(softcap: float | None, sinks: bool, window: int | None) -> None:
    """A row with padding on both sides, one on the left, one without and one of padding alone."""
    spans = [(2, 7), (4, 9), (0, 9), (0, 0)]
    mask = torch.zeros(4, 9, dtype=torch.int64)
    for row, (start, stop) in enumerate(spans):
        mask[row, start:stop] = 1
    torch.manual_seed(0)
    tensors = [torch.randn(4, heads, 9, 8) for heads in (6, 2, 2)] + ([torch.randn(6)] if sinks else [])
    grad = torch.randn(4, 9, 6, 8)
    out, *grads = values_and_gradients(PaddedAttention(mask), tensors, grad, window, softcap)
    assert not out[mask == 0].any() and not grads[0].transpose(1, 2)[mask == 0].any()
    leaves = [t.double().requires_grad_() for t in tensors]
    options = LayerOptions(0.4, window, softcap, *leaves[3:])
    for row, (start, stop) in enumerate(spans[:3]):
        q, k, v = (t[row, :, start:stop].transpose(0, 1) for t in leaves[:3])
        expected = naive_attention(q, k, v, options)
        torch.testing.assert_close(out[row, start:stop].double(), expected, rtol=1e-4, atol=2e-5)
        expected.backward(grad[row, start:stop].double())
    assert_close(grads, [leaf.grad for leaf in leaves if leaf.grad is not None])


def test_rows_with_the_same_positions_share_a_mask() -> None:
    context = PackedAttention([6, 3, 4, 5], CPU, [(0, 0), (0, 4), (0, 4), (0, 4)])
    whole, continued = (rows.mask(LayerOptions(1.0), torch.zeros(1)) for rows in context.buckets)
    assert whole is None and continued is not None and continued.shape == (1, 1, 5, 9)
    assert (continued == 0).sum(-1).flatten().tolist() == [5, 6, 7, 8, 9]
    windowed = PackedAttention([4, 5, 5], CPU).buckets[0].mask(LayerOptions(1.0, 3), torch.zeros(1))
    assert windowed is not None and (windowed == 0).sum(-1).flatten().tolist() == [1, 2, 3, 3, 3]


def naive_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, *lengths: Any, **settings: Any
) -> tuple[Tensor, ...]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for of_q, of_k, scores in naive_scores(q, k, q_bounds, k_bounds, settings):
        lse[:, of_q] = scores.logsumexp(-1)
        out[of_q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), heads_of(v[of_k], q))
    return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def naive_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *bounds: Any, **settings: Any
) -> tuple[Tensor, ...]:
    """As the kernel computes it: probabilities from lse, row sums from out."""
    of_query, of_key, of_value = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for of_q, of_k, scores in naive_scores(q, k, *bounds[:2], settings):
        probs = (scores - lse[:, of_q, None]).exp()
        for_probs = torch.einsum("qhd,khd->hqk", grad[of_q], heads_of(v[of_k], q))
        rows = (grad[of_q] * out[of_q]).sum(-1).T[..., None]
        for_scores = probs * (for_probs - rows) * settings["scale"]
        of_query[of_q] = torch.einsum("hqk,khd->qhd", for_scores, heads_of(k[of_k], q))
        for total, part in (
            (of_key, torch.einsum("hqk,qhd->khd", for_scores, q[of_q])),
            (of_value, torch.einsum("hqk,qhd->khd", probs, grad[of_q])),
        ):
            total[of_k] = part.unflatten(1, (k.shape[1], -1)).sum(2)
    return of_query, of_key, of_value


def naive_scores(q: Tensor, k: Tensor, q_bounds: Tensor, k_bounds: Tensor, settings: dict[str, Any]) -> Any:
    for sequence in range(len(q_bounds) - 1):
        of_q, of_k = (slice(int(b[sequence]), int(b[sequence + 1])) for b in (q_bounds, k_bounds))
        scores = torch.einsum("qhd,khd->hqk", q[of_q], heads_of(k[of_k], q)) * settings["scale"]
        num_queries, num_keys = scores.shape[1:]
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        left = settings.get("window_size_left")  # the dispatcher drops defaults
        hidden = (distance < 0) if left is None else (distance < 0) | (distance > left)
        yield of_q, of_k, scores.masked_fill(hidden, -torch.inf)


def heads_of(t: Tensor, q: Tensor) -> Tensor:
    return t.repeat_interleave(q.shape[1] // t.shape[1], 1)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("pack", PACKS)
def test_sinks_around_the_flash_kernel(window: int | None, pack: Any) -> None:
    """What surrounds the kernel, on the CPU: the kernel's two ops are replaced by what they compute."""
    tensors, grad = make_inputs(sum(pack[0]), 2, 16, sinks=True)
    tensors, grad = [t.double() for t in tensors], grad.double()

    class FlashPack(PackedAttention):
        def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
            return self._flash(*(t[0].transpose(0, 1) for t in (query, key, value)), options)[None]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", naive_flash_forward, "CPU")
        library.impl("_flash_attention_backward", naive_flash_backward, "CPU")
        got = values_and_gradients(FlashPack(pack[0], CPU, pack[1]), tensors, grad, window, None)
    assert_close(got, values_and_gradients(NaivePack(*pack), tensors, grad, window, None))


@pytest.mark.parametrize("sinks", [pytest.param(s, marks=gpu) for s in (False, True)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_packed_sequences_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, sinks: bool, softcap: float | None, window: int | None, pack: Any, kv_heads: int
) -> None:
    calls: list[int] = []
    apply = FlashWithSinks.apply
    monkeypatch.setattr(FlashWithSinks, "apply", lambda *args: (calls.append(1), apply(*args))[1])
    tensors, grad = make_inputs(sum(pack[0]), kv_heads, 32, sinks)
    tensors, grad = [t.bfloat16() for t in tensors], grad.bfloat16()
    context = PackedAttention(pack[0], torch.device("cuda"), pack[1])
    got = values_and_gradients(context, [t.cuda() for t in tensors], grad.cuda(), window, softcap)
    exact = values_and_gradients(NaivePack(*pack), [t.double() for t in tensors], grad.double(), window, softcap)
    assert len(calls) == (sinks and softcap is None)
    for a, b in zip(got, exact, strict=True):
        assert float((a.cpu().double() - b).norm() / b.norm()) < 8e-3


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "sliding_window": 4}


def tiny_model(model_type: str, implementation: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SMALL | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.02, "query_pre_attn_scalar": 8}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_models_equal_their_eager_forward(model_type: str, more: dict[str, Any]) -> None:
    ours, eager = (tiny_model(model_type, name, **more) for name in (ATTENTION_NAME, "eager"))
    for name, parameter in eager.named_parameters():
        nn.init.normal_(parameter, std=1.0 if name.endswith("sinks") else 0.2)
    ours.load_state_dict(eager.state_dict())
    lengths = [5, 11]
    ids = [torch.randint(1, 64, (1, length)) for length in lengths]
    packed = ours(
        input_ids=torch.cat(ids, 1),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        attention_mask=no_mask(CPU),
        use_cache=False,
        lockstep_context=PackedAttention(lengths, CPU),
    ).logits
    expected = torch.cat([eager(input_ids=i, use_cache=False).logits for i in ids], 1)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("doge", {"sliding_window": None}, r"DogeAttention builds its own attention mask \(1, 4, 6, 6\)"),
    ],
)
def test_models_that_depend_on_their_own_mask_are_refused(model_type: str, more: dict[str, Any], message: str) -> None:
    model = tiny_model(model_type, ATTENTION_NAME, **more)
    ids = torch.arange(6)[None]
    with pytest.raises(ValueError, match=message):
        context = PackedAttention([6], CPU)
        model(ids, position_ids=ids, attention_mask=no_mask(CPU), use_cache=False, lockstep_context=context)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"is_causal": False}, "Identity is not causal"),
        ({"position_bias": torch.zeros(1)}, "Identity passes position_bias"),
        ({"head_mask": torch.ones(1)}, "Identity passes head_mask"),
        ({"output_attentions": True}, "Identity passes output_attentions"),
    ],
)
def test_what_no_context_computes_is_refused(kwargs: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 3, 8)
    context = PackedAttention([3], CPU)
    neutral = {"position_ids": torch.arange(3), "use_cache": True, "output_attentions": False, "head_mask": None}
    assert lockstep_attention(nn.Identity(), q, q, q, None, lockstep_context=context, **neutral)[0].shape == (
        1,
        3,
        2,
        8,
    )
    with pytest.raises(ValueError, match=message):
        lockstep_attention(nn.Identity(), q, q, q, no_mask(CPU), lockstep_context=context, **kwargs)


def test_options_of_the_layer_reach_the_context() -> None:
    q, sinks = torch.randn(1, 2, 3, 16), torch.zeros(2)
    seen: list[LayerOptions] = []
    context: Any = SimpleNamespace(attend=lambda layer, query, key, value, options: seen.append(options))
    lockstep_attention(
        nn.Identity(), q, q, q, None, lockstep_context=context, sliding_window=7, softcap=30.0, s_aux=sinks
    )
    assert (seen[0].scaling, seen[0].sliding_window, seen[0].softcap) == (0.25, 7, 30.0) and seen[0].sinks is sinks
    with pytest.raises(RuntimeError, match="Identity got no attention context"):
        lockstep_attention(nn.Identity(), q, q, q, None)
