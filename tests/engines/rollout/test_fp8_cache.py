"""The embedded engine with its KV cache in 8 bits: its log-probs are those of a model whose cached keys and values are rounded."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.rollout import Completion, GenerationRequest
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.model_runner import ModelRunner, why_no_fp8_cache
from lockstep.engines.rollout.embedded.paged_attention import LayerShape
from lockstep.kernels.fp8 import saturated
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.layer_options import LayerOptions
from lockstep.plan.model_shape import ModelShape
from tests.engines.rollout.rollout_cases import (
    DEVICES,
    assert_same,
    device_or_skip,
    embedded,
    mixed_requests,
    naive_log_probs,
    tiny_model,
)
from tests.engines.rollout.test_history_drafts import drafting, totals
from tests.models import architectures
from tests.models.attention_reference import naive_attention


@dataclass
class RoundedKeys:
    """An attention context by the definition: the first `num_fresh` tokens see each other's keys as they are, others see all keys
    rounded, also their own."""

    num_fresh: int

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        q, k, v = (t[0].transpose(0, 1).cpu().double() for t in (query, key, value))
        if options.sinks is not None:
            options = LayerOptions(
                options.scaling, options.sliding_window, options.softcap, options.sinks.cpu().double()
            )
        as_they_are = naive_attention(q, k, v, options)
        rounded = naive_attention(q, *(saturated(t.float()).double() for t in (k, v)), options)
        out = torch.cat([as_they_are[: self.num_fresh], rounded[self.num_fresh :]])
        return out[None].to(query)


def fp8_cache(model: Any, num_blocks: int | None = None, **changes: Any) -> EmbeddedEngine:
    return embedded(model, num_blocks, kv_cache_dtype="fp8", **changes)


def runner_of(engine: EmbeddedEngine) -> ModelRunner:
    assert engine.runner is not None
    return engine.runner


@torch.no_grad()
def defined_log_probs(
    engine: EmbeddedEngine, request: GenerationRequest, completion: Completion, num_fresh: int | None = None
) -> Tensor:
    """num_fresh: tokens of the first prefill step; None is the whole prompt."""
    runner, first = runner_of(engine), len(request.prompt_ids)
    ids = torch.tensor([request.prompt_ids + completion.token_ids], device=runner.device)
    positions = torch.arange(ids.shape[1], device=runner.device)[None]
    hidden: Tensor = runner.forward(ids, positions, RoundedKeys(first if num_fresh is None else num_fresh))  # type: ignore[arg-type]
    log_probs = runner.logits(hidden).float().log_softmax(-1)
    return log_probs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].cpu()


def mean_gap(completions: list[Completion], expected: list[Tensor]) -> float:
    got = torch.cat([torch.tensor(c.log_probs) for c in completions])
    return float((got - torch.cat(expected)).abs().mean())


def drift(model: Any, requests: list[GenerationRequest], completions: list[Completion]) -> float:
    """Mean difference to transformers in the model's precision."""
    return mean_gap(completions, [naive_log_probs(model, r, c) for r, c in zip(requests, completions)])


def assert_same_tokens(got: list[Completion], expected: list[Completion]) -> None:
    """Log-probs are equal up to single roundings, which fall either way between two numbers of the type."""
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert mean_gap(got, [torch.tensor(c.log_probs) for c in expected]) < 1e-3


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_or_skip(request.param)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt_oss"])
def test_log_probs_are_those_of_rounded_keys_and_values(kind: str, device: torch.device) -> None:
    model, requests = tiny_model(kind, device), mixed_requests()
    engine = fp8_cache(model)
    completions = engine.generate(requests)
    gap = drift(model, requests, completions)
    assert 1e-3 < gap < 0.3, gap  # random weights, in which every rounding is visible
    expected = [defined_log_probs(engine, r, c) for r, c in zip(requests, completions)]
    assert mean_gap(completions, expected) < gap / 20
    assert_same(engine.generate(requests), completions)
    engine.sleep()
    assert_same(engine.generate(requests), completions)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    return fp8_cache(model).generate(mixed_requests())


def test_batches_blocks_and_shared_prompts_do_not_change_the_tokens(model: Any, expected: list[Completion]) -> None:
    requests = mixed_requests()
    for changes in ({"kv_block_size": 16}, {"enable_prefix_caching": False, "kv_block_size": 1}):
        assert_same_tokens(fp8_cache(model, **changes).generate(requests), expected)
    one_by_one = fp8_cache(model, enable_prefix_caching=False)
    assert_same_tokens([one_by_one.generate([request])[0] for request in requests], expected)


def test_drafts_do_not_change_the_tokens(model: Any, expected: list[Completion]) -> None:
    engine = drafting(model, kv_cache_dtype="fp8")
    for _ in range(2):
        assert_same_tokens(engine.generate(mixed_requests()), expected)
    assert totals(engine).num_accepted > 20


