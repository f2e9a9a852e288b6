"""A tiny model of every causal language model type of the installed transformers, and how Lockstep serves it.

    tiny_config ─► tiny_model ─► a model folder ─► support: a row of docs/models.md

`python -m tests.models.architectures` writes the last table of docs/models.md; `test_architectures.py` compares the numbers of
every type with transformers' own forward, and its row with that file.
"""

import dataclasses
import inspect
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.rollout import GenerationRequest, RolloutEngine, SamplingParams
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.hf import HFEngine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.models.known_models import computes_packed, why_own_forward
from lockstep.models.loading import load_causal_lm
from lockstep.models.stream_layer import StreamLayer
from lockstep.models.token_models import PolicyModel

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB = 96
ROLLOUTS: tuple[tuple[str, Any, int | None], ...] = (
    ("embedded", EmbeddedEngine, None),
    ("hf", HFEngine, None),
    ("hf, max_num_seqs=1", HFEngine, 1),
)
"""Engines in the order of preference: name, class, max_num_seqs if it must be that."""
MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

SKIPPED: dict[str, str] = {
    "blt": "patches of bytes, cut by a second model",
    "gemma3n": "its vision tower needs timm; `gemma3n_text` is the language model",
    "gemma4_assistant": "a drafter: reads the hidden states of another model",
    "gemma4_unified_assistant": "a drafter: reads the hidden states of another model",
    "musicgen": "predicts audio codebooks",
    "musicgen_melody": "predicts audio codebooks",
    "reformer": "draws the hashes of its attention at random, and trains in training mode only",
}
"""Types that are no decoder-only language model over tokens, or that cannot be built here."""

EXAMPLES = {
    "bitnet": "microsoft/bitnet-b1.58-2B-4T",
    "bloom": "bigscience/bloom-560m",
    "codegen": "Salesforce/codegen-350M-mono",
    "cohere": "CohereForAI/c4ai-command-r-v01",
    "cohere2": "CohereForAI/c4ai-command-r7b-12-2024",
    "deepseek_v2": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "dots1": "rednote-hilab/dots.llm1.base",
    "exaone4": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "falcon": "tiiuae/falcon-7b",
    "falcon_mamba": "tiiuae/falcon-mamba-7b",
    "gemma": "google/gemma-2b",
    "gemma2": "google/gemma-2-2b",
    "gemma3": "google/gemma-3-4b-it",
    "gemma3_text": "google/gemma-3-1b-it",
    "glm4_moe": "zai-org/GLM-4.5",
    "gpt2": "openai-community/gpt2",
    "gpt_neo": "EleutherAI/gpt-neo-125m",
    "gpt_neox": "EleutherAI/pythia-70m",
    "gpt_oss": "openai/gpt-oss-20b",
    "gptj": "EleutherAI/gpt-j-6b",
    "granite": "ibm-granite/granite-3.1-2b-instruct",
    "jamba": "ai21labs/Jamba-v0.1",
    "lfm2": "LiquidAI/LFM2-1.2B",
    "llama": "meta-llama/Llama-3.2-1B",
    "mamba": "state-spaces/mamba-130m-hf",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "mpt": "mosaicml/mpt-7b",
    "olmo": "allenai/OLMo-1B-hf",
    "olmo2": "allenai/OLMo-2-1124-7B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "opt": "facebook/opt-125m",
    "phi": "microsoft/phi-2",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "phimoe": "microsoft/Phi-3.5-MoE-instruct",
    "qwen2": "Qwen/Qwen2.5-0.5B",
    "qwen2_moe": "Qwen/Qwen1.5-MoE-A2.7B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "recurrent_gemma": "google/recurrentgemma-2b",
    "seed_oss": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "stablelm": "stabilityai/stablelm-3b-4e1t",
    "starcoder2": "bigcode/starcoder2-3b",
    "xglm": "facebook/xglm-564M",
}

