"""The vllm engine: settings, sampling, log-probs, concurrent requests. `make test-vllm` runs the tests that need vLLM."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.config.actor_rollout_ref import RolloutConfig, has_cut_log_probs
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.sent_images import unexpanded
from lockstep.engines.rollout.vllm import VllmEngine, engine_settings
from lockstep.protocol.images import ImageInputs
from tests.engines.rollout.rollout_cases import assert_same, embedded, naive_log_probs, transformers_greedy
from tests.models.vision_families import save_tiny_vision
from tests.tiny import save_tiny_model

CPU, EOS = torch.device("cpu"), 2
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head size vLLM's CPU kernels know."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_model(folder, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True)


def rollout(**changes: Any) -> RolloutConfig:
    settings: dict[str, Any] = dict(name="vllm", prompt_length=160, response_length=32, seed=7, max_num_seqs=8)
    return RolloutConfig(**settings | {"load_format": "auto"} | changes)


def settings_of(folder: Path, device: str = "cuda", **changes: Any) -> dict[str, Any]:
    config = rollout(**changes)
    return engine_settings(config, HFModelConfig(path=str(folder)), "m", torch.bfloat16, torch.device(device))


def test_rollout_keys_reach_vllm(folder: Path) -> None:
    got = settings_of(
        folder,
        tensor_model_parallel_size=4,
        gpu_memory_utilization=0.7,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        max_model_len=200,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        free_cache_engine=False,
        load_format="dummy",
        quantization="fp8",
        kv_cache_dtype="fp8_e5m2",
        engine_kwargs={"vllm": {"swap_space": 2, "seed": 3, "block_size": None}, "sglang": {"x": 1}},
    )
    expected = {
        "model": str(folder),
        "dtype": "bfloat16",
        "tensor_parallel_size": 4,
        "gpu_memory_utilization": 0.7,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 64,
        "max_model_len": 200,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_sleep_mode": False,
        "load_format": "dummy",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e5m2",
        "swap_space": 2,
        "seed": 3,
        "logprobs_mode": "processed_logprobs",
    }
    assert {name: got[name] for name in expected} == expected
    assert "block_size" not in got and "x" not in got and "kv_cache_memory_bytes" not in got
    assert settings_of(folder)["max_model_len"] == 192 and settings_of(folder)["enable_sleep_mode"]
    assert settings_of(folder)["kv_cache_dtype"] == "auto"


def test_on_cpu_the_cache_fits_the_sequences_and_nothing_sleeps(folder: Path) -> None:
    got = settings_of(folder, "cpu")
    assert got["enforce_eager"] and not got["enable_sleep_mode"]
    assert (
        got["kv_cache_memory_bytes"] == 8 * 3 * 128 * 2 * 2 * 1 * 32 * 2
    )  # sequences, blocks, tokens, layers, k and v, …


@pytest.mark.parametrize(
    ("sampling", "mode", "is_cut"),
    [
        ({}, "processed_logprobs", False),
        ({"temperature": 0.7}, "processed_logprobs", False),
        ({"top_p": 0.9}, "raw_logprobs", False),
        ({"temperature": 0.7, "top_k": 5}, "processed_logprobs", True),
        ({"temperature": 0.0, "top_k": 5, "do_sample": False}, "processed_logprobs", False),
    ],
)
def test_log_probs_are_of_the_full_distribution_if_vllm_has_them(
    sampling: dict[str, Any], mode: str, is_cut: bool, folder: Path
) -> None:
    assert settings_of(folder, **sampling)["logprobs_mode"] == mode
    assert has_cut_log_probs(rollout(**sampling)) == is_cut


def test_without_vllm_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ValueError, match=r'needs vLLM: pip install "lockstep-rl\[vllm\]"'):
        VllmEngine(rollout(), [EOS], 0).load(HFModelConfig(path=str(folder)), "m", torch.float32, CPU)


@pytest.fixture(scope="module")
def engine(folder: Path) -> VllmEngine:
    made = VllmEngine(rollout(), [EOS], 0)
    made.load(HFModelConfig(path=str(folder)), "actor_rollout_ref.model", torch.float32, CPU)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def requests_with(**sampling: Any) -> list[GenerationRequest]:
    prompts = [list(range(3, 3 + n)) for n in (5, 17, 1, 150)]
    params = SamplingParams(**{"max_tokens": 12} | sampling)
    return [GenerationRequest(prompt, params, seed=2**62 + i) for i, prompt in enumerate([*prompts, prompts[3]])]


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"temperature": 0.0}])
def test_log_probs_equal_transformers(engine: VllmEngine, reference: Any, sampling: dict[str, Any]) -> None:
    requests = requests_with(**sampling)
    for request, completion in zip(requests, engine.generate(requests)):
        expected = naive_log_probs(reference, request, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)
        if sampling.get("temperature") == 0.0:
            assert completion.token_ids == transformers_greedy(reference, request)


@pytest.mark.vllm
@needs_vllm
def test_samples_depend_only_on_their_seed(engine: VllmEngine) -> None:
    requests = requests_with()
    completions = engine.generate(requests)
    assert completions[3].token_ids != completions[4].token_ids
    assert_same(engine.generate(requests[::-1])[::-1], completions)
    assert_same([engine.generate([request])[0] for request in requests[:2]], completions[:2])
    assert engine.generate([]) == []


@pytest.mark.vllm
@needs_vllm
def test_stop_tokens_end_a_response_and_are_part_of_it(engine: VllmEngine) -> None:
    stops = tuple(range(3, 200))
    for c in engine.generate(requests_with(stop_token_ids=stops)):
        assert c.stop_reason == "stop" or len(c.token_ids) == 12
        assert all(token not in (*stops, EOS) for token in c.token_ids[:-1])
        assert (c.token_ids[-1] in (*stops, EOS)) == (c.stop_reason == "stop")
    for c in engine.generate(requests_with(stop_token_ids=stops, ignore_eos=True)):
        assert c.stop_reason == "length" and len(c.token_ids) == 12


@pytest.mark.vllm
@needs_vllm
def test_top_k_1_is_greedy(engine: VllmEngine) -> None:
    cut = engine.generate(requests_with(top_k=1))
    assert [c.token_ids for c in cut] == [c.token_ids for c in engine.generate(requests_with(temperature=0.0))]


@pytest.mark.vllm
@needs_vllm
def test_aborted_requests_go_on_with_their_tokens(engine: VllmEngine) -> None:
    requests, completions = requests_with(), {}
    expected = engine.generate(requests)
    with engine.serving():
        for number, request in enumerate(requests):
            engine.add(number, request)
        for _ in range(3):
            completions |= engine.step()
        half = engine.unfinished()[::2]
        parts = engine.abort([*half, 99])
        assert sorted(parts) == sorted(half) and {part.stop_reason for part in parts.values()} == {"abort"}
        assert all(part.token_ids for part in parts.values())
        for number, part in parts.items():
            engine.add(number, requests[number].after(part.token_ids))
        while engine.unfinished():
            completions |= {n: parts[n].then(c) if n in parts else c for n, c in engine.step().items()}
    for number, completion in completions.items():
        kept = parts[number].token_ids if number in parts else expected[number].token_ids
        assert completion.token_ids[: len(kept)] == kept and completion.stop_reason in ("stop", "length")
    greedy = requests_with(temperature=0.0)
    with engine.serving():
        engine.add(0, greedy[0])
        engine.step()
        part = engine.abort([0])[0]
    rest = engine.generate([greedy[0].after(part.token_ids)])[0]
    assert part.then(rest).token_ids == engine.generate(greedy[:1])[0].token_ids


@pytest.mark.vllm
@needs_vllm
def test_too_long_requests_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="190 prompt tokens \\+ max_tokens 12 = 202 exceed max_model_len=192"):
        engine.generate([GenerationRequest(list(range(3, 193)), SamplingParams(max_tokens=12))])
    assert len(engine.generate(requests_with())) == 5


@pytest.mark.vllm
@needs_vllm
def test_greedy_equals_embedded(engine: VllmEngine, folder: Path) -> None:
    from lockstep.models.loading import load_causal_lm

    model = load_causal_lm(HFModelConfig(path=str(folder)), "m", torch.float32, CPU)
    requests = requests_with(temperature=0.0)
    assert_same(engine.generate(requests), embedded(model, prompt_length=160, response_length=32).generate(requests))


def test_prompts_with_images_have_one_placeholder_per_image() -> None:
    """vLLM expands them, and gets the pictures."""
    images = ImageInputs({}, 9, (3, 2), (b"a" * 16, b"b" * 16), (b"a", b"b"))
    request = GenerationRequest([1, 9, 9, 9, 9, 9, 2, 4], SamplingParams(), images=images)
    assert unexpanded(request) == [1, 9, 9, 2, 4]
    assert unexpanded(request.after([7, 8])) == [1, 9, 9, 2, 4, 7, 8]
    with pytest.raises(ValueError, match=r"more than placeholders for an image.*name=embedded"):
        unexpanded(GenerationRequest([9, 9, 5, 9, 9, 9], SamplingParams(), images=images))


def test_a_model_that_reads_images_has_its_tokenizer_and_its_buffers_in_vllm(folder: Path, tmp_path: Path) -> None:
    save_tiny_vision("qwen2_5_vl", tmp_path)
    found = [settings_of(path, load_format="dummy") for path in (folder, tmp_path)]
    assert [settings["skip_tokenizer_init"] for settings in found] == [True, False]
    assert [settings["load_format"] for settings in found] == ["dummy", "auto"]
