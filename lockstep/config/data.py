"""`data.*`: prompt files, tokenization and the loader."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CustomClassConfig:
    path: str | None = None
    """Python file (or `pkg://module`) that holds the class; null for the built-in one."""
    name: str | None = None
    """The class in that file."""


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Training prompts: one parquet or jsonl file, or a list of them."""
    val_files: list[str] = field(default_factory=list)
    """Validation prompts; an empty list trains without validation."""
    train_max_samples: int = -1
    """Use this many training rows; -1 for all."""
    val_max_samples: int = -1
    """Use this many validation rows; -1 for all."""
    prompt_key: str = "prompt"
    """Column that holds the chat messages."""
    reward_fn_key: str = "data_source"
    """Column by which the scorer is chosen."""
    max_prompt_length: int = 512
    """Longest prompt in tokens."""
    max_response_length: int = 512
    """Longest response in tokens."""
    train_batch_size: int = 1024
    """Prompts in one training step (times `actor_rollout_ref.rollout.n` sequences)."""
    val_batch_size: int | None = None
    """Prompts generated at once in validation; null for all."""
    shuffle: bool = True
    """Shuffle the training rows anew every epoch."""
    validation_shuffle: bool = False
    """Shuffle the validation rows."""
    seed: int | None = None
    """Seed of the shuffling; null takes `trainer.seed`."""
    dataloader_num_workers: int = 0
    """Loader processes; 0 reads in the controller, which suits prompts."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than `max_prompt_length` when the files are read."""
    filter_overlong_prompts_workers: int = 1
    """Accepted and not needed: the tokenizer measures prompts in threads of its own."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt that is too long."""
    return_raw_chat: bool = True
    """Keep the messages beside the tokens (batch key `raw_prompt`)."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
    tokenizer: str | None = None
    """Tokenizer folder; null takes the actor's."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking`."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
