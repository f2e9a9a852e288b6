"""The hf engine equals the embedded engine, and serves what that one refuses."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GPTJConfig, MambaConfig, Qwen3NextConfig

from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.hf import HFEngine
from tests.engines.rollout.rollout_cases import (
    EOS,
    PAD,
    SIZES,
    VOCAB,
    assert_same,
    embedded,
    mixed_requests,
    rollout_config,
    tiny_model,
)


def hf(model: Any, **changes: Any) -> HFEngine:
    engine = HFEngine(rollout_config(**changes), [EOS], PAD)
    engine.bind(model)
    return engine


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 7, "top_p": 0.9}])
def test_equals_embedded(kind: str, sampling: dict[str, Any]) -> None:
    model = tiny_model(kind)
    requests = mixed_requests(**sampling)
    expected = embedded(model).generate(requests)
    assert_same(hf(model).generate(requests), expected)
    assert_same(hf(model, max_num_seqs=3).generate(requests), expected)


def test_rows_may_differ_in_stops_and_parameters() -> None:
    model = tiny_model()
    requests = [
        GenerationRequest([5, 6], SamplingParams(max_tokens=20, ignore_eos=True), 1),
        GenerationRequest([5, 6, 9], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(7, 8, 9, 10)), 2),
        GenerationRequest([5], SamplingParams(top_k=3, max_tokens=1), 3),
    ]
    assert_same(hf(model).generate(requests), embedded(model).generate(requests))


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model().train()
    model.generation_config = defaults = GenerationConfig(max_new_tokens=3, eos_token_id=5, repetition_penalty=2.0)
    requests = mixed_requests(temperature=0.0)
    completions = hf(model).generate(requests)
    assert model.training and model.config._attn_implementation == "lockstep"
    assert model.generation_config is defaults
    assert_same(completions, embedded(model).generate(requests))


def mamba() -> Any:
    return MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)


def gpt_j() -> Any:
    return GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=128)


def qwen3_next() -> Any:
    small = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
    small |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    small |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return Qwen3NextConfig(**SIZES | small | {"num_hidden_layers": 4})  # three linear, one full attention


@pytest.mark.parametrize("make_config", [mamba, gpt_j, qwen3_next])
def test_serves_models_with_state_or_their_own_attention(make_config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config())
    requests = mixed_requests(ignore_eos=True)
    completions = hf(model).generate(requests)
    assert [len(c.token_ids) for c in completions] == [r.sampling.max_tokens for r in requests]
    assert_same(hf(model, max_num_seqs=1).generate(requests), completions)


def test_a_model_that_ignores_the_padding_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    forward = type(model).forward

    def unmasked(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", unmasked)
    requests = mixed_requests()
    with pytest.raises(ValueError, match=r"left-padded batch.*actor_rollout_ref.rollout.max_num_seqs=1"):
        hf(model).generate(requests)
    assert len(hf(model, max_num_seqs=1).generate(requests)) == len(requests)


def test_edges() -> None:
    model = tiny_model()
    engine = hf(model, max_model_len=10)
    engine.policy_version = 3
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="exceed max_model_len=10"):
        engine.generate([GenerationRequest([1] * 9, SamplingParams(max_tokens=2))])
    request = GenerationRequest([4, 5], SamplingParams(max_tokens=3))
    assert engine.generate([request])[0].policy_version == 3
    with pytest.raises(RuntimeError, match="call bind"):
        HFEngine(rollout_config(), [EOS], PAD).generate([request])
