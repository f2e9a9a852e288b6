"""Vision models, told by their config.json: which read images, which are used for text alone, and which are refused."""

import json
from importlib.util import find_spec
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
WATCHING = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Those whose videos are read."""
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


def why_no_videos(model_type: str) -> str:
    """Why a model of images reads no videos; empty if it does."""
    if model_type in WATCHING:
        return ""
    return f"models of type {model_type} read no videos here (those of types {', '.join(sorted(WATCHING))} do)"


def why_no_video_processor(model_type: str) -> str:
    """Why this machine cannot prepare videos for a model; empty if it can."""
    if reason := why_no_videos(model_type):
        return reason
    if find_spec("torchvision") is None:
        return "videos are prepared with torchvision, which is not installed; install the version that fits the installed torch"
    return ""


def model_type_of(folder: Path) -> str:
    return str(_config(folder).get("model_type", ""))


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
