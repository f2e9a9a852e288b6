"""Decoding by transformers' `generate` across the lengths at which a model changes: right, or refused with the length."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.hf import HFEngine
from lockstep.models import length_switches
from lockstep.models.length_switches import SMALL_LENGTH, miniature, switch_lengths
from lockstep.models.loading import load_causal_lm
from lockstep.models.model_check import reference_log_probs
from tests.models.architectures import save_tiny_model, tiny_config

CPU, SWITCH, LONGEST = torch.device("cpu"), 64, 120
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": SWITCH,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": SWITCH, "rope_parameters": LONGROPE, "sliding_window": None},
    "phimoe": {
        "original_max_position_embeddings": SWITCH,
        "rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
        "sliding_window": None,
    },
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "max_position_embeddings": SWITCH,
    },
    "gemma3_text": {"sliding_window": SWITCH},
    "llama4_text": {"attention_chunk_size": SWITCH},
    "moshi": {"sliding_window": SWITCH},
}


def loaded(model_type: str, folder: Path, max_length: int) -> PreTrainedModel:
    logging.disable(logging.WARNING)
    changes = {"max_position_embeddings": 256} | MODELS[model_type]
    save_tiny_model(model_type, folder, **changes)
    model = load_causal_lm(HFModelConfig(path=str(folder)), "model", torch.float32, CPU, max_length)
    logging.disable(logging.NOTSET)
    return model


def engine_of(model: PreTrainedModel, max_length: int) -> HFEngine:
    config = RolloutConfig(prompt_length=max_length - 64, response_length=64, kv_block_size=4, max_num_seqs=2)
    engine = HFEngine(config, [2], 0)
    engine.bind(model)
    return engine


@pytest.mark.parametrize("model_type", [name for name in MODELS if name != "moshi"])
def test_tokens_beyond_a_switch_have_the_log_probs_of_the_whole_row(model_type: str, tmp_path: Path) -> None:
    model = loaded(model_type, tmp_path, LONGEST)
    assert SWITCH in switch_lengths(model.config).values()
    prompts = [[5 + i % 60 for i in range(length)] for length in (SWITCH - 30, SWITCH - 8)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [GenerationRequest(prompt, sampling, seed) for seed, prompt in enumerate(prompts)]
    completions = engine_of(model, LONGEST).generate(requests)
    expected = reference_log_probs(model, [p + c.token_ids for p, c in zip(prompts, completions)])
    for completion, log_probs in zip(completions, expected):
        torch.testing.assert_close(torch.tensor(completion.log_probs), log_probs[-40:], atol=1e-4, rtol=0)


def test_a_model_that_decodes_wrongly_beyond_its_window_is_refused(tmp_path: Path) -> None:
    request = GenerationRequest([3, 4], SamplingParams(max_tokens=1))
    model = loaded("moshi", tmp_path, LONGEST)
    message = r"generate beyond 64 tokens computes MoshiForCausalLM differently .*\(sliding_window in its config\.json\): keep "
    with pytest.raises(ValueError, match=message + r"data\.max_prompt_length .* at 64 or less"):
        engine_of(model, LONGEST).generate([request])
    assert len(engine_of(model, SWITCH).generate([request])) == 1


def test_a_cache_that_is_dropped_at_the_switch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("phi3", tmp_path, LONGEST)
    monkeypatch.setattr("lockstep.engines.rollout.hf.rope_limit", lambda model: None)
    with pytest.raises(ValueError, match=r"generate beyond 64 tokens computes Phi3ForCausalLM differently"):
        engine_of(model, LONGEST).generate([GenerationRequest([3, 4], SamplingParams(max_tokens=1))])


def test_a_model_without_a_miniature_is_refused_beyond_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("gemma3_text", tmp_path, LONGEST)
    monkeypatch.setattr(length_switches, "_keep_layers", lambda text: setattr(text, "hidden_size", "none"))
    with pytest.raises(ValueError, match=r"Gemma3ForCausalLM cannot be checked as a small model .* at 64 or less"):
        engine_of(model, LONGEST).generate([GenerationRequest([3, 4], SamplingParams(max_tokens=1))])


def test_a_miniature_has_every_kind_of_layer_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = loaded("gemma3_text", tmp_path, LONGEST)
    model.config.layer_types = ["sliding_attention"] * 5 + ["full_attention"]
    model.config.num_hidden_layers = 6
    state = torch.random.get_rng_state()
    small = miniature(model, 40)
    assert small.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert small.config.sliding_window == SMALL_LENGTH and model.config.sliding_window == SWITCH
    assert torch.equal(state, torch.random.get_rng_state())


def test_models_without_switches_have_none() -> None:
    assert switch_lengths(tiny_config("llama")) == {} == switch_lengths(tiny_config("gpt2"))
