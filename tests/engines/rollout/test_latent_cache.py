"""The embedded engine caches one latent per token (MLA): equal to transformers for every schedule, from a small cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.model_runner import check_layers
from lockstep.engines.rollout.embedded.paged_attention import LayerProbe, LayerShape
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.experts import EXPERTS_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.latent_attention import LatentKeys
from tests.engines.rollout.rollout_cases import (
    assert_same,
    device_or_skip,
    embedded,
    mixed_requests,
    naive_log_probs,
)
from tests.models import architectures

pytestmark = pytest.mark.first

TYPES = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4"),
    *("kimi_linear", "longcat_flash", "minicpm3", "youtu"),
)
QUICK = ("deepseek_v3",)
CAPTURED = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite")
"""Types whose decode steps CUDA graphs hold for certain."""


def latent_model(model_type: str = "deepseek_v3") -> Any:
    model = architectures.tiny_model(model_type)
    model.set_attn_implementation(ATTENTION_NAME)
    install_decoder_layers(model)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return latent_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    """Completions of `mixed_requests` when each request runs alone."""
    engine = embedded(model, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate([request])[0] for request in mixed_requests()]


def widths(engine: EmbeddedEngine) -> set[tuple[int, int, int]]:
    """(heads, numbers per key, numbers per value) of the layers' cache tensors."""
    assert engine.runner is not None and engine.runner.cache is not None
    cache = engine.runner.cache
    for index, shape in cache.layers.items():
        rows = cache.num_blocks * shape.num_heads
        assert cache.keys[index].shape == (rows, cache.block_size, shape.key_dim)
        assert cache.values[index].shape == (rows, cache.block_size, shape.value_dim)
    return {(shape.num_heads, shape.key_dim, shape.value_dim) for shape in cache.layers.values()}


def assert_caches_latents(engine: EmbeddedEngine, model: Any) -> None:
    """With the keys of an index, if there is one."""
    config = model.config
    scored = config.index_head_dim if hasattr(config, "index_head_dim") else 0
    assert widths(engine) == {(1, config.kv_lora_rank + config.qk_rope_head_dim + scored, 0)}


def assert_teacher_forced(model: Any, requests: list[GenerationRequest], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        got, teacher_forced = torch.tensor(completion.log_probs), naive_log_probs(model, request, completion)
        torch.testing.assert_close(got, teacher_forced, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TYPES]
)
def test_decoding_equals_transformers(model_type: str) -> None:
    """Chunked prefill, decode tokens in the same steps, preemption and shared prompts included."""
    model = latent_model(model_type)
    requests = mixed_requests()[1:8]
    engine = embedded(model)
    completions = engine.generate(requests)
    assert_teacher_forced(model, requests, completions)
    tight = embedded(model, max_num_batched_tokens=9, num_blocks=16).generate(requests)
    assert_same(tight, completions)
    assert sum(c.num_preempted for c in tight) > 0
    assert_caches_latents(engine, model)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear"]
)
def test_decoding_equals_transformers_on_cuda(model_type: str, eager: bool) -> None:
    """Within CUDA graphs, and when chunks of prompts share steps with decode tokens."""
    device, reference = device_or_skip("cuda"), latent_model(model_type)
    model, requests = latent_model(model_type).to(device), mixed_requests()
    model.set_experts_implementation(EXPERTS_NAME)
    for changes in ({}, {"max_num_batched_tokens": 9, "num_blocks": 16}):
        engine = embedded(model, enforce_eager=eager, **changes)
        for _ in range(2):
            completions = engine.generate(requests)
            with architectures.torch_forms(reference):
                assert_teacher_forced(reference, requests, completions)
            assert_caches_latents(engine, model)
            engine.sleep()  # and the cache moves
        decoder: Any = engine.step_loop._decoder  # type: ignore[union-attr]
        assert eager or model_type not in CAPTURED or decoder.graphs.use_graphs


@pytest.mark.gpu
def test_an_adapter_is_absorbed_on_cuda() -> None:
    peft = pytest.importorskip("peft")
    device, requests = device_or_skip("cuda"), mixed_requests()[:5]
    model = latent_model()
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["kv_b_proj"]), model)
    for module in model.modules():
        if hasattr(module, "lora_B"):
            nn.init.normal_(module.lora_B["default"].weight)
    model.to(device)
    completions = embedded(model).generate(requests)
    assert_teacher_forced(model, requests, completions)


