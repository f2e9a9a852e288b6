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
class SamplerConfig:
    class_path: str | None = None
    """Python file (or `pkg://module`) that holds a sampler of the training rows; null shuffles as `shuffle` says."""
    class_name: str | None = None
    """The sampler's class in that file, a subclass of `AbstractSampler`; needs `dataloader_num_workers=0`."""


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Training prompts: one parquet or jsonl file, or a list of them."""
    val_files: list[str] = field(default_factory=list)
    """Validation prompts; an empty list trains without validation."""
    train_max_samples: int = -1
    """Use this many training rows; -1 for all. The first ones, or a draw by `seed` where that is set and `shuffle` is on."""
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
    gen_batch_size: int | None = None
    """Prompts that are sampled at a time with `algorithm.filter_groups`; null takes `train_batch_size`."""
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
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def get(self, name: str, default: Any = None) -> Any:
        """A value by name, as custom dataset and sampler classes ask for it."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class SFTDataConfig:
    """Rows of supervised training: conversations, or pairs of a prompt and a response."""

    messages_key: str = "messages"
    """Column that holds a conversation's messages."""
    tools_key: str = "tools"
    """Column that holds the conversation's tool schemas (a list, or JSON text); may be absent."""
    enable_thinking_key: str = "enable_thinking"
    """Column whose value goes to the chat template as `enable_thinking`; may be absent."""
    prompt_key: str = "prompt"
    """Column of the prompt, for rows that are pairs."""
    response_key: str = "response"
    """Column of the response, for rows that are pairs."""
    prompt_dict_keys: list[str] | None = None
    """Where the prompt's column holds an object: the way to the text in it."""
    response_dict_keys: list[str] | None = None
    """Where the response's column holds an object: the way to the text in it."""
    max_length: int = 1024
    """Longest sequence in tokens."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a sequence that is too long."""
    pad_mode: Literal["right", "no_padding"] = "right"
    """`right` pads every sequence to `max_length`; `no_padding` leaves it as long as it is."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template."""
    ignore_input_ids_mismatch: bool = False
    """Train on each turn as the template writes it alone, where it writes earlier turns differently in a conversation."""
    shuffle: bool = False
    """Draw the rows of `max_samples` at random."""
    seed: int | None = None
    """Seed of that draw; without it the first rows are taken."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)
