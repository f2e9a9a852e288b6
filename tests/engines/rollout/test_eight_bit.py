"""The embedded engine with 8-bit weights: its log-probs are those of transformers with rounded products, of the present weights."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lockstep.engines.rollout import Completion, GenerationRequest
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.kernels import fp8
from lockstep.models.decoder import decoder_of
from lockstep.models.eight_bit import Fp8Weights, _warn_if_slow
from lockstep.models.four_bit import use_4bit_linears
from tests.engines.rollout.rollout_cases import (
    DEVICES,
    assert_same,
    device_or_skip,
    embedded,
    mixed_requests,
    naive_log_probs,
    tiny_model,
)


def rounded(x: Tensor) -> Tensor:
    scales = (x.float().abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    return (x.float() / scales).to(torch.float8_e4m3fn).float() * scales


@contextmanager
def rounded_linears(model: Any) -> Iterator[None]:
    """transformers' linear layers inside the decoder's layers round weights and inputs."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        out = rounded(x) @ rounded(self.weight).t()
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    linears = [module for module in decoder_of(model).layers.modules() if type(module) is nn.Linear]
    for linear in linears:
        linear.forward = forward.__get__(linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def difference(model: Any, requests: list[GenerationRequest], completions: list[Completion]) -> float:
    """Mean difference to log-probs of the definition with the model's present weights."""
    with rounded_linears(model):
        expected = [naive_log_probs(model, r, c) for r, c in zip(requests, completions)]
    got = torch.cat([torch.tensor(c.log_probs) for c in completions])
    return float((got - torch.cat(expected)).abs().mean())


def scale_weights(model: Any) -> None:
    """Change every weight, as an optimizer step does: in place."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape).to(parameter.device))


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_or_skip(request.param)


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "gemma2", "olmo2"])
def test_log_probs_are_those_of_rounded_products_and_follow_the_weights(kind: str, device: torch.device) -> None:
    model, requests = tiny_model(kind, device), mixed_requests()
    engine = embedded(model, quantization="fp8")
    before = engine.generate(requests)
    gaps = [(torch.tensor(c.log_probs) - naive_log_probs(model, r, c)).abs().mean() for r, c in zip(requests, before)]
    # a number between two of the type may be rounded to either, as the sums before it are ordered
    close = float(sum(gaps)) / len(gaps) / 10
    assert close > 1e-3  # it does compute in 8 bits
    assert difference(model, requests, before) < close
    assert_same(engine.generate(requests), before)
    scale_weights(model)
    assert difference(model, requests, before) > 10 * close  # what a stale copy would give
    assert difference(model, requests, engine.generate(requests)) < close
    engine.sleep()
    assert difference(model, requests, engine.generate(requests)) < close


def test_a_stale_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny_model(hidden_size=64), mixed_requests()
    engine = embedded(model, quantization="fp8", free_cache_engine=False)
    engine.generate(requests)
    monkeypatch.setattr(Fp8Weights, "_refresh", lambda self: None)
    scale_weights(model)
    assert difference(model, requests, engine.generate(requests)) > 0.06


def copies_of(engine: EmbeddedEngine) -> Fp8Weights:
    assert engine.runner is not None and engine.runner.fp8 is not None
    return engine.runner.fp8


def test_copies_stay_in_place_until_the_engine_sleeps_and_serve_the_rollout_alone() -> None:
    model, requests = tiny_model(), mixed_requests()
    completion = embedded(model).generate(requests[:1])[0]
    engine = embedded(model, quantization="fp8")
    engine.generate(requests)
    copies = copies_of(engine)
    addresses = copies.addresses()
    assert len(addresses) == 4 * 2
    weights = [m.weight for m in decoder_of(model).layers.modules() if type(m) is nn.Linear]
    assert copies.num_bytes == sum(weight.numel() + 4 * len(weight) for weight in weights)
    engine.generate(requests)
    assert copies.addresses() == addresses
    assert_same(embedded(model).generate(requests[:1]), [completion])  # outside a rollout the weights are the trainer's
    engine.sleep()
    assert copies.addresses() == ()


def test_adapters_keep_their_precision_on_a_base_in_8_bits() -> None:
    model, requests = tiny_model(hidden_size=64), mixed_requests()
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], init_lora_weights=False)
    inject_adapter_in_model(lora, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.1)

    @contextmanager
    def base_alone() -> Iterator[None]:
        with rounded_linears(model):
            for name, module in model.named_modules():
                if "lora_" in name and type(module) is nn.Linear:
                    del module.forward
                    module.forward = lambda x, module=module: x @ module.weight.t()  # type: ignore[method-assign]
            yield

    completions = embedded(model, quantization="fp8").generate(requests)
    with base_alone():
        expected = [naive_log_probs(model, r, c) for r, c in zip(requests, completions)]
    got = torch.cat([torch.tensor(c.log_probs) for c in completions])
    assert (got - torch.cat(expected)).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mixtral", "cannot serve MixtralForCausalLM: it has experts, or an MLP without a gate"),
        (
            "phi",
            r"cannot serve PhiForCausalLM: its layers \(PhiDecoderLayer\) are not computed by lockstep's decoder layer",
        ),
    ],
)
def test_models_that_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.quantization=fp8 {reason}.*; set null"):
        embedded(tiny_model(kind), quantization="fp8")


def test_a_base_in_4_bits_is_refused() -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny_model(hidden_size=64, intermediate_size=64)
    use_4bit_linears(model, torch.float32)
    with pytest.raises(ValueError, match="its base is in 4 bits already; set null"):
        embedded(model, quantization="fp8")


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.bfloat16, (9, 0), ""),
        (torch.float16, (9, 0), "the model is in float16, .* or actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"),
        (torch.float32, (9, 0), "the model is in float32"),
        (torch.bfloat16, (8, 0), "this GPU has no products in 8 bits"),
    ],
)
def test_a_quantised_rollout_that_is_slower_warns(
    dtype: torch.dtype, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(fp8, "_capability", lambda index: capability)
    weight: Any = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype)
    _warn_if_slow(weight)
    if reason:
        assert re.search(rf"rollout\.quantization=fp8 makes this rollout slower: {reason}", caplog.text)
    else:
        assert not caplog.text


@pytest.mark.gpu
def test_a_quantised_rollout_in_float16_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = embedded(tiny_model(device=device_or_skip("cuda")).half(), quantization="fp8")
    for _ in range(2):
        engine.generate(mixed_requests())
        engine.sleep()
    assert caplog.text.count("makes this rollout slower: the model is in float16") == 1


@pytest.mark.gpu
def test_graphs_see_the_copies_of_new_weights() -> None:
    """bfloat16, sizes that the tensor cores take: graphs are captured once, and compute as launches op by op.

    The bound is wide because a bfloat16 rounding moves a number to the next one of 8 bits: 0.26 on a CPU, 5 with old weights.
    """
    model = tiny_model(device=device_or_skip("cuda"), hidden_size=128, intermediate_size=256).bfloat16()
    requests = mixed_requests(ignore_eos=True)
    graphs = embedded(model, quantization="fp8")
    eager = embedded(model, quantization="fp8", enforce_eager=True)
    assert graphs.runner is not None
    for _ in range(3):
        got, expected = graphs.generate(requests), eager.generate(requests)
        assert_same(got, expected)
        assert difference(model, requests, got) < 0.35
        moves = graphs.runner.num_moves
        graphs.sleep()
        scale_weights(model)
    graphs.generate(requests)
    assert graphs.runner.num_moves == moves  # not captured again
