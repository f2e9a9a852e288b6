"""Tokenizers from local folders, and the token ids that end a response."""

import json
import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def hf_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    key: str = "actor_rollout_ref.model",
) -> PreTrainedTokenizerBase:
    """The tokenizer in the local folder `path`, with a pad token; nothing is ever downloaded.

    key: the config section that the path comes from, for messages.
    """
    folder = Path(path).expanduser()
    if not str(path) or not folder.is_dir():
        raise ValueError(
            f"{key}.path={str(path)!r}: no such folder (looked for {folder.resolve()}). Models and "
            "tokenizers are read from local folders only; download the model first and give its folder."
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{key}.path={str(path)!r}: the folder holds no tokenizer (looked for "
            f"{', '.join(TOKENIZER_FILES)}). Set {key}.tokenizer_path if it lies elsewhere."
        )
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"the tokenizer in {folder} has neither a pad nor an eos token; add one to its config")
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer in %s has no pad token; its eos token %r is used", folder, tokenizer.eos_token)
    return tokenizer


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, model_folder: str | Path) -> list[int]:
    """Every id that ends a response, ascending: the tokenizer's and those of generation_config.json and config.json."""
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        file = Path(model_folder).expanduser() / name
        if file.is_file():
            declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    if not ids:
        raise ValueError(
            f"neither the tokenizer nor {model_folder}/generation_config.json nor config.json names an eos token; "
            "add `eos_token_id` to generation_config.json"
        )
    return sorted(ids)