SMALL: dict[str, Any] = {
    # tokens and positions
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "context_length": 128,
    "max_seq_len": 128,
    "max_target_positions": 128,
    "model_max_length": 128,
    # width
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "prefix_dense_intermediate_size": 48,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "n_inner": 48,
    "d_inner": 48,
    "dff": 48,
    "dim_ff": 48,
    "hidden_size_per_layer_input": 8,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "dim_head": 16,
    "d_head": 8,
    "kv_channels": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 16,
    # layers
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,  # transformers takes the number of decoder layers from it when it decodes
    "num_blocks": 2,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [0],
    "num_dense_layers": 1,
    "max_window_layers": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1,
    # windows
    "sliding_window": 6,
    "sliding_window_size": 6,
    "use_sliding_window": True,
    "attention_chunk_size": 6,
    "window_size": 6,
    "attention_window_size": 6,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    # states of recurrent layers
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "lru_width": 32,
    # indexers of sparse attention
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    # weights as large as in trained models, so that a wrong score changes the outcome
    "initializer_range": 0.25,
    "init_std": 0.25,
    "embed_init_std": 0.25,
    # neither 1 nor off, so that a multiplier or a cap that is left out shows
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    # towers of multimodal models
    "image_size": 16,
    "patch_size": 4,
    "crop_size": 16,
    "depth": 1,
    "mlp_dim": 48,
    "output_channels": 16,
    "nemo_conv_channels": 8,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    # a decoder of a family of encoders
    "is_decoder": True,
}
"""By field name; taken if the config has the field."""

CAPS = {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 4.0,
    "logits_soft_cap": 4.0,
    "output_logit_soft_cap": 4.0,
}
"""Taken if the default config has a cap."""

NOISE = ("dropout", "pdrop", "dropout_prob", "layerdrop", "jitter_noise")
"""Endings of fields that are noise in training: on in every tiny config, so that the engine has to turn them off."""

LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 500000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "hc_sinkhorn_iters": 2,
        "o_lora_rank": 16,
        "o_groups": 2,
    },
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "final_logit_softcapping": 4.0,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": 8},
    "hrm_text": {"H_cycles": 1, "L_cycles": 2},
    "inkling_text": {"logits_mup_width_multiplier": 2.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "marian": {"scale_embedding": True},
    "minicpm3": {"dim_model_base": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 1,
    },
    "modernbert-decoder": {"local_attention": 12},
    # transformers ignores this floor when it decodes
    "nemotron_h": {"time_step_min": 1e-6, "n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "rembert": {"input_embedding_size": 24, "output_embedding_size": 40},
    "roc_bert": {
        "enable_pronunciation": False,
        "enable_shape": False,
        "pronunciation_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 8,
        "shape_embed_dim": 8,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlstm": {
        "hidden_size": 128,
        "embedding_dim": 128,
    },  # a multiple of 64: transformers rounds up, but not in its cache
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"time_step_min": 1e-6},  # as for nemotron_h
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"], "num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What a type needs beside `SMALL`."""


NOT_CAUSAL = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Types that are causal with `is_decoder` alone."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen3, yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "qwen2, relu": ("qwen2", {"hidden_act": "relu"}),
    "cohere, qk norm": ("cohere", {"use_qk_norm": True}),
    "gemma4, experts": ("gemma4_text", {"enable_moe_block": True}),
    "gpt_neox, serial": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "llama4, short chunks and scales": (
        "llama4_text",
        {"num_hidden_layers": 4, "attention_chunk_size": 3, "floor_scale": 2, "attn_scale": 0.5}
        | {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
    ),
    "glm_moe_dsa, a shared index": (
        "glm_moe_dsa",
        {
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        }
        | {"layer_types": ["indexed_attention"] * 3},
    ),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "opt, post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
}
"""Settings that real models of a type have and its default config has not."""


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Every kind of layer that the default config has, once each, in a model of less than a million parameters."""
    return shrink(CONFIG_MAPPING[model_type], **changes)


def shrink(cls: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    names = {field.name for field in dataclasses.fields(cls)}
    default = cls()
    settings = {name: value for name, value in SMALL.items() if name in names}
    settings |= {name: value for name, value in CAPS.items() if getattr(default, name, None) is not None}
    if "kv_lora_rank" in names:  # latent attention: one latent for all heads, and the head's size is a sum
        settings["num_key_value_heads"] = 4
        settings.pop("head_dim", None)
    settings |= {name: 0.1 for name in names if name.endswith(NOISE) and isinstance(getattr(default, name), float)}
    kinds = {name: unique(getattr(default, name, None) or []) for name in LAYER_LISTS if name in names}
    if kinds.get("layer_types") == ["full_attention"] and "sliding_window" in names:
        kinds["layer_types"] = ["sliding_attention", "full_attention"]
    num_layers = max([2, *map(len, kinds.values())])
    for name, of_name in kinds.items():
        if of_name:
            settings[name] = (of_name + of_name[-1:] * num_layers)[:num_layers]
    for name in ("num_hidden_layers", "n_layer"):
        if name in names:
            settings[name] = num_layers
    for name in cls.sub_configs:
        part = getattr(default, name)
        if part is not None:
            settings[name] = shrink(type(part))
    return cls(**{**settings, **OVERRIDES.get(cls.model_type, {}), **changes})


def unique(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))


def tiny_model(model_type: str, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """In float32 and eval mode, with eager attention; no norm is 1, no bias is 0, no matrix is near 0."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **changes), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            std = float(parameter.std(correction=0))
            if parameter.ndim < 2 or std == 0:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif std < 0.2:
                parameter.mul_(0.25 / std)
        if hasattr(model.config.get_text_config(), "index_topk"):
            embedding: Any = model.get_input_embeddings()
            embedding.weight[0] += 0.2  # a pad embedding of 0 scores 0 everywhere: no definite top-k
    return model.eval()


@contextmanager
def torch_forms(model: PreTrainedModel) -> Iterator[None]:
    """Let transformers call its torch functions, not the kernels of installed packages: those serve CUDA alone, and TF32 rounds
    their float32."""
    module = sys.modules[type(model).__module__]
    wrapped = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and hasattr(f, "__wrapped__")}
    with (
        patch.multiple(module, **{name: inspect.unwrap(f) for name, f in wrapped.items()}) if wrapped else nullcontext()
    ):
        yield


def save_tiny_model(model_type: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Save the tiny model as a folder whose config.json is of that type, also if only its text part is a causal LM."""
    model = tiny_model(model_type, **changes)
    model.save_pretrained(folder)
    tiny_config(model_type, **changes).save_pretrained(folder)
    return model


@dataclass
class Support:
    """How a model folder is served.

    training:  "ours": our decoder layer; "transformers": transformers' layers under our attention function; "own": its own
               forward, on padded rows; "refused".
    rollout:   the first of embedded, hf, and hf without padding that serves it; "none" if all refuse.
    why_own:   why it computes by its own forward, if it does.
    refusals:  messages by path ("training", "checkpointing", "embedded", "hf", ...).
    engines:   for training: padded, packed with checkpointing, and packed without it for our own layer.
    """

    training: str = "refused"
    rollout: str = "none"
    why_own: str | None = None
    refusals: dict[str, str] = dataclasses.field(default_factory=dict)
    engines: dict[str, FsdpEngine] = dataclasses.field(default_factory=dict)
    rollout_engine: RolloutEngine | None = None

    @property
    def note(self) -> str:
        reasons = {path: reason_of(message) for path, message in self.refusals.items()}
        if self.why_own:
            reasons = {"packed": self.why_own} | {path: why for path, why in reasons.items() if path != "embedded"}
        return "; ".join(f"{path}: {why}" for path, why in reasons.items())


def support(folder: Path) -> Support:
    """Load the folder and build every engine on it; a ValueError is a refusal, any other error is a fault."""
    found = Support()
    try:
        model = load_causal_lm(HFModelConfig(path=str(folder)), "model", torch.float32, CPU)
        found.why_own = why_own_forward(model.config)
        found.training = training_path(model)
        if found.training != "own":
            found.engines["padded"] = train_engine(model, packed=False)
        with unchecked(bool(found.engines)):
            if found.training == "ours":
                found.engines["packed"] = train_engine(model, packed=True)
            try:
                found.engines["checkpointed"] = train_engine(model, packed=True, gradient_checkpointing=True)
            except ValueError as error:
                if "does not support gradient checkpointing" not in str(error):
                    raise
                found.refusals["checkpointing"] = str(error)
                found.engines["packed"] = train_engine(model, packed=True)
    except ValueError as error:
        return Support(refusals={"training": str(error)})
    config = RolloutConfig(prompt_length=16, response_length=16, kv_block_size=4, max_num_seqs=8)
    found.rollout, found.rollout_engine, refusals = first_engine(model, config)
    found.refusals |= refusals
    return found


def training_path(model: PreTrainedModel) -> str:
    """`Support.training` of a model that is not refused."""
    if any(isinstance(module, StreamLayer) for module in model.modules()):
        return "ours"
    return "transformers" if computes_packed(model) else "own"


def first_engine(model: PreTrainedModel, config: RolloutConfig) -> tuple[str, RolloutEngine | None, dict[str, str]]:
    """The first of `ROLLOUTS` that serves the model, by name, and the messages of those that refuse it."""
    refusals: dict[str, str] = {}
    for name, engine_class, max_num_seqs in ROLLOUTS:
        engine = engine_class(dataclasses.replace(config, max_num_seqs=max_num_seqs or config.max_num_seqs), [2], 0)
        try:
            engine.bind(model)
            engine.generate([GenerationRequest([3, 4], SamplingParams(max_tokens=1))])
        except ValueError as error:
            refusals[name] = str(error)
        else:
            return name, engine, refusals
    return "none", None, refusals


@contextmanager
def unchecked(is_checked: bool) -> Iterator[None]:
    """Engines of a model that another one has checked, in both layouts."""
    if not is_checked:
        yield
        return
    with patch.object(FsdpEngine, "_check_model"):
        yield


def train_engine(model: PreTrainedModel, **how: Any) -> FsdpEngine:
    return FsdpEngine(
        PolicyModel(model), FSDPEngineConfig(), FSDPOptimizerConfig(), device=CPU, compute_dtype=torch.float32, **how
    )


def reason_of(message: str) -> str:
    """The part of a refusal that does not depend on numbers or advice."""
    if "differently from transformers" in message:
        return "differs from transformers' forward"
    if "is not a causal language model" in message:
        return "its log-probs depend on later tokens"
    reason = re.sub(r"^.*? cannot (?:serve|train) \w+: ", "", message)
    return re.split(r"[;.](?:\s|$)", reason)[0]


def table_row(model_type: str, found: Support | None) -> str:
    """found: None for a type in `SKIPPED`."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if found is None:
        cells = ["not checked", "", SKIPPED[model_type]]
    else:
        cells = [found.training, "" if found.training == "refused" else found.rollout, found.note]
    cells = [model_type, model_class, EXAMPLES.get(model_type, ""), *cells]
    return "| " + " | ".join(cells) + " |"


TITLE = "## All types"
HEADER = (
    TITLE
    + """

Every causal language model type of transformers {version}, tried with random weights at a tiny size on a CPU in float32:
log-probs and gradients of packed, padded and checkpointed training and greedy decoding equal those of transformers' own forward
(eager attention, one row at a time), or the type is refused. Written by `python -m tests.models.architectures`, checked by
`tests/models/test_architectures.py`.

| type | class | example | training | rollout | note |
|---|---|---|---|---|---|
"""
)


def header() -> str:
    return HEADER.format(version=transformers.__version__)


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for model_type in sorted(MODEL_TYPES):
        found = None
        if model_type not in SKIPPED:
            with tempfile.TemporaryDirectory() as folder:
                save_tiny_model(model_type, Path(folder))
                found = support(Path(folder))
        rows.append(table_row(model_type, found))
        print(rows[-1], flush=True)
    before, _, _ = DOCS.read_text().partition(TITLE)
    DOCS.write_text(before + header() + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
