"""Tiny random vision-language models: a folder with config, weights, tokenizer and processor, made offline.

torchvision is not needed: without it, PIL prepares images, and the folder has no processor of videos (`needs_torchvision`).
SmolVLM's processor needs num2words (for videos only), hence Idefics3 here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from lockstep.models.processor import images_only
from lockstep.utils.vision import WATCHING
from tests.tiny import SIZES, tiny_tokenizer

needs_torchvision = pytest.mark.skipif(not is_torchvision_available(), reason="videos are prepared with torchvision")
PATCH = 8
"""Pixels per side of a patch."""
MERGED = 16
"""Pixels per side of what one image token stands for."""


@dataclass(frozen=True)
class Family:
    """
    tokens:  special tokens in addition to those of tiny_tokenizer; the placeholder of an image feature is tokens["image_token"].
    image:   how the chat template writes an image.
    config:  (size of the text model, token ids by name) to the arguments of the config.
    process: the image processor's settings, and those of the processor.
    """

    tokens: dict[str, str]
    image: str
    config: Callable[[dict[str, Any], dict[str, int]], dict[str, Any]]
    image_processor: str
    process: dict[str, Any]
    processor: dict[str, Any]


QWEN_TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
QWEN_PIXELS = {"patch_size": PATCH, "size": {"shortest_edge": MERGED**2, "longest_edge": 16 * MERGED**2}}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
"""For a head size of 8."""


def _mrope(text: dict[str, Any]) -> dict[str, Any]:
    """For the head size of a text model."""
    head_dim = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    return MROPE | {"mrope_section": [length * head_dim // 8 for length in MROPE["mrope_section"]]}


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {f"{name.removesuffix('_token')}_token_id": ids[name] for name in QWEN_TOKENS}


def _qwen2_vl(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": text["hidden_size"], "num_heads": 4, "mlp_ratio": 2}
    return {
        "text_config": text | {"rope_parameters": _mrope(text)},
        "vision_config": vision | {"patch_size": PATCH},
        **_qwen_ids(ids),
    }


def _qwen2_5_vl(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": PATCH},
        **{"out_hidden_size": text["hidden_size"], "window_size": 2 * MERGED, "fullatt_block_indexes": [1]},
    }
    return {"text_config": text | {"rope_parameters": _mrope(text)}, "vision_config": vision, **_qwen_ids(ids)}


def _qwen3_vl(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": PATCH},
        **{"out_hidden_size": text["hidden_size"], "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    }
    text = {"head_dim": 8} | text
    return {
        "text_config": text | {"rope_parameters": _mrope(text) | {"mrope_interleaved": True}},
        "vision_config": vision,
        **_qwen_ids(ids),
    }


def _qwen3_vl_moe(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    return _qwen3_vl(experts | text, ids)


def _qwen3_5(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    linear = {
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
    }
    rope = MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
    config = _qwen3_vl(linear | text, ids)
    config["text_config"]["rope_parameters"] = rope
    del config["vision_config"]["deepstack_visual_indexes"]
    return config


def _clip_tower() -> dict[str, Any]:
    return {
        **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "image_size": 32, "patch_size": PATCH, "projection_dim": 32},
    }


def _siglip_tower() -> dict[str, Any]:
    return {
        **{"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "image_size": 32, "patch_size": PATCH, "vision_use_head": False},
    }


def _llava(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama"} | text,
        "vision_config": _clip_tower(),
        "image_token_index": ids["image_token"],
        "image_seq_length": 16,
    }


def _llava_next(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    return _llava(text, ids) | {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}


def _idefics3(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    vision = _siglip_tower()
    del vision["model_type"], vision["vision_use_head"]
    return {
        "text_config": {"model_type": "llama"} | text,
        "vision_config": vision,
        "image_token_id": ids["image_token"],
        "scale_factor": 2,
    }


def _internvl(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"image_size": [32, 32], "patch_size": [PATCH, PATCH]},
    }
    return {
        "text_config": {"model_type": "qwen2"} | text,
        "vision_config": vision,
        "image_token_id": ids["context_image_token"],
        "image_seq_length": 4,
    }


def _gemma3(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    window = {"head_dim": 8, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    return {
        "text_config": window | text,
        "vision_config": _siglip_tower(),
        "mm_tokens_per_image": 4,
        "boi_token_index": ids["boi_token"],
        "eoi_token_index": ids["eoi_token"],
        "image_token_index": ids["image_token"],
    }


def _paligemma(text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "gemma", "head_dim": 8} | text,
        "vision_config": _siglip_tower(),
        "image_token_index": ids["image_token"],
        "projection_dim": 32,
    }


LLAVA = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
SQUARE = {"height": 32, "width": 32}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
FAMILIES = {
    **{
        name: Family(QWEN_TOKENS, QWEN_IMAGE, config, "Qwen2VLImageProcessorPil", QWEN_PIXELS, {})
        for name, config in {
            "qwen2_vl": _qwen2_vl,
            "qwen2_5_vl": _qwen2_5_vl,
            "qwen3_vl": _qwen3_vl,
            "qwen3_vl_moe": _qwen3_vl_moe,
            "qwen3_5": _qwen3_5,
        }.items()
    },
    "llava": Family(
        {"image_token": "<image>"},
        "<image>",
        _llava,
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
        LLAVA,
    ),
    "llava_next": Family(
        {"image_token": "<image>"},
        "<image>",
        _llava_next,
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 32},
            "crop_size": SQUARE,
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        },
        LLAVA,
    ),
    "idefics3": Family(
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
            **{f"row_{i}_col_{j}": f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)},
        },
        "<image>",
        _idefics3,
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        {"image_seq_len": 4},
    ),
    "internvl": Family(
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
        _internvl,
        "GotOcr2ImageProcessorPil",
        {"size": SQUARE, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
    ),
    "gemma3": Family(
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        _gemma3,
        "Gemma3ImageProcessorPil",
        {"size": SQUARE},
        {"image_seq_length": 4},
    ),
    "paligemma": Family(
        {"image_token": "<image>"},
        "<image>",
        _paligemma,
        "SiglipImageProcessorPil",
        {"size": SQUARE, "image_seq_length": 16},
        {},
    ),
}


def chat_template(image: str) -> str:
    """Renders contents that are text, and contents that are parts (text, image and Qwen's videos)."""
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}"
        + image
        + "{% elif part['type'] == 'video' %}"
        + QWEN_VIDEO
        + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tiny_vision_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    """tests.tiny's tokenizer with the family's special tokens."""
    tokenizer = tiny_tokenizer()
    family = FAMILIES[model_type]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *family.tokens.values()]})
    if model_type == "paligemma":
        tokenizer.bos_token = "<|im_start|>"
    named = {name: token for name, token in family.tokens.items() if name.endswith("_token")}
    tokenizer._set_model_specific_special_tokens(named)
    tokenizer.chat_template = chat_template(family.image)
    return tokenizer


