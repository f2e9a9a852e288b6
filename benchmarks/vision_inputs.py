"""Inputs of the benchmarks' random vision models: the processor of Qwen2.5-VL, and pictures of noise."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

from lockstep.models.processor import images_only

VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Key of the model's config -> token."""

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""The prompt's images and text, and nothing else."""

PIXELS_PER_TOKEN = 28**2


def save_processor(folder: Path, tokenizer: Any, size: int) -> None:
    """For pictures of `size` x `size` pixels at most. With torchvision it reads videos too, as vLLM expects."""
    settings = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": size**2},
    }
    if is_torchvision_available():
        from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        parts = Qwen2VLImageProcessor(**settings), tokenizer, Qwen2VLVideoProcessor()
        processor = Qwen2_5_VLProcessor(*parts, chat_template=TEMPLATE)
    else:
        parts = Qwen2VLImageProcessorPil(**settings), tokenizer, None
        processor = images_only(Qwen2_5_VLProcessor)(*parts, chat_template=TEMPLATE)
    processor.save_pretrained(folder)


def reads_images(model: Path) -> bool:
    return any((model / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))


def make_pictures(folder: Path, count: int, size: int) -> list[str]:
    """Files of `count` different pictures of `size` x `size` pixels."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    files = [folder / f"{i}.png" for i in range(count)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file, compress_level=1)
    return [str(file) for file in files]


def num_image_tokens(size: int) -> int:
    """Placeholders of a picture, and the tokens around them."""
    return (size // 28) ** 2 + 2
