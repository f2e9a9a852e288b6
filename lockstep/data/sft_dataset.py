"""SFT sequences: rows to token ids and a loss mask.

    row --pieces--> [(text, is it the assistant's?), ...] --tokenize--> ids, loss_mask --truncate, pad--> sample

All rows are tokenized when the dataset is created, so that a bad row is an error before training and a step does not wait for
the tokenizer. `loss_mask` is 1 at the assistant's tokens, including the end of its turn. `MultiTurnSFTDataset` reads conversations,
`SFTDataset` pairs of a prompt and a response. A sample has `input_ids`, `position_ids`, `loss_mask` and, if padded,
`attention_mask`, each (max_length,) int64. With a processor it also has `multi_modal_inputs`: the `ImageInputs` of the prompt's
images, which are prepared when the sample is read, or None.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset

from lockstep.config.data import SequenceDataConfig, SFTDataConfig
from lockstep.config.sft import SFTRunDataConfig, SupervisedDataConfig
from lockstep.data.files import FileRow, drop_none, file_digests, read_rows, refuse_media_of
from lockstep.data.fingerprint import image_content
from lockstep.data.image_prompts import RowImages, num_pictures, usable
from lockstep.data.settings import from_mapping
from lockstep.data.tensors import kept_ends
from lockstep.protocol.images import IMAGES, ImageInputs
from lockstep.registry import load_plugin
from lockstep.utils.dataset_files import Use, local_data_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """Part of a sequence's text, whether the loss is computed on it, and the images and videos whose tokens are in it."""

    text: str
    is_target: bool
    num_pictures: int = 0