def tiny_vision_config(model_type: str = "qwen2_5_vl", **sizes: Any) -> Any:
    """The config. sizes: changes of the text model's config."""
    tokenizer = tiny_vision_tokenizer(model_type)
    family = FAMILIES[model_type]
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in family.tokens.items()}
    text = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "tie_word_embeddings": False}
    text |= {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0} | sizes
    settings = family.config(text, ids)
    return AutoConfig.for_model(model_type, **settings, tie_word_embeddings=text["tie_word_embeddings"])


def save_tiny_vision_model(folder: Path, model_type: str = "qwen2_5_vl", seed: int = 0, **sizes: Any) -> Path:
    """Save a model folder, with weights large enough for non-uniform predictions. sizes: of the text model's config."""
    import transformers

    family = FAMILIES[model_type]
    tokenizer = tiny_vision_tokenizer(model_type)
    config = tiny_vision_config(model_type, **sizes)
    image_processor = getattr(transformers, family.image_processor)(**family.process)
    processor_class = PROCESSOR_MAPPING[type(config)]
    parts: dict[str, Any] = {"image_processor": image_processor, "tokenizer": tokenizer}
    if "video_processor" in processor_class.get_attributes():
        parts["video_processor"] = None
        if is_torchvision_available():
            cls = getattr(transformers, VIDEO_PROCESSOR_MAPPING_NAMES[model_type]["torchvision"])
            parts["video_processor"] = cls(**family.process if model_type in WATCHING else {})
        else:
            processor_class = images_only(processor_class)
    processor = processor_class(**parts, chat_template=tokenizer.chat_template, **family.processor)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                if not parameter.any():  # Gemma 3's projector
                    parameter.normal_(std=0.02)
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)


def tiny_image(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_message(text: str, num_images: int = 1) -> list[dict[str, Any]]:
    """A user's message: images, then text, as parts."""
    return [{"role": "user", "content": [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]}]


def image_inputs(processor: Any, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image]) -> dict[str, Any]:
    """What the processor returns for one conversation: input_ids and the images' tensors."""
    text = processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return dict(processor(text=[text], images=list(images) or None, return_tensors="pt"))
