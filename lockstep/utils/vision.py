"""Vision models, told by their config.json: which read images, which are used for text alone, and which are refused."""

import json
from pathlib import Path
from typing import Any

SEEING = frozenset(
    {
        *(
            "gemma3",
            "gemma4",
            "idefics3",
            "internvl",
            "llava",
            "llava_next",
            "paligemma",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_5",
        ),
        *("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    }
)
"""Types of vision models whose images are read."""
TEXT_PARTS = frozenset(
    {
        *("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama"),
        *("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    }
)
"""Types of vision models that AutoModelForCausalLM loads: their language model works on text; of those that are not in `SEEING`,
images are never read."""
_KEYS = (
    "vision_config",
    "vision_tower",
    "mm_vision_tower",
    "visual",
    "vq_config",
    "image_token_id",
    "image_token_index",
)


def reads_images(folder: Path) -> bool:
    """Whether the model in `folder` has a vision tower that is used."""
    config = _config(folder)
    return config.get("model_type") in SEEING and config.get("vision_config") is not None


def vision_problem(folder: Path) -> str:
    """Why the model in `folder` cannot be used, if it is one of images and text; else empty."""
    config = _config(folder)
    kind = str(config.get("model_type", ""))
    key = next((key for key in _KEYS if config.get(key) is not None), None)
    is_custom = isinstance(own := config.get("auto_map"), dict) and "AutoModelForCausalLM" in own
    if key is None or kind in SEEING | TEXT_PARTS or is_custom:
        return ""
    architectures = config.get("architectures")
    name = ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else kind
    return (
        f"is a vision model ({name}: config.json has {key}) of a type that cannot be used; give a text model, or one of "
        f"{', '.join(sorted(SEEING))}"
    )


def _config(folder: Path) -> dict[str, Any]:
    """Empty if there is none, or one that is reported when it is read for its settings."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
