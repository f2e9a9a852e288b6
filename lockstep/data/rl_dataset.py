"""RL prompts: file rows to chat messages and token ids.

A row: `prompt` (text, or [{role, content}, ...]) and `answer` with any further column, or `data_source`, `reward_model`
({style, ground_truth}) and optionally `ability`, `extra_info` ({index, tools_kwargs, interaction_kwargs, ...}); `agent_name`.

    files --read_rows, to_schema--> checked rows --(overlong filter)--> __getitem__: columns + raw_prompt, raw_prompt_ids, ...
          --collate_fn--> one dict of stacked tensors and object arrays
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset

from lockstep.config.data import DataConfig
from lockstep.data.files import FileRow, drop_none, file_digests, media_columns, read_rows, refuse_media_of
from lockstep.data.fingerprint import image_content
from lockstep.data.image_prompts import RowImages, num_pictures, usable, with_data_uris
from lockstep.data.rows import rows_by_source, to_schema
from lockstep.data.settings import from_mapping
from lockstep.data.tensors import truncate_ids
from lockstep.protocol import object_array
from lockstep.utils.dataset_files import local_data_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ENCODE_ROWS = 1024

Messages = list[dict[str, Any]]
ToolsOf = Callable[[Mapping[str, Any]], list[Any] | None]
"""A row's columns -> the tools that its prompt is rendered with."""