@pytest.mark.parametrize(("value_dim", "device"), [(0, "cuda"), (8, "cpu"), (8, "cuda")])
def test_an_index_of_expanded_keys_is_refused_on_cuda(value_dim: int, device: str) -> None:
    probe = LayerProbe()
    probe.layers[0] = LayerShape(1, 8, value_dim, torch.float32, is_indexed=True)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1))
    model = SimpleNamespace(config=config, device=torch.device(device))
    if value_dim and device == "cuda":
        with pytest.raises(ValueError, match=r"pick keys of each head by an index.*rollout\.name=hf"):
            check_layers(model, probe)
    else:
        check_layers(model, probe)


def test_memory_is_counted_by_latents(model: Any) -> None:
    engine = embedded(model)
    engine.generate(mixed_requests()[:1])
    config, runner = model.config, engine.runner
    assert runner is not None
    per_token = (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    assert [shape.bytes_per_token for shape in runner.layers().values()] == [per_token] * config.num_hidden_layers
    blocks = runner.max_num_blocks(0.5)
    total = runner._cache_bytes(0.5)
    assert blocks == total // (runner.block_size * config.num_hidden_layers * per_token)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 4},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 5, "kv_block_size": 3},
        {"num_blocks": 20},
    ],
)
def test_the_schedule_does_not_change_the_result(
    model: Any, expected: list[Completion], changes: dict[str, Any]
) -> None:
    assert_same(embedded(model, **changes).generate(mixed_requests()), expected)


def test_samples_share_the_prompt_and_aborted_ones_go_on(model: Any) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    requests = [GenerationRequest(list(range(3, 26)), params, seed=i) for i in range(5)]
    alone = embedded(model, enable_prefix_caching=False).generate(requests)
    engine = embedded(model)
    assert_same(engine.generate(requests), alone)
    completions: dict[int, Completion] = {}
    with engine.serving():
        for number, request in enumerate(requests):
            engine.add(number, request)
        engine.step()
        parts = engine.abort([0, 3])
        for number, part in parts.items():
            engine.add(number, requests[number].after(part.token_ids))
        while engine.unfinished():
            completions |= {n: parts[n].then(c) if n in parts else c for n, c in engine.step().items()}
    assert_same([completions[i] for i in range(5)], alone)


def test_changed_weights_are_used() -> None:
    model, requests = latent_model(), mixed_requests(temperature=0.0)[:3]
    engine = embedded(model)
    before = engine.generate(requests)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    engine.update_weights(iter([(name, -2 * model.state_dict()[name])]))
    after = engine.generate(requests)
    assert [c.log_probs for c in after] != [c.log_probs for c in before]
    assert_teacher_forced(model, requests, after)


def test_a_lora_adapter_is_absorbed_too() -> None:
    peft = pytest.importorskip("peft")
    model, requests = latent_model(), mixed_requests()[:5]
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["kv_b_proj", "q_b_proj"]), model)
    for module in model.modules():
        if hasattr(module, "lora_B"):
            nn.init.normal_(module.lora_B["default"].weight)
    engine = embedded(model)
    completions = engine.generate(requests)
    assert_teacher_forced(model, requests, completions)
    assert {value_dim for _, _, value_dim in widths(engine)} == {0}


def test_a_projection_that_must_be_called_is_expanded() -> None:
    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mul(1.5)

    model, requests = latent_model(), mixed_requests(temperature=0.0)[:4]
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Quantized
    engine = embedded(model)
    assert_teacher_forced(model, requests, engine.generate(requests))
    config = model.config
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    assert widths(engine) == {(config.num_attention_heads, key_dim, config.v_head_dim)}


@pytest.mark.parametrize("method", ["_of_keys", "_of_values"])
def test_a_planted_error_is_found(model: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has the rows of its neighbour."""
    right = getattr(LatentKeys, method)
    monkeypatch.setattr(LatentKeys, method, lambda keys, rows: right(keys, rows).roll(1, 0))
    with pytest.raises(ValueError, match="differently from transformers"):
        embedded(model).generate(mixed_requests()[:1])
