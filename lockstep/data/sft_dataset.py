"""SFT sequences: rows to token ids and a loss mask.

    row --pieces--> [(text, is it the assistant's?), ...] --tokenize--> ids, loss_mask --truncate, pad--> sample

All rows are tokenized when the dataset is created, so that a bad row is an error before training and a step does not wait for
the tokenizer. `loss_mask` is 1 at the assistant's tokens, including the end of its turn. `MultiTurnSFTDataset` reads conversations,
`SFTDataset` pairs of a prompt and a response. A sample has `input_ids`, `position_ids`, `loss_mask` and, if padded,
`attention_mask`, each (max_length,) int64.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset

from lockstep.config.data import SequenceDataConfig, SFTDataConfig
from lockstep.config.sft import SFTRunDataConfig, SupervisedDataConfig
from lockstep.data.files import FileRow, drop_none, file_digests, read_rows
from lockstep.data.settings import from_mapping
from lockstep.data.tensors import kept_ends
from lockstep.registry import load_plugin
from lockstep.utils.dataset_files import Use, local_data_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, bool]
"""Part of a sequence's text, and whether the loss is computed on it."""

ROWS_PER_CALL = 1000
"""Rows that one call of the tokenizer encodes, on all cores."""


class SupervisedRows(Dataset[Any]):
    """Reading, checking, tokenizing, truncating and padding: all that the datasets share."""

    config: SequenceDataConfig

    def __init__(
        self,
        parquet_files: str | Path | list[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: SequenceDataConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        if processor is not None:
            raise ValueError(f"{type(self).__name__} takes no processor: images and videos are not supported")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; set model.custom_chat_template")
        self.tokenizer = tokenizer
        self.config = config if isinstance(config, SequenceDataConfig) else sft_settings(config)
        if self.config.pad_mode == "right" and tokenizer.pad_token_id is None:
            raise ValueError("data.pad_mode=right, but the tokenizer has no pad token; set one in its config")
        self.data_files = local_data_files(parquet_files, "train", "data.train_files")
        rows = read_rows(self.data_files, max_samples, self.config.seed if self.config.shuffle else None)
        self.rows = self.sequences(rows)
        for row in self.rows:
            self.check(row)
        self.fingerprint = file_digests(self.data_files)
        self._tokens: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, len(self.rows), ROWS_PER_CALL):
            self._tokens += self._encoded(self.rows[start : start + ROWS_PER_CALL])
        self._positions = [self._kept(row, len(ids)) for row, (ids, _) in zip(self.rows, self._tokens)]

    def check(self, row: FileRow) -> None:
        """Reject a malformed row."""

    def sequences(self, rows: list[FileRow]) -> list[FileRow]:
        """One row per sequence; a row of the file may hold several."""
        return rows

    def pieces(self, row: FileRow) -> list[Piece]:
        """The row's text in pieces."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Any:
        return self.sequence(item)

    def sequence(self, item: int) -> dict[str, torch.Tensor]:
        """The sample of a sequence."""
        ids, loss_mask = self._tokens[item]
        # Tokens of a truncated sequence keep their original positions.
        positions = self._positions[item]
        sample = {"input_ids": ids[positions], "position_ids": positions, "loss_mask": loss_mask[positions]}
        if self.config.pad_mode == "right":
            padding = (0, self.config.max_length - len(positions))
            sample["attention_mask"] = np.ones_like(positions)
            fill = {"input_ids": self.tokenizer.pad_token_id}
            sample = {
                name: np.pad(values, padding, constant_values=fill.get(name, 0)) for name, values in sample.items()
            }
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in sample.items()}

    def _encoded(self, rows: Sequence[FileRow]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids and loss mask of each row."""
        pieces = [self.pieces(row) for row in rows]
        texts = [text for text, _ in chain.from_iterable(pieces)]
        encoded = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        tokens = []
        for row in pieces:
            ids = [next(encoded) for _ in row]
            mask = np.repeat([is_target for _, is_target in row], [len(piece) for piece in ids])
            tokens.append((np.fromiter(chain.from_iterable(ids), np.int32), mask))
        return tokens

    def _kept(self, row: FileRow, length: int) -> np.ndarray:
        """The positions that remain after truncating a sequence of `length` tokens."""
        try:
            head, tail = kept_ends(length, self.config.max_length, self.config.truncation)
        except ValueError as error:
            raise ValueError(
                f"{row.location}: the sequence has {error} by data.max_length; raise it or set data.truncation=right or left"
            ) from error
        kept: np.ndarray = np.r_[:head, length - tail : length].astype(np.int32)
        return kept

    def render(self, row: FileRow, messages: list[dict[str, Any]], generate: bool = False, **options: Any) -> str:
        """Render messages with the chat template, with the generation prompt if `generate`."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=generate,
                tokenize=False,
                **{**self.config.apply_chat_template_kwargs, **options},
            )
        except TemplateError as error:
            raise ValueError(
                f"{row.location}: the chat template rejects these messages ({error}); change the row, "
                "data.apply_chat_template_kwargs or model.custom_chat_template"
            ) from error
        assert isinstance(text, str)
        return text


class MultiTurnSFTDataset(SupervisedRows):
    """Conversations: the loss is computed on every assistant turn."""

    config: SFTDataConfig

    def check(self, row: FileRow) -> None:
        key = self.config.messages_key
        messages = row.columns.get(key)
        if messages is None:
            raise ValueError(
                f"{row.location} has no {key!r}; set data.messages_key to the column with the conversation "
                f"(columns: {', '.join(row.columns)})"
            )
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError(
                f"{row.location}: {key!r} must be a list of messages "
                f'[{{"role": "user", "content": "..."}}, ...], not {messages!r:.80}'
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{row.location}: {key!r} has no assistant message, so there is nothing to train on")

    def pieces(self, row: FileRow) -> list[Piece]:
        messages = [plain_message(message) for message in row.columns[self.config.messages_key]]
        options = self._options(row)
        whole = self.render(row, messages, **options)
        cuts: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                for prefix in (
                    self.render(row, messages[:i], generate=True, **options),
                    self.render(row, messages[: i + 1], **options),
                ):
                    if not whole.startswith(prefix):
                        return self._render_turns_separately(row, messages, options)
                    cuts.append(len(prefix))
        bounds = [0, *cuts, len(whole)]
        pieces = [(whole[start:end], i % 2 == 1) for i, (start, end) in enumerate(pairwise(bounds))]
        return [piece for piece in pieces if piece[0]]

    def _options(self, row: FileRow) -> dict[str, Any]:
        """The row's own chat-template arguments."""
        options: dict[str, Any] = {}
        tools = row.columns.get(self.config.tools_key)
        if tools is not None:
            tools = json.loads(tools) if isinstance(tools, str) else tools
            options["tools"] = [_drop_none_recursively(json.loads(t) if isinstance(t, str) else t) for t in tools]
        thinking = row.columns.get(self.config.enable_thinking_key)
        if thinking is not None:
            options["enable_thinking"] = bool(thinking)
        return options

    def _render_turns_separately(
        self, row: FileRow, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> list[Piece]:
        """Render each turn on its own, for templates that render earlier turns differently."""
        if not self.config.ignore_input_ids_mismatch:
            raise ValueError(
                f"{row.location}: the chat template renders an assistant turn differently if more messages follow (some "
                "drop earlier reasoning), so there is no single sequence to train on. Set "
                "data.ignore_input_ids_mismatch=true to train on each turn rendered on its own"
            )
        user = {"role": "user", "content": ""}
        one, two = self.render(row, [user]), self.render(row, [user, user])
        default_system = one[: 2 * len(one) - len(two)]
        head = self.render(row, [user], generate=True, **options)[len(self.render(row, [user], **options)) :]
        pieces: list[Piece] = []
        for i, turn in enumerate(_turns(messages)):
            text = self.render(row, turn, **(options if i == 0 else {}))
            text = text if i == 0 else text.removeprefix(default_system)
            if turn[0]["role"] != "assistant":
                pieces.append((text, False))
            elif text.startswith(head):
                pieces += [(head, False), (text[len(head) :], True)]
            else:
                raise ValueError(f"{row.location}: an assistant turn does not begin with the chat template's {head!r}")
        return pieces


class SFTDataset(SupervisedRows):
    """Pairs: the prompt is one user message; the loss is computed on the response and the EOS token."""

    config: SFTDataConfig

    def check(self, row: FileRow) -> None:
        for name, key, path in self._columns():
            self._text(row, name, key, path)
        if self.tokenizer.eos_token is None:
            raise ValueError("the tokenizer has no eos token to end a response with; set one in its config")

    def pieces(self, row: FileRow) -> list[Piece]:
        prompt, response = (self._text(row, *column) for column in self._columns())
        rendered = self.render(row, [{"role": "user", "content": prompt}], generate=True)
        return [(rendered, False), (f"{response}{self.tokenizer.eos_token}", True)]

    def _columns(self) -> list[tuple[str, str, list[str]]]:
        config = self.config
        return [
            ("prompt", config.prompt_key, config.prompt_dict_keys or []),
            ("response", config.response_key, config.response_dict_keys or []),
        ]

    def _text(self, row: FileRow, name: str, key: str, path: list[str]) -> str:
        value: Any = row.columns
        for step in (key, *path):
            value = _entry(value, step)
            if value is None:
                raise ValueError(
                    f"{row.location} has no {'.'.join((key, *path))!r}; set data.{name}_key (and data.{name}_dict_keys) to "
                    f"the column with the {name} (columns: {', '.join(row.columns)})"
                )
        if not isinstance(value, str):
            raise ValueError(
                f"{row.location}: {'.'.join((key, *path))!r} must be text, not {type(value).__name__}; "
                f"set data.{name}_dict_keys to the path of the text in the object"
            )
        return value


def _entry(value: Any, step: str) -> Any:
    """The entry `step` of an object; of a list its item of that number, or the entry of its only item. None if there is none."""
    if isinstance(value, list) and step.isdigit():
        return value[int(step)] if int(step) < len(value) else None
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    return value.get(step) if isinstance(value, Mapping) else None


def create_sft_dataset(
    data_files: list[str],
    tokenizer: "PreTrainedTokenizerBase",
    config: SFTRunDataConfig,
    max_samples: int = -1,
    use: Use = "train",
) -> Dataset[dict[str, torch.Tensor]]:
    """Conversations or pairs; see `create_dataset`."""

    def built_in(files: list[str]) -> type:
        return MultiTurnSFTDataset if _are_conversations(files, config) else SFTDataset

    return create_dataset(built_in, data_files, tokenizer, config, max_samples, use)


def create_dataset(
    built_in: Callable[[list[str]], type],
    data_files: list[str],
    tokenizer: "PreTrainedTokenizerBase",
    config: SupervisedDataConfig,
    max_samples: int = -1,
    use: Use = "train",
) -> Dataset[Any]:
    """A dataset of the class that `data.custom_cls` names, or of the `built_in` one for these files, with the same arguments.

    A custom class that is not derived from `SupervisedRows` gets `data_files` as they are. use: selects the split of folders and
    of datasets on the Hub.
    """
    custom = config.custom_cls
    cls: Any = None
    if custom.path is not None:
        cls = load_plugin("data.custom_cls.path", custom.path, custom.name, base=Dataset)
    if cls is None or issubclass(cls, SupervisedRows):
        data_files = [str(file) for file in local_data_files(data_files, use, f"data.{use}_files")]
    cls = cls or built_in(data_files)
    built: Any = cls(parquet_files=data_files, tokenizer=tokenizer, config=config, max_samples=max_samples)
    if not hasattr(built, "fingerprint"):
        paths = [Path(file).expanduser() for file in data_files]
        if all(path.is_file() for path in paths):
            built.fingerprint = file_digests(paths)
    dataset: Dataset[Any] = built
    return dataset


def _are_conversations(data_files: list[str], config: SFTRunDataConfig) -> bool:
    if config.multiturn.enable is not None:
        return config.multiturn.enable
    return config.messages_key in read_rows(data_files, max_samples=1)[0].columns


def sft_settings(config: Mapping[str, Any]) -> SFTDataConfig:
    """Settings from a mapping; the keys under `multiturn` are moved to the top level."""
    flat = {**config, **drop_none(config.get("multiturn"))}
    flat.pop("multiturn", None)
    flat.pop("enable", None)
    return from_mapping(SFTDataConfig, flat)


def _turns(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each assistant message on its own; the messages between two of them together."""
    turns: list[list[dict[str, Any]]] = []
    for message in messages:
        if turns and message["role"] != "assistant" and turns[-1][0]["role"] != "assistant":
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": "", **_drop_none_recursively(message)}


def _drop_none_recursively(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _drop_none_recursively(item) for name, item in value.items() if item is not None}
    return [_drop_none_recursively(item) for item in value] if isinstance(value, list) else value