def test_later_chunks_of_a_prompt_see_rounded_keys(model: Any) -> None:
    request = mixed_requests()[3]
    assert len(request.prompt_ids) == 33
    engine = fp8_cache(model, max_num_batched_tokens=16)
    (completion,) = engine.generate([request])
    of_chunks, of_whole = (
        mean_gap([completion], [defined_log_probs(engine, request, completion, n)]) for n in (16, 33)
    )
    assert of_chunks < 1e-4 < of_whole


def test_preempted_sequences_go_on_with_a_small_gap(model: Any, expected: list[Completion]) -> None:
    """Their tokens are prefilled again, as new sequences are: these see each other's keys as they are."""
    requests = mixed_requests()
    engine = fp8_cache(model, num_blocks=20)
    completions = engine.generate(requests)
    assert sum(c.num_preempted for c in completions) > 0
    assert drift(model, requests, completions) < 1.5 * drift(model, requests, expected)
    assert engine.blocks.num_free == 20


def test_weights_and_cache_can_both_be_in_8_bits(model: Any) -> None:
    requests = mixed_requests()
    both = fp8_cache(model, quantization="fp8").generate(requests)
    weights = embedded(model, quantization="fp8").generate(requests)
    first, second = ([c.log_probs[0] for c in completions] for completions in (both, weights))
    assert first == pytest.approx(second, abs=1e-5)  # of the prefill, which does not read the cache
    assert [c.log_probs for c in both] != [c.log_probs for c in weights]
    assert 1e-3 < drift(model, requests, both) < 0.3


def test_the_model_check_is_in_the_models_precision(model: Any) -> None:
    engine = fp8_cache(model)
    runner = runner_of(engine)
    runner.quantize_cache()
    with pytest.raises(ValueError, match="differ"):
        engine.generate(mixed_requests()[:1])
    engine = fp8_cache(model)
    runner, moves = runner_of(engine), runner_of(engine).num_moves
    engine.generate(mixed_requests()[:1])
    assert runner.cache is not None and {t.dtype for t in runner.cache.keys.values()} == {torch.float8_e4m3fn}
    assert runner.num_moves == moves + 1  # graphs of the check are not used
    engine.generate(mixed_requests()[:1])
    assert runner.num_moves == moves + 1


def test_twice_as_many_tokens_fit() -> None:
    model = tiny_model().bfloat16()
    plain, small = embedded(model), fp8_cache(model)
    for engine in (plain, small):
        engine.generate(mixed_requests()[:2])
    wide, narrow = runner_of(plain), runner_of(small)
    assert wide.max_num_blocks(0.01) == pytest.approx(narrow.max_num_blocks(0.01) / 2, abs=1)
    num_bytes = [
        sum(t.numel() * t.element_size() for store in (cache.keys, cache.values) for t in store.values())
        / cache.num_blocks
        for cache in (wide.cache, narrow.cache)
        if cache is not None
    ]
    assert num_bytes[0] == 2 * num_bytes[1]
    planned = ModelShape.from_config(model.config.to_dict()).kv_bytes(1)
    assert planned == sum(layer.bytes_per_token for layer in narrow.layers().values())


def test_numbers_beyond_the_largest_are_cut() -> None:
    x = torch.tensor([1000.0, -torch.inf, 448.0, 1.0 + 1 / 16, -(1.0 + 3 / 16), 1e-4, torch.nan])
    assert saturated(x).float()[:-1].tolist() == [448.0, -448.0, 448.0, 1.0, -1.25, 0.0]
    assert saturated(x).float()[-1].isnan()  # for the audits to see


def test_models_that_are_refused() -> None:
    latents = architectures.tiny_model("deepseek_v3")
    install_decoder_layers(latents)
    latents.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(
        ValueError,
        match=r"rollout\.kv_cache_dtype=fp8 cannot serve DeepseekV3ForCausalLM: it caches latents.*; set null",
    ):
        fp8_cache(latents).generate(mixed_requests()[:1])
    cpu = torch.device("cpu")
    assert "by an index" in str(why_no_fp8_cache([LayerShape(2, 8, 8, torch.float32, is_indexed=True)], cpu))
    assert "no layer" in str(why_no_fp8_cache([], cpu))
    assert why_no_fp8_cache([LayerShape(2, 8, 8, torch.float32)], cpu) is None


@pytest.mark.gpu
def test_graphs_read_and_write_the_cache_in_8_bits() -> None:
    """bfloat16: steps as graphs, op by op and with drafts sample the same tokens. Graphs are captured once after the check."""
    model = tiny_model(device=device_or_skip("cuda"), hidden_size=128, intermediate_size=256).bfloat16()
    requests = mixed_requests(ignore_eos=True)
    graphs, eager = fp8_cache(model), fp8_cache(model, enforce_eager=True)
    got = graphs.generate(requests)
    assert_same(got, eager.generate(requests))
    assert 1e-3 < drift(model, requests, got) < 0.3
    moves = runner_of(graphs).num_moves
    graphs.sleep()
    assert_same(graphs.generate(requests), got)
    assert runner_of(graphs).num_moves == moves
    drafts = drafting(model, kv_cache_dtype="fp8")
    for _ in range(2):
        assert_same_tokens(drafts.generate(requests), got)
