"""`data.*`: prompt files, tokenization and the data loader."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.config.bounds import CountOrAll, NonNegativeInt, PositiveFloat, PositiveInt

Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True)
class ImageDataConfig:
    """Images and videos of rows, for models that read them (docs/data.md)."""

    image_key: str = "images"
    """Column of a row's images, in the order of the `<image>` in its messages: a list of paths, bytes, `{"bytes": ...}` or data
    URIs; optional."""
    video_key: str = "videos"
    """Column of a row's videos, in the order of the `<video>` in its messages: a list of lists of frames, paths, bytes or
    `{"video": ..., "fps": ...}`; optional. For Qwen-VL models."""
    video_fps: PositiveFloat = 2.0
    """Frames that are sampled per second of a video's file; also the rate of a list of frames that does not say its own."""
    max_video_frames: PositiveInt = 64
    """Most frames of a video; longer ones are sampled evenly."""
    max_video_pixels: PositiveInt | None = None
    """`longest_edge` of the model's video processor, to which larger videos are shrunk: pixels of a frame (Qwen2-VL, Qwen2.5-VL) or
    of all frames together (Qwen3-VL, Qwen3.5); null is its own."""
    min_pixels: PositiveInt | None = None
    """Smaller images are enlarged to this many pixels; null is the limit of the model's processor, if it has one (Qwen-VL)."""
    max_pixels: PositiveInt | None = None
    """Larger images are shrunk to this many pixels; null is the limit of the model's processor, if it has one (Qwen-VL)."""
    allow_image_urls: bool = False
    """Fetch images that are given as `http://` or `https://` URLs; otherwise they are an error."""
    allow_private_image_urls: bool = False
    """Fetch them also from this machine and from private or link-local addresses, to which a URL or a redirect may lead."""
    filter_bad_images: bool = False
    """Drop rows with an image or a video that cannot be used (missing, truncated, animated, too large, ...); else the first is an
    error."""


@dataclass(frozen=True)
class CustomClassConfig:
    path: str | None = None
    """The dataset class as `file.py:Class` or `pkg.module:Class`, or the file (or `pkg://module`) and `name`; null is the
    built-in one."""
    name: str | None = None
    """Class name, if `path` has none."""


@dataclass(frozen=True)
class SamplerConfig:
    class_path: str | None = None
    """Sampler of the training rows, a subclass of `AbstractSampler`, given like `custom_cls.path`; null uses `shuffle`. Needs
    `dataloader_num_workers=0`."""
    class_name: str | None = None
    """Class name, if `class_path` has none."""


@dataclass(frozen=True)
class DataConfig(ImageDataConfig):
    train_files: list[str] = field(default_factory=list)
    """Training prompts: a parquet, jsonl or json file, a folder of them, a dataset of the Hub
    (`org/name[@revision][:config][:split]`), a URL, or a list of these (docs/models_and_data_by_name.md); or `reasoning_gym:TASK`,
    `verifiers:TASKSET` (docs/environments.md)."""
    val_files: list[str] = field(default_factory=list)
    """Validation prompts, in the same forms; an empty list trains without validation."""
    train_max_samples: CountOrAll = -1
    """Use this many training rows, -1 for all: the first ones, or a random subset if `seed` is set and `shuffle` is on."""
    val_max_samples: CountOrAll = -1
    """Use this many validation rows; -1 for all."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or chat messages."""
    reward_fn_key: str = "data_source"
    """Column that selects the scorer; the data source of rows without it is `default`."""
    max_prompt_length: PositiveInt = 512
    """Maximum prompt length in tokens."""
    max_response_length: PositiveInt = 512
    """Maximum response length in tokens."""
    train_batch_size: PositiveInt = 1024
    """Prompts per training step (times `actor_rollout_ref.rollout.n` sequences)."""
    gen_batch_size: PositiveInt | None = None
    """Prompts per generation batch with `algorithm.filter_groups`; null is `train_batch_size`."""
    val_batch_size: PositiveInt | None = None
    """Prompts per generation batch in validation; null is all."""
    shuffle: bool = True
    """Shuffle the training rows every epoch."""
    validation_shuffle: bool = False
    """Shuffle the validation rows."""
    seed: NonNegativeInt | None = None
    """Seed of `shuffle`; null is `trainer.seed`."""
    dataloader_num_workers: NonNegativeInt = 0
    """Data loader processes; 0 loads in the controller, which is fast enough for text prompts."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than `max_prompt_length`."""
    filter_overlong_prompts_workers: PositiveInt = 1
    """Has no effect: the tokenizer is multi-threaded."""
    truncation: Truncation = "error"
    """What to do with a prompt that is too long."""
    return_raw_chat: bool = True
    """Keep the messages in the batch (key `raw_prompt`)."""
    trust_remote_code: bool = False
    """Allow the tokenizer to run code from its folder."""
    tokenizer: str | None = None
    """Tokenizer, in the same forms as a model's path; null is the actor's."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking`."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def get(self, name: str, default: Any = None) -> Any:
        """A value by name, for custom dataset and sampler classes."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class SequenceDataConfig(ImageDataConfig):
    """How rows become token sequences, in supervised and preference training."""

    max_length: PositiveInt = 1024
    """Maximum sequence length in tokens."""
    truncation: Truncation = "error"
    """What to do with a sequence that is too long."""
    pad_mode: Literal["right", "no_padding"] = "right"
    """`right` pads every sequence to `max_length`; `no_padding` does not pad."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template."""
    shuffle: bool = False
    """Select the `max_samples` rows at random."""
    seed: NonNegativeInt | None = None
    """Seed of that selection; null takes the first rows."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True)
class SFTDataConfig(SequenceDataConfig):
    """Rows of supervised fine-tuning: conversations, or pairs of prompt and response."""

    messages_key: str = "messages"
    """Column of the conversation's messages."""
    tools_key: str = "tools"
    """Column of the conversation's tool schemas (a list, or JSON text); optional."""
    enable_thinking_key: str = "enable_thinking"
    """Column passed to the chat template as `enable_thinking`; optional."""
    prompt_key: str = "prompt"
    """Column of the prompt, for rows that are pairs."""
    response_key: str = "response"
    """Column of the response, for rows that are pairs."""
    prompt_dict_keys: list[str] | None = None
    """If the prompt column is an object or a list: the path of keys (or item numbers) to its text; ["content"] for one message."""
    response_dict_keys: list[str] | None = None
    """If the response column is an object or a list: the path of keys (or item numbers) to its text."""
    ignore_input_ids_mismatch: bool = False
    """Tokenize each turn separately even if the template renders earlier turns differently within the conversation."""
