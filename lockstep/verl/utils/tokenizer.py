"""verl.utils.tokenizer"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.processor import load_processor
from lockstep.models.tokenizer import hf_tokenizer as hf_tokenizer


def hf_processor(name_or_path: str | Path, **kwargs: Any) -> Any:
    """The processor of a multimodal model in a local folder; None for a text model."""
    return load_processor(name_or_path, **kwargs)


def normalize_token_ids(tokenized: Any) -> list[int]:
    """The token ids of one text as a list, from what a tokenizer or `apply_chat_template` returns: a list, a list of one list, a
    tensor or an array of one row, or a mapping with `input_ids`."""
    ids = tokenized["input_ids"] if isinstance(tokenized, Mapping) or hasattr(tokenized, "input_ids") else tokenized
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = list(ids[0])
    if not all(isinstance(token, int | np.integer) for token in ids):
        raise TypeError(f"normalize_token_ids: expected the token ids of one text, got {str(ids)[:80]}")
    return [int(token) for token in ids]


def set_pad_token_id(tokenizer: Any) -> None:
    """Use the EOS token for padding if the tokenizer has no pad token."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
