"""Tokenizers, and the token ids that end a response."""

import json
import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lockstep.utils.hub import TOKENIZER_FILES, has_tokenizer, parse_name
from lockstep.utils.model_path import base_folder, local_model_folder, revision_of

logger = logging.getLogger(__name__)


def hf_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    key: str = "actor_rollout_ref.model.path",
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path` (a local folder, a name on the Hub, a checkpoint or a URL), with a pad token.

    key: the config key of the path, for messages.
    """
    folder = local_model_folder(path, key, weights=False)
    if not has_tokenizer(folder):
        folder = base_folder(folder, key, weights=False)
    if not has_tokenizer(folder):
        elsewhere = key.removesuffix(".path").removesuffix(".tokenizer_path")
        name = parse_name(str(path)) if revision_of(folder) else None
        fetch = f", or run `{name.command}` with network access if the Hub's repository has one" if name else ""
        raise ValueError(
            f"{key}={path}: {folder} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); set "
            f"{elsewhere}.tokenizer_path if it is elsewhere{fetch}"
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
