"""Tiny models, requests and naive references for the rollout tests."""

import random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GenerationConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.experts import EXPERTS_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.model_check import transformers_forward

VOCAB = 61
EOS = 2
PAD = 0
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,  # large, so that greedy decoding does not repeat a token
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=PAD,
)


CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "granite": lambda **sizes: GraniteConfig(**sizes, logits_scaling=4.0),
    "smollm": lambda **sizes: LlamaConfig(**sizes, tie_word_embeddings=True, head_dim=16),
    "gemma": lambda **sizes: GemmaConfig(**sizes, head_dim=16),
    "gemma2": lambda **sizes: Gemma2Config(
        **sizes, head_dim=16, query_pre_attn_scalar=16, sliding_window=7, attn_logit_softcapping=2.0
    ),
    "gpt_oss": lambda **sizes: GptOssConfig(
        **sizes, head_dim=16, sliding_window=7, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi": lambda **sizes: PhiConfig(**sizes, partial_rotary_factor=0.5),
    "phi3": Phi3Config,
    "olmo2": Olmo2Config,
    "mixtral": lambda **sizes: MixtralConfig(**sizes, num_local_experts=4),
    "qwen3_moe": lambda **sizes: Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16
    ),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def device_or_skip(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(name)


def tiny_model(kind: str = "qwen2", device: torch.device | str = "cpu", **changes: Any) -> Any:
    """Created on the CPU, so that the weights are the same on every device."""
    config_class = CONFIGS[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config_class(**SIZES | changes), attn_implementation=ATTENTION_NAME, experts_implementation=EXPERTS_NAME
    )
    install_decoder_layers(model)
    return model.to(device)


def rollout_config(**changes: Any) -> RolloutConfig:
    settings: dict[str, Any] = dict(prompt_length=96, response_length=64, seed=0, kv_block_size=4)
    return RolloutConfig(**settings | changes)


def embedded(model: Any, num_blocks: int | None = None, **changes: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(rollout_config(**changes), [EOS], PAD, num_blocks=num_blocks)
    engine.bind(model)
    return engine


def mixed_requests(seed: int = 0, **sampling: Any) -> list[GenerationRequest]:
    """Prompts of several lengths, some of them equal, and responses of several lengths."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (5, 17, 1, 33, 8, 26)]
    prompts += [prompts[1], prompts[4], prompts[1], prompts[1]]
    settings: dict[str, Any] = dict(temperature=1.0) | sampling
    return [
        GenerationRequest(prompt, SamplingParams(max_tokens=rng.randint(3, 24), **settings), seed=100 + i)
        for i, prompt in enumerate(prompts)
    ]


def check_samples_of_one_prompt(model: Any, num_few_slots: int) -> None:
    """Eight samples of a prompt of 23 tokens compute it once, and are those of separate requests.

    num_few_slots: prefill tokens if three of them run at once.
    """
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [GenerationRequest(list(range(3, 26)), params, seed=i) for i in range(8)]

    def generate(num_prefill_tokens: int, **changes: Any) -> list[Completion]:
        engine = embedded(model, **changes)
        engine.generate(requests[:1])  # with the model check
        assert engine.step_loop is not None
        before = engine.step_loop.num_prefill_tokens
        completions = engine.generate(requests)
        assert engine.step_loop.num_prefill_tokens - before == num_prefill_tokens
        return completions

    shared = generate(23)
    alone = generate(8 * 23, enable_prefix_caching=False)
    assert_same(shared, alone)
    assert_same(generate(num_few_slots, max_num_seqs=3), alone)
    assert len({tuple(c.token_ids) for c in shared}) > 1


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    """Equal tokens and stop reasons; log-probs equal up to rounding."""
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert [c.stop_reason for c in got] == [c.stop_reason for c in expected]
    for g, e in zip(got, expected):
        torch.testing.assert_close(torch.tensor(g.log_probs), torch.tensor(e.log_probs), atol=1e-4, rtol=0)


@torch.no_grad()
def naive_log_probs(model: Any, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """Log-probs of the completion, by one forward of transformers over the whole sequence."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids], device=model.device)
    with transformers_forward(model):
        logits = model(ids, use_cache=False).logits[0]
    temperature = request.sampling.temperature or 1.0
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    first = len(request.prompt_ids)
    return log_probs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].cpu()


@torch.no_grad()
def transformers_greedy(model: Any, request: GenerationRequest) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=request.sampling.max_tokens, pad_token_id=PAD)
    stop = None if request.sampling.ignore_eos else EOS
    prompt = torch.tensor([request.prompt_ids], device=model.device)
    model.generation_config = GenerationConfig()
    with transformers_forward(model):
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, eos_token_id=stop
        )
    return out[0, prompt.shape[1] :].tolist()