class RLHFDataset(Dataset[dict[str, Any]]):
    """Rows of one or several files, each with its prompt as messages and as token ids.

    All rows are checked on construction, so that a bad row stops the run before it starts.

    processor: of a model that reads images (transformers' AutoProcessor); its tokenizer is `tokenizer`. Rows may then have images
    and videos, and each sample has `multi_modal_inputs`: its `ImageInputs`, or None. They are prepared when a row is read.

    A script may pass `config` as a mapping with some of the keys. Then, as in verl, overlong prompts are dropped unless
    `filter_overlong_prompts: false`.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.tools_of: ToolsOf | None = None
        if not isinstance(config, DataConfig):
            config = from_mapping(DataConfig, config, filter_overlong_prompts=True, shuffle=False)
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; set actor_rollout_ref.model.custom_chat_template "
                "(or use an instruction-tuned model)"
            )
        self.tokenizer = tokenizer
        self.config = config
        self.images = RowImages(processor, config) if processor is not None else None
        # The position before filtering is the row's index if its extra_info has none.
        self.rows = [
            (position, complete_row(row, position, config))
            for position, row in enumerate(self._read(data_files, max_samples))
        ]
        self._check([row for _, row in self.rows])
        if self.images is not None:
            self.rows = [(position, self._with_image_parts(row)) for position, row in self.rows]
        self._encoded: dict[int, np.ndarray] = {}  # token ids by position, of prompts that were measured
        self._digests: dict[int, tuple[bytes, ...]] = {}  # of images, by position
        self._limit_lengths()

    def _read(self, data_files: str | Path | Sequence[str | Path], max_samples: int) -> list[FileRow]:
        self.data_files = local_data_files(data_files, "train", "data.train_files")
        return read_rows(self.data_files, max_samples, self.config.seed if self.config.shuffle else None)

    def use_tools(self, tools_of: ToolsOf) -> None:
        """Render the prompts with the tools of their rows; they become longer, so their lengths are checked again."""
        self.tools_of = tools_of
        self._encoded = {}
        self._limit_lengths()

    def _limit_lengths(self) -> None:
        config = self.config
        if self.images is not None:
            self._prepare_images()
        if config.filter_overlong_prompts:
            self.rows = self._without_overlong(self.rows)
        elif config.truncation == "error":
            self._refuse_overlong(self.rows)

    def _check(self, rows: Sequence[FileRow]) -> None:
        """Reject rows that cannot be used."""
        for row in rows:
            check_row(row, self.config, with_images=self.images is not None)
        check_ground_truths(rows, self.config)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def data_sources(self) -> dict[str, FileRow]:
        """The data sources of all rows, which select the scorers, each with a row; see `rows_by_source`."""
        return rows_by_source((row for _, row in self.rows), self.config.reward_fn_key)

    @property
    def fingerprint(self) -> dict[str, str]:
        """The content of the files and of the images, so that a resumed run notices a change."""
        return file_digests(self.data_files) | image_content(self._digests)

    def __getitem__(self, item: int) -> dict[str, Any]:
        position, row = self.rows[item]
        if self.images is not None and self._num_pictures(row):
            return self._image_sample(position, row, self.images)
        ids = self._encoded[position].tolist() if position in self._encoded else self._encode([row])[0]
        sample = self._sample(position, row, ids)
        return sample if self.images is None else sample | {"multi_modal_inputs": None}

    def _image_sample(self, position: int, row: FileRow, images: RowImages) -> dict[str, Any]:
        pictures = images.pictures(row, row.columns[self.config.prompt_key])
        ids, inputs = images.encode(row, self._render(row), pictures)
        sample = self._sample(position, row, ids) | {"multi_modal_inputs": inputs}
        if "raw_prompt" in sample:
            sample["raw_prompt"] = with_data_uris(sample["raw_prompt"], pictures)
        return sample

    def _num_pictures(self, row: FileRow) -> int:
        return num_pictures(row.columns[self.config.prompt_key])

    def _with_image_parts(self, row: FileRow) -> FileRow:
        """The row with its images and videos in its messages."""
        assert self.images is not None
        placed = self.images.place(row, row.columns[self.config.prompt_key])
        read = (self.config.image_key, self.config.video_key)
        others = {name: value for name, value in row.columns.items() if name not in read}
        return replace(row, columns=others | {self.config.prompt_key: placed})

    def _prepare_images(self) -> None:
        """Measure the prompts with images, all of which are read for that; rows with bad ones are an error, or are dropped."""
        rows, config = [entry for entry in self.rows if self._num_pictures(entry[1])], self.config
        bad: set[int] = set()
        results = usable(self._measured, [row for _, row in rows], drop=config.filter_bad_images)
        for (position, row), result in zip(rows, results):
            if result is None:
                bad.add(position)
                continue
            self._encoded[position], self._digests[position] = result
            if not config.filter_overlong_prompts and config.truncation != "error":
                self._truncated(row, self._encoded[position].tolist())
        self.rows = [entry for entry in self.rows if entry[0] not in bad]
        if bad and not self.rows:
            raise ValueError("no row is left after data.filter_bad_images: all have images that cannot be used")

    def _measured(self, row: FileRow) -> tuple[np.ndarray, tuple[bytes, ...]]:
        """Token ids and digests of the images."""
        assert self.images is not None
        pictures = self.images.pictures(row, row.columns[self.config.prompt_key])
        ids, inputs = self.images.encode(row, self._render(row), pictures)
        return np.array(ids, dtype=np.int32), inputs.digests

    def _truncated(self, row: FileRow, ids: list[int]) -> list[int]:
        kept = truncate_ids(ids, self.config.max_prompt_length, self.config.truncation)
        if self.images is not None and len(kept) < len(ids):
            self.images.check_cut(row, ids, kept, "data.max_prompt_length")
        return kept

    def _sample(self, position: int, row: FileRow, ids: list[int]) -> dict[str, Any]:
        extra_info = row.columns.get("extra_info") or {}
        index = extra_info.get("index")
        sample = {name: value for name, value in row.columns.items() if name != self.config.prompt_key}
        sample["extra_info"] = extra_info
        if self.config.return_raw_chat:
            sample["raw_prompt"] = self._messages(row)
        sample["raw_prompt_ids"] = self._truncated(row, ids)
        sample["index"] = position if index is None else index
        return sample | agent_kwargs(row.columns)

    def _messages(self, row: FileRow) -> Messages:
        return [drop_none(message, keep="content") for message in row.columns[self.config.prompt_key]]

    def _encode(self, rows: Sequence[FileRow]) -> list[list[int]]:
        """Token ids of prompts without images, including the generation prompt."""
        return self.tokenizer([self._render(row) for row in rows], add_special_tokens=False)["input_ids"]

    def _render(self, row: FileRow) -> str:
        messages = self._messages(row)
        try:
            text = self.tokenizer.apply_chat_template(
                messages if self.images is None else self.images.encoder.templated(messages),
                tools=self.tools_of(row.columns) if self.tools_of is not None else None,
                add_generation_prompt=True,
                tokenize=False,
                **self.config.apply_chat_template_kwargs,
            )
        except TemplateError as error:
            raise ValueError(
                f"{row.location}: the chat template rejects this prompt ({error}); change the row, "
                "data.apply_chat_template_kwargs or actor_rollout_ref.model.custom_chat_template"
            ) from error
        assert isinstance(text, str)
        return text

    def _lengths(self, rows: list[tuple[int, FileRow]]) -> list[int]:
        missing = [entry for entry in rows if entry[0] not in self._encoded]
        for start in range(0, len(missing), ENCODE_ROWS):
            part = missing[start : start + ENCODE_ROWS]
            for (position, _), ids in zip(part, self._encode([row for _, row in part])):
                self._encoded[position] = np.array(ids, dtype=np.int32)
        return [len(self._encoded[position]) for position, _ in rows]

    def _without_overlong(self, rows: list[tuple[int, FileRow]]) -> list[tuple[int, FileRow]]:
        longest = self.config.max_prompt_length
        lengths = self._lengths(rows)
        kept = [entry for entry, length in zip(rows, lengths) if length <= longest]
        self._encoded = {position: self._encoded[position] for position, _ in kept}
        if rows and not kept:
            raise ValueError(
                f"every prompt is longer than data.max_prompt_length={longest} ({_length_range(lengths)}); nothing is left "
                "after data.filter_overlong_prompts"
            )
        if len(kept) < len(rows):
            logger.info("dropped %d of %d prompts longer than %d tokens", len(rows) - len(kept), len(rows), longest)
        return kept

    def _refuse_overlong(self, rows: list[tuple[int, FileRow]]) -> None:
        longest = self.config.max_prompt_length
        lengths = self._lengths(rows)
        overlong = [(row, length) for (_, row), length in zip(rows, lengths) if length > longest]
        if overlong:
            row, length = overlong[0]
            raise ValueError(
                f"{row.location}: the prompt has {length} tokens, more than data.max_prompt_length={longest} "
                f"({len(overlong)} of {len(rows)} prompts are too long; {_length_range(lengths)}). Raise "
                "data.max_prompt_length, set data.filter_overlong_prompts=true to drop them, or data.truncation=left, right or "
                "middle to cut them"
            )


class PromptDataset(RLHFDataset):
    """Rows that need no answer: only the prompt is checked."""

    def _check(self, rows: Sequence[FileRow]) -> None:
        for row in rows:
            check_prompt(row, self.config, with_images=self.images is not None)


def _length_range(lengths: list[int]) -> str:
    return f"shortest {min(lengths)}, median {median_high(lengths)}, longest {max(lengths)} tokens"


def complete_row(row: FileRow, position: int, config: DataConfig) -> FileRow:
    """The row with all columns that training reads; see `to_schema`."""
    media = {name: row.columns[name] for name in media_columns(config) if name in row.columns}
    others = {name: value for name, value in row.columns.items() if name not in media}
    return replace(row, columns=to_schema(others, position, config.prompt_key, config.reward_fn_key) | media)


def check_row(row: FileRow, config: DataConfig, *, with_images: bool = False) -> None:
    """Reject a row that lacks a column or whose prompt is not chat messages."""
    _require(row, config.prompt_key, _PROMPT_REMEDY)
    _require(row, config.reward_fn_key, "set data.reward_fn_key to the column that selects the scorer")
    if not isinstance(row.columns["reward_model"], dict):
        raise ValueError(
            f"{row.location}: 'reward_model' must be an object with `style` and `ground_truth`, "
            f"not {row.columns['reward_model']!r}"
        )
    reward_model = row.columns["reward_model"]
    if reward_model.get("style") == "rule" and reward_model.get("ground_truth") is None:
        raise ValueError(
            f"{row.location}: 'reward_model' has style 'rule' but no 'ground_truth'; add it, or set style 'model' if a "
            "reward model scores the answers"
        )
    check_prompt(row, config, with_images=with_images)


def check_prompt(row: FileRow, config: DataConfig, *, with_images: bool = False) -> None:
    """Reject a row whose prompt is missing or not chat messages. with_images: the model reads images."""
    _require(row, config.prompt_key, _PROMPT_REMEDY)
    refuse_media_of(row, config, with_images=with_images)
    problem = _message_problem(row.columns[config.prompt_key], with_images)
    if problem:
        raise ValueError(
            f"{row.location}: {config.prompt_key!r} must be text or a list of messages "
            f'[{{"role": "user", "content": "..."}}, ...], but {problem}; data.prompt_key names the column'
        )


_PROMPT_REMEDY = "set data.prompt_key to the column with the prompt, text or chat messages"


def _require(row: FileRow, name: str, remedy: str) -> None:
    if row.columns.get(name) is None:
        raise ValueError(
            f"{row.location} has no {name!r}; {remedy} (columns: {', '.join(row.columns)}). A dataset as its authors "
            "publish it has to be converted to rows first: see examples/data_preprocess and docs/data.md"
        )


def agent_kwargs(columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The row's `tools_kwargs` and `interaction_kwargs`: columns, or fields of `extra_info`."""
    extra_info = columns.get("extra_info") or {}
    return {
        name: drop_none(columns.get(name) or extra_info.get(name)) for name in ("tools_kwargs", "interaction_kwargs")
    }


