"""verl.utils.tokenizer"""

from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from lockstep.models.tokenizer import hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer", "set_pad_token_id"]

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def hf_processor(name_or_path: str | Path, **kwargs: Any) -> Any:
    """The processor of a multimodal model in a local folder; None for a text model."""
    folder = Path(name_or_path).expanduser()
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None
    return AutoProcessor.from_pretrained(str(folder), **kwargs)


def set_pad_token_id(tokenizer: Any) -> None:
    """Use the EOS token for padding if the tokenizer has no pad token."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
