"""Prompts with images: placeholders and parts of messages to token ids and the tensors that the model's processor makes.

    messages with <image> + column of images ──place_images──► messages with image parts ──read──► pictures
    chat template ──► text ──`ImageEncoder`: the processor──► token ids, placeholders expanded + `ImageInputs`

`RowImages` does this for the rows of a dataset, with the place of the row in errors.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from lockstep.config.data import ImageDataConfig
from lockstep.data.files import FileRow
from lockstep.data.image_urls import fetched
from lockstep.data.images import ImageError, Picture, data_uri, read_image
from lockstep.protocol.images import ImageInputs
from lockstep.utils.progress import count

logger = logging.getLogger(__name__)

PLACEHOLDER, VIDEO_PLACEHOLDER = "<image>", "<video>"
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What processors return per token; all else belongs to the images."""
_IMAGE_TYPES = ("image", "image_url", "input_image")
_TEXT_TYPES = ("text", "input_text", "output_text")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes", "base64")

MAX_THREADS = 8
"""That read and prepare images when a dataset is created."""
CHUNK = 64
"""Rows that they get at a time."""

Message = dict[str, Any]
R = TypeVar("R")


def place_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None) -> list[Message]:
    """The messages with a part `{"type": "image", "image": …}` for each image, and text elsewhere.

    Each `<image>` in a text, and each image part without its own image, takes the next one of `images`. ValueError if their
    numbers differ. Messages without images stay as they are.
    """
    left = list(images or ())
    given, num_placeholders = len(left), 0

    def next_image() -> Any:
        nonlocal num_placeholders
        num_placeholders += 1
        return left.pop(0) if left else None

    def parts_of(text: str) -> Iterable[Message]:
        for i, piece in enumerate(text.split(PLACEHOLDER)):
            if i:
                yield {"type": "image", "image": next_image()}
            if piece:
                yield {"type": "text", "text": piece}

    placed: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and PLACEHOLDER in content:
            content = list(parts_of(content))
        elif isinstance(content, Sequence) and not isinstance(content, str):
            parts: list[Message] = []
            for part in content:
                kind, value = read_part(part, number)
                if kind == "text":
                    parts += parts_of(value)
                else:
                    parts.append({"type": "image", "image": next_image() if value is None else value})
            content = parts
        placed.append({**message, "content": content})
    if num_placeholders != given:
        raise ValueError(
            f"the messages have {num_placeholders} places for images ({PLACEHOLDER}, or image parts without an image), but there "
            f"are {given} images; write one {PLACEHOLDER} per image"
        )
    return placed