Sample = dict[str, Any]
Tokens = tuple[np.ndarray, np.ndarray]
"""Token ids, and whether the loss is computed on each."""

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
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; set model.custom_chat_template")
        self.tokenizer = tokenizer
        self.config = config if isinstance(config, SequenceDataConfig) else sft_settings(config)
        self.images = RowImages(processor, self.config) if processor is not None else None
        if self.config.pad_mode == "right" and tokenizer.pad_token_id is None:
            raise ValueError("data.pad_mode=right, but the tokenizer has no pad token; set one in its config")
        self.data_files = local_data_files(parquet_files, "train", "data.train_files")
        rows = read_rows(self.data_files, max_samples, self.config.seed if self.config.shuffle else None)
        for row in rows:
            refuse_media_of(row, self.config, with_images=self.images is not None)
        self.rows = self.sequences(rows)
        for row in self.rows:
            self.check(row)
        pieces = [self.pieces(row) for row in self.rows]
        self._digests: dict[int, tuple[bytes, ...]] = {}  # of images, by sequence
        with_images = self._encoded_images(pieces)
        self.fingerprint = file_digests(self.data_files) | image_content(self._digests)
        texts = [i for i in range(len(self.rows)) if i not in with_images]
        for start in range(0, len(texts), ROWS_PER_CALL):
            part = texts[start : start + ROWS_PER_CALL]
            with_images |= dict(zip(part, self._encoded([pieces[i] for i in part])))
        kept = self.complete([i for i in range(len(self.rows)) if with_images[i] is not None])
        self.keep(kept)
        self._tokens = [with_images[i] for i in kept]
        self._positions = [self._kept(row, ids) for row, (ids, _) in zip(self.rows, self._tokens)]

    def check(self, row: FileRow) -> None:
        """Reject a malformed row."""

    def sequences(self, rows: list[FileRow]) -> list[FileRow]:
        """One row per sequence; a row of the file may hold several."""
        return rows

    def pieces(self, row: FileRow) -> list[Piece]:
        """The row's text in pieces."""
        raise NotImplementedError

    def conversation(self, row: FileRow) -> list[dict[str, Any]]:
        """The row's messages, with their images as parts: those of the prompt at least."""
        raise NotImplementedError

    def complete(self, numbers: list[int]) -> list[int]:
        """Those of the usable sequences that can be trained on."""
        return numbers

    def keep(self, numbers: list[int]) -> None:
        """Drop all other sequences."""
        self.rows = [self.rows[i] for i in numbers]

    def placed(self, row: FileRow, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the row's images as parts."""
        return messages if self.images is None else self.images.place(row, messages)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Any:
        sample = self.sequence(item)
        return sample if self.images is None else sample | {IMAGES: self.image_inputs(item)}

    def image_inputs(self, item: int) -> ImageInputs | None:
        """The images of a sequence, prepared now."""
        assert self.images is not None
        row = self.rows[item]
        messages = self.conversation(row)
        if not num_pictures(messages):
            return None
        text = "".join(piece.text for piece in self.pieces(row))
        return self.images.encode(row, text, self.images.pictures(row, messages))[1]

    def sequence(self, item: int) -> Sample:
        """The tokens of a sequence."""
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

    def _encoded(self, rows: Sequence[Sequence[Piece]]) -> list[Tokens]:
        """Token ids and loss mask of the pieces of each row."""
        texts = [piece.text for piece in chain.from_iterable(rows)]
        encoded = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        return [_joined(pieces, [next(encoded) for _ in pieces]) for pieces in rows]

    def _encoded_images(self, pieces: Sequence[Sequence[Piece]]) -> dict[int, Any]:
        """Number -> the same, for sequences with images, all of which are read; None for one that is dropped."""
        images = self.images
        if images is None:
            return {}
        seeing = {id(self.rows[i]): i for i, row in enumerate(pieces) if any(piece.num_pictures for piece in row)}

        def tokens_of(row: FileRow) -> Tokens:
            number = seeing[id(row)]
            own, pictures = pieces[number], images.pictures(row, self.conversation(row))
            self._digests[number] = tuple(picture.digest for picture in pictures)
            ids: list[list[int]] = []
            start = 0
            for piece in own:
                if piece.is_target and piece.num_pictures:
                    raise ValueError(f"{row.location}: an assistant message has an image; the model writes text only")
                given = pictures[start : (start := start + piece.num_pictures)]
                ids.append(
                    images.encode(row, piece.text, given)[0]
                    if given
                    else self.tokenizer(piece.text, add_special_tokens=False)["input_ids"]
                )
            if sum(piece.num_pictures > 0 for piece in own) > 1:
                _, inputs = images.encode(row, "".join(piece.text for piece in own), pictures)
                if sum(token in inputs.placeholders for part in ids for token in part) != sum(inputs.num_tokens):
                    raise ValueError(f"{row.location}: the processor makes other tokens of images in several messages")
            return _joined(own, ids)

        rows = [self.rows[i] for i in seeing.values()]
        return dict(zip(seeing.values(), usable(tokens_of, rows, drop=self.config.filter_bad_images)))

    def _kept(self, row: FileRow, ids: np.ndarray) -> np.ndarray:
        """The positions that remain after truncating a sequence."""
        length = len(ids)
        try:
            head, tail = kept_ends(length, self.config.max_length, self.config.truncation)
        except ValueError as error:
            raise ValueError(
                f"{row.location}: the sequence has {error} by data.max_length; raise it or set data.truncation=right or left"
            ) from error
        kept: np.ndarray = np.r_[:head, length - tail : length].astype(np.int32)
        if self.images is not None and len(kept) < length:
            self.images.check_cut(row, ids.tolist(), ids[kept].tolist(), "data.max_length")
        return kept

    def render(self, row: FileRow, messages: list[dict[str, Any]], generate: bool = False, **options: Any) -> str:
        """Render messages with the chat template, with the generation prompt if `generate`."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages if self.images is None else self.images.encoder.templated(messages),
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

    def conversation(self, row: FileRow) -> list[dict[str, Any]]:
        return self.placed(row, [plain_message(message) for message in row.columns[self.config.messages_key]])

    def pieces(self, row: FileRow) -> list[Piece]:
        messages = self.conversation(row)
        options = self._options(row)
        whole = self.render(row, messages, **options)
        bounds = [(0, 0)]  # characters and images before each cut
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                for end, prefix in (
                    (i, self.render(row, messages[:i], generate=True, **options)),
                    (i + 1, self.render(row, messages[: i + 1], **options)),
                ):
                    if not whole.startswith(prefix):
                        return self._render_turns_separately(row, messages, options)
                    bounds.append((len(prefix), num_pictures(messages[:end])))
        bounds.append((len(whole), num_pictures(messages)))
        pieces = [
            Piece(whole[start:end], i % 2 == 1, later - earlier)
            for i, ((start, earlier), (end, later)) in enumerate(pairwise(bounds))
        ]
        return [piece for piece in pieces if piece.text]

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
                pieces.append(Piece(text, False, num_pictures(turn)))
            elif text.startswith(head):
                pieces += [Piece(head, False), Piece(text[len(head) :], True, num_pictures(turn))]
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

    def conversation(self, row: FileRow) -> list[dict[str, Any]]:
        return self.placed(row, [{"role": "user", "content": self._text(row, *self._columns()[0])}])

    def pieces(self, row: FileRow) -> list[Piece]:
        prompt, response = self.conversation(row), self._text(row, *self._columns()[1])
        if self.images is not None:
            self.images.check_text(row, "the response", response)
        rendered = self.render(row, prompt, generate=True)
        return [
            Piece(rendered, False, num_pictures(prompt)),
            Piece(f"{response}{self.tokenizer.eos_token}", True),
        ]

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


def _joined(pieces: Sequence[Piece], ids: Sequence[Sequence[int]]) -> Tokens:
    mask = np.repeat([piece.is_target for piece in pieces], [len(part) for part in ids])
    return np.fromiter(chain.from_iterable(ids), np.int32), mask


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
    processor: Any = None,
) -> Dataset[dict[str, torch.Tensor]]:
    """Conversations or pairs; see `create_dataset`."""

    def built_in(files: list[str]) -> type:
        return MultiTurnSFTDataset if _are_conversations(files, config) else SFTDataset

    return create_dataset(built_in, data_files, tokenizer, config, max_samples, use, processor)


def create_dataset(
    built_in: Callable[[list[str]], type],
    data_files: list[str],
    tokenizer: "PreTrainedTokenizerBase",
    config: SupervisedDataConfig,
    max_samples: int = -1,
    use: Use = "train",
    processor: Any = None,
) -> Dataset[Any]:
    """A dataset of the class that `data.custom_cls` names, or of the `built_in` one for these files, with the same arguments.

    A custom class that is not derived from `SupervisedRows` gets `data_files` as they are. use: selects the split of folders and
    of datasets on the Hub. processor: of a model that reads images; other classes do not get one.
    """
    custom = config.custom_cls
    cls: Any = None
    if custom.path is not None:
        cls = load_plugin("data.custom_cls.path", custom.path, custom.name, base=Dataset)
    if cls is None or issubclass(cls, SupervisedRows):
        data_files = [str(file) for file in local_data_files(data_files, use, f"data.{use}_files")]
    cls = cls or built_in(data_files)
    given = {} if processor is None else {"processor": processor}
    built: Any = cls(parquet_files=data_files, tokenizer=tokenizer, config=config, max_samples=max_samples, **given)
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