def check_ground_truths(rows: Sequence[FileRow], config: DataConfig) -> None:
    """Reject a ground truth whose scalar type differs from earlier rows with the same scorer.

    Scorers compare values of one type: if most rows have "72", no answer to a row with 72 would ever be correct.
    """
    first: dict[str, tuple[str, FileRow]] = {}
    for row in rows:
        kind = _scalar_kind(row.columns["reward_model"].get("ground_truth"))
        if kind is None:
            continue
        source = str(row.columns[config.reward_fn_key])
        known, known_row = first.setdefault(source, (kind, row))
        if kind != known:
            raise ValueError(
                f"{row.location}: reward_model.ground_truth is {row.columns['reward_model']['ground_truth']!r} ({kind}), "
                f"but {known_row.columns['reward_model']['ground_truth']!r} ({known}) in {known_row.location}, which has "
                f"the same {config.reward_fn_key} {source!r}; write them all as one type (the built-in scorers: text)"
            )


def _scalar_kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else None


def _message_problem(prompt: Any, with_parts: bool) -> str | None:
    if not isinstance(prompt, list):
        return f"it is of type {type(prompt).__name__}"
    if not prompt:
        return "it is empty"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"message {number} is of type {type(message).__name__}"
        if not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        content = message.get("content")
        is_content = isinstance(content, str) or (with_parts and isinstance(content, list) and bool(content))
        if not is_content and not message.get("tool_calls"):
            hint = " (lists of parts are for models that read images)" if isinstance(content, list) else ""
            return f"the content of message {number} is of type {type(content).__name__}, not text{hint}"
    return None


def collate_fn(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """One batch: tensors stacked, everything else a 1-D object array with None for missing values."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for name in names:
        values = [sample.get(name) for sample in samples]
        if all(isinstance(value, torch.Tensor) for value in values):
            batch[name] = torch.stack(values)  # type: ignore[arg-type]
        else:
            batch[name] = object_array(values)
    return batch