def read_part(part: Any, message: int) -> tuple[str, Any]:
    """("text", text) or ("image", its own image or None)."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        raise ValueError(f"a content part of message {message} is of type {type(part).__name__}, not an object")
    kind = part.get("type") or next((key for key in ("text", "image", "image_url") if part.get(key) is not None), None)
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        return "text", part["text"]
    if kind in _IMAGE_TYPES:
        own = {key: part[key] for key in _IMAGE_KEYS if part.get(key) is not None}
        return "image", own or None
    raise ValueError(f"a content part of message {message} has type {kind!r}; text and image are supported")


def with_image_parts(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages whose parts have their own images, with the parts of `place_images`; `<image>` in their text stays text."""

    def part_of(part: Any, message: int) -> Message:
        kind, value = read_part(part, message)
        return {"type": kind, kind: value}

    return [
        {**message, "content": [part_of(part, number) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for number, message in enumerate(messages)
    ]


def image_values(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images in the parts of placed messages, in order."""
    return [part["image"] for part in _image_parts(messages)]


def num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(1 for _ in _image_parts(messages))


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if part["type"] == "image")


def with_data_uris(messages: Sequence[Message], pictures: Sequence[Picture]) -> list[Message]:
    """Placed messages as plain data: each image as a data URI."""
    found = iter(pictures)

    def plain(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            part if part["type"] == "text" else {"type": "image", "image": data_uri(next(found))} for part in content
        ]

    return [{**message, "content": plain(message.get("content"))} for message in messages]


def needs_parts(tokenizer: Any) -> bool:
    """Whether its chat template renders only lists of parts, and leaves out contents that are plain text."""
    probe = "probe7719"
    try:
        return probe not in tokenizer.apply_chat_template([{"role": "user", "content": probe}], tokenize=False)
    except (TemplateError, TypeError):
        return True


def as_parts(messages: Sequence[Message]) -> list[Message]:
    """All texts as lists of parts, for such templates."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def read_pictures(
    values: Sequence[Any], folder: Path | None = None, *, fetch: Callable[[str], bytes] | None = None
) -> list[Picture]:
    """See `read_image`; ImageError with the number of the image."""
    pictures = []
    for number, value in enumerate(values):
        try:
            pictures.append(read_image(value, folder, fetch=fetch))
        except ImageError as error:
            raise ImageError(f"image {number} {error}") from error
    return pictures


class ImageEncoder:
    """Text of a chat template and pictures to token ids and tensors, by the model's processor.

    processor: of transformers, with a tokenizer. It is called with one text at a time.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        # Gemma 3's processor calls the token before an image its image token
        ids = (getattr(owner, "image_token_id", None) for owner in (processor.tokenizer, processor))
        token_id = next((token for token in ids if token is not None), None)
        if not isinstance(token_id, int):
            raise ValueError(f"{type(processor).__name__} has no placeholder token for images (image_token_id)")
        self.token_id = token_id
        self.needs_parts = needs_parts(processor.tokenizer)
        self._num_tokens: dict[tuple[int, int], int] = {}  # by size, of images that were not alone in their prompt

    def templated(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the chat template takes them."""
        return as_parts(messages) if self.needs_parts else list(messages)

    def __call__(self, text: str, pictures: Sequence[Picture]) -> tuple[list[int], ImageInputs]:
        """Token ids of the text, each of its image tokens expanded, and the inputs of the images; ImageError if they do not fit."""
        ids, tensors = self._process(text, pictures)
        total = ids.count(self.token_id)
        num_tokens = [total] if len(pictures) == 1 else [self._tokens_of(picture) for picture in pictures]
        if sum(num_tokens) != total or not all(num_tokens):
            raise ImageError(
                f"the processor made {total} image tokens of {len(pictures)} images with {num_tokens} tokens each: does the chat "
                "template render an image token for each image, and the text contain none?"
            )
        inputs = ImageInputs(
            tensors,
            self.token_id,
            tuple(num_tokens),
            tuple(picture.digest for picture in pictures),
            tuple(picture.file for picture in pictures),
        )
        return ids, inputs

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], ImageInputs]:
        """Token ids with one image token per picture, each of them expanded, and the inputs of the images."""
        if ids.count(self.token_id) != len(pictures):
            raise ImageError(
                f"{ids.count(self.token_id)} image tokens (id {self.token_id}), but {len(pictures)} images"
            )
        expanded, inputs = self(self.processor.tokenizer.decode([self.token_id]) * len(pictures), pictures)
        if set(expanded) != {self.token_id}:
            raise ImageError(
                "the model's processor writes more than image tokens for an image, which token ids cannot leave out"
            )
        lengths = iter(inputs.num_tokens)
        return [token for token in ids for _ in range(next(lengths) if token == self.token_id else 1)], inputs

    def _process(self, text: str, pictures: Sequence[Picture]) -> tuple[list[int], dict[str, Any]]:
        try:
            out = self.processor(
                text=[text], images=[picture.rgb for picture in pictures], return_tensors="pt", add_special_tokens=False
            )
        except (ValueError, IndexError, TypeError, RuntimeError, StopIteration) as error:
            cause = str(error) or type(error).__name__
            raise ImageError(f"the processor ({type(self.processor).__name__}) rejects the prompt: {cause}") from error
        ids: list[int] = out["input_ids"][0].tolist()
        return ids, {name: value for name, value in out.items() if name not in OF_TOKENS and hasattr(value, "shape")}

    def _tokens_of(self, picture: Picture) -> int:
        """Placeholder tokens of one image; a function of its size."""
        size = picture.rgb.size
        if size not in self._num_tokens:
            message = {"role": "user", "content": [{"type": "image"}]}
            text = self.processor.tokenizer.apply_chat_template([message], tokenize=False)
            self._num_tokens[size] = self._process(text, [picture])[0].count(self.token_id)
        return self._num_tokens[size]


