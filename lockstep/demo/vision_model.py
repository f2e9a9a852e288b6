"""The demo's vision-language model: Qwen2.5-VL with random weights, one token per kind of shape and per cell of a picture."""

from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from lockstep.demo.model import word_tokenizer
from lockstep.demo.shapes import CELL, COLORS, EMPTY, FORMS, NUM_CELLS
from lockstep.models.processor import images_only

IMAGE, VIDEO, VISION_START, VISION_END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
KINDS = tuple(f" {color} {form}" for color in COLORS for form in FORMS)
WORDS = ("How many", *KINDS, "s?", f" {EMPTY}", *(f": {number}" for number in range(NUM_CELLS**2 + 1)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + VISION_START + IMAGE + VISION_END + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """`How many red squares?` is three tokens, ` red square` the same one as in an answer: they learn faster than words would."""
    return word_tokenizer(WORDS, [IMAGE, VIDEO, VISION_START, VISION_END], CHAT_TEMPLATE)


def make_vision_model_folder(folder: Path, seed: int) -> int:
    """Write config, random weights, tokenizer and processor to `folder`; return the number of parameters."""
    tokenizer = make_tokenizer()
    ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": CELL,
        "spatial_merge_size": 1,
        "temporal_patch_size": 1,
        "window_size": NUM_CELLS * CELL,
        "fullatt_block_indexes": [0],
        "out_hidden_size": text["hidden_size"],
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    pixels = Qwen2VLImageProcessorPil(
        patch_size=CELL,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": CELL**2, "longest_edge": (NUM_CELLS * CELL) ** 2},
        image_mean=[1.0] * 3,  # white is 0
        image_std=[0.5] * 3,
    )
    processor = images_only(Qwen2_5_VLProcessor)(pixels, tokenizer, None, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(folder)
    return model.num_parameters()
