"""Vision models, told by their config.json: they are refused unless transformers has their language model on its own."""

import json
from pathlib import Path

TEXT_PARTS = frozenset(
    {
        *("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama"),
        *("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    }
)
"""Types of vision models that AutoModelForCausalLM loads: their language model works on text, images are never read."""
_KEYS = (
    "vision_config",
    "vision_tower",
    "mm_vision_tower",
    "visual",
    "vq_config",
    "image_token_id",
    "image_token_index",
)


def vision_problem(folder: Path) -> str:
    """Why the model in `folder` cannot be used, if it is one of images and text; else empty."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = str(config.get("model_type", ""))
        custom = config.get("auto_map") or {}
        key = next((key for key in _KEYS if config.get(key) is not None), None)
        if key is None or kind in TEXT_PARTS or "AutoModelForCausalLM" in custom:
            return ""
        name = ", ".join(config.get("architectures") or []) or kind
    except (OSError, ValueError, AttributeError, TypeError):
        return ""  # no config, or one that is reported when it is read for its settings
    return f"is a vision model ({name}: config.json has {key}); only text models are supported, give a text model"