class RowImages:
    """The images of a dataset's rows. processor: see `ImageEncoder`; config: the dataset's."""

    def __init__(self, processor: Any, config: ImageDataConfig) -> None:
        self.encoder = ImageEncoder(processor)
        self.config = config
        self._fetched: dict[str, bytes] = {}  # by URL
        tokenizer = processor.tokenizer
        own = {tokenizer.convert_ids_to_tokens(self.encoder.token_id)}
        own |= {getattr(processor, name, None) for name in ("image_token", "boi_token")} - {None, PLACEHOLDER}
        videos = {getattr(processor, "video_token", None)} - {None}
        write = f"the model's own token for images; write {PLACEHOLDER} instead"
        self._refused = dict.fromkeys(map(str, own - {PLACEHOLDER}), write)
        place = "a place for a video; only text and images are supported"
        self._refused |= dict.fromkeys(map(str, videos | {VIDEO_PLACEHOLDER}), place)
        self._own = sorted(map(str, own | videos))

    def place(self, row: FileRow, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """See `place_images`; ValueError if places and images of the row are not as many."""
        with _located(row, self.config.image_key):
            images = row.columns.get(self.config.image_key)
            if images is not None and not isinstance(images, list | tuple):
                raise ValueError(f"must be a list of images, not {type(images).__name__}")
            placed = place_images(messages, images)
            for text in _texts(placed):
                for token, what in self._refused.items():
                    if token in text:
                        raise ValueError(f"a text contains {token}, {what}")
        for message in placed:
            others = {name: value for name, value in message.items() if name != "content"}
            self.check_text(row, "a message", json.dumps(others, ensure_ascii=False, default=str))
        return placed

    def check_text(self, row: FileRow, name: str, text: str) -> None:
        """ValueError if a text that has no places for images contains a token of the model for them. name: of the text."""
        if found := [token for token in self._own if token in text]:
            raise ValueError(f"{row.location}: {name} contains {found[0]}, the model's own token for images or videos")

    def pictures(self, row: FileRow, messages: Sequence[Message]) -> list[Picture]:
        """The pictures of placed messages; ImageError if one cannot be used."""
        with _located(row, self.config.image_key):
            fetch = self._fetch if self.config.allow_image_urls else None
            return read_pictures(image_values(messages), Path(row.file).parent, fetch=fetch)

    def _fetch(self, url: str) -> bytes:
        """What a URL has, which is fetched once."""
        if url not in self._fetched:
            self._fetched[url] = fetched(url, allow_private=self.config.allow_private_image_urls)
        return self._fetched[url]

    def encode(self, row: FileRow, text: str, pictures: Sequence[Picture]) -> tuple[list[int], ImageInputs]:
        """See `ImageEncoder`."""
        with _located(row, self.config.image_key):
            return self.encoder(text, pictures)

    def check_cut(self, row: FileRow, ids: Sequence[int], kept: Sequence[int], key: str) -> None:
        """ValueError if truncation leaves `kept` of `ids`, without a placeholder of an image. key: of the longest length."""
        token = self.encoder.token_id
        if list(kept).count(token) != list(ids).count(token):
            raise ValueError(
                f"{row.location}: the prompt has {len(ids)} tokens, more than {key}={len(kept)}, and data.truncation="
                f"{getattr(self.config, 'truncation', '')} would cut tokens of an image; raise {key}, or lower data.max_pixels"
            )


@contextmanager
def _located(row: FileRow, column: str) -> Iterator[None]:
    """Name the row and the column in errors."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{row.location}, column {column!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{row.location}, column {column!r}: {error}") from error


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if part["type"] == "text")


def usable(prepare: Callable[[FileRow], R], rows: Sequence[FileRow], *, drop: bool) -> list[R | None]:
    """The result of each row; ImageError of the first bad one or, if `drop`, None for each."""

    def attempt(row: FileRow) -> R | ImageError:
        try:
            return prepare(row)
        except ImageError as error:
            return error

    found: list[R | None] = []
    bad: list[ImageError] = []
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        for start in range(0, len(rows), CHUNK):
            count(start, len(rows), "rows with images")
            for result in pool.map(attempt, rows[start : start + CHUNK]):
                if not isinstance(result, ImageError):
                    found.append(result)
                    continue
                if not drop:
                    raise ImageError(f"{result}; or set data.filter_bad_images=true to drop such rows") from result
                bad.append(result)
                found.append(None)
    if bad:
        logger.warning(
            "dropped %d of %d rows with images (data.filter_bad_images); the first: %s", len(bad), len(rows), bad[0]
        )
    return found
