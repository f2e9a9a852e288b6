"""Prompts with images and videos: placeholders and parts of messages to token ids and the tensors that the model's processor makes.

    messages with <image>, <video> + columns of both ──place_images──► messages with parts ──read──► pictures: images and videos
    chat template ──► text ──`ImageEncoder`: the processor──► token ids, placeholders expanded + `ImageInputs`

`RowImages` does this for the rows of a dataset, with the place of the row in errors.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from lockstep.config.data import ImageDataConfig
from lockstep.data.files import FileRow
from lockstep.data.image_urls import fetched
from lockstep.data.images import ImageError, Picture, read_image
from lockstep.data.videos import Sampling, Video, read_video
from lockstep.protocol.images import ImageInputs
from lockstep.utils.data_uri import as_data_uri
from lockstep.utils.progress import count

logger = logging.getLogger(__name__)

PLACEHOLDER, VIDEO_PLACEHOLDER = "<image>", "<video>"
_KINDS = {PLACEHOLDER: "image", VIDEO_PLACEHOLDER: "video"}
_PLACES = re.compile(f"({PLACEHOLDER}|{VIDEO_PLACEHOLDER})")
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What processors return per token; all else belongs to the images."""
_IMAGE_TYPES = ("image", "image_url", "input_image")
_VIDEO_TYPES = ("video", "video_url")
_TEXT_TYPES = ("text", "input_text", "output_text")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes", "base64")

MAX_THREADS = 8
"""That read and prepare images when a dataset is created."""
CHUNK = 64
"""Rows that they get at a time."""

Message = dict[str, Any]
AnyPicture = Picture | Video
R = TypeVar("R")


def place_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None, videos: Sequence[Any] | None = None
) -> list[Message]:
    """The messages with a part `{"type": "image", "image": …}` for each image, the same for each video, and text elsewhere.

    Each `<image>` in a text, and each image part without its own image, takes the next one of `images`; likewise for videos.
    ValueError if their numbers differ. Messages without either stay as they are.
    """
    left = {"image": list(images or ()), "video": list(videos or ())}
    given = {kind: len(values) for kind, values in left.items()}
    num_places = dict.fromkeys(left, 0)

    def next_one(kind: str) -> Any:
        num_places[kind] += 1
        return left[kind].pop(0) if left[kind] else None

    def parts_of(text: str) -> Iterable[Message]:
        for piece in _PLACES.split(text):
            if kind := _KINDS.get(piece):
                yield {"type": kind, kind: next_one(kind)}
            elif piece:
                yield {"type": "text", "text": piece}

    placed: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and _PLACES.search(content):
            content = list(parts_of(content))
        elif isinstance(content, Sequence) and not isinstance(content, str):
            parts: list[Message] = []
            for part in content:
                kind, value = read_part(part, number, with_videos=True)
                if kind == "text":
                    parts += parts_of(value)
                else:
                    parts.append({"type": kind, kind: next_one(kind) if value is None else value})
            content = parts
        placed.append({**message, "content": content})
    for place, kind in _KINDS.items():
        if num_places[kind] != given[kind]:
            raise ValueError(
                f"the messages have {num_places[kind]} places for {kind}s ({place}, or {kind} parts without {kind}), but there "
                f"are {given[kind]} {kind}s; write one {place} per {kind}"
            )
    return placed


def read_part(part: Any, message: int, *, with_videos: bool = False) -> tuple[str, Any]:
    """("text", text), or ("image", its own image or None); "video" likewise, if `with_videos`."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        raise ValueError(f"a content part of message {message} is of type {type(part).__name__}, not an object")
    names = ("text", "image", "image_url", *_VIDEO_TYPES)
    kind = part.get("type") or next((key for key in names if part.get(key) is not None), None)
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        return "text", part["text"]
    if kind in _IMAGE_TYPES:
        own = {key: part[key] for key in _IMAGE_KEYS if part.get(key) is not None}
        return "image", own or None
    if kind in _VIDEO_TYPES and with_videos:
        own = {key: value for key, value in part.items() if key not in ("type", "text") and value is not None}
        return "video", own or None
    supported = "text, image and video are" if with_videos else "text and image are"
    raise ValueError(f"a content part of message {message} has type {kind!r}; {supported} supported")


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
    """The images in the parts of placed messages, in order; ImageError for a video, which only prompts of rows have."""
    values = []
    for kind, value in picture_values(messages):
        if kind != "image":
            raise ImageError("a message has a video; only text and images are read here")
        values.append(value)
    return values


def picture_values(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """The images and videos in the parts of placed messages, in order: ("image" or "video", value)."""
    return [
        (part["type"], part.get(part["type"]))
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if part["type"] in _KINDS.values()
    ]


def has_videos(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(kind == "video" for kind, _ in picture_values(messages))


def num_pictures(messages: Sequence[Mapping[str, Any]]) -> int:
    """Images and videos."""
    return len(picture_values(messages))


def with_data_uris(messages: Sequence[Message], pictures: Sequence[AnyPicture]) -> list[Message]:
    """Placed messages as plain data: each image as a data URI; of a video, a picture of its frames."""
    found = iter(pictures)

    def plain(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            part if part["type"] == "text" else {"type": part["type"], part["type"]: as_data_uri(next(found).file)}
            for part in content
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
    """Text of a chat template, images and videos to token ids and tensors, by the model's processor.

    processor: of transformers, with a tokenizer. It is called with one text at a time. Its `no_videos` says why it takes no videos;
               empty if it does.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        # Gemma 3's processor calls the token before an image its image token
        ids = (getattr(owner, "image_token_id", None) for owner in (processor.tokenizer, processor))
        token_id = next((token for token in ids if token is not None), None)
        if not isinstance(token_id, int):
            raise ValueError(f"{type(processor).__name__} has no placeholder token for images (image_token_id)")
        self.token_id = token_id
        self.no_videos: str = getattr(processor, "no_videos", f"{type(processor).__name__} takes none")
        self.video_token_id: int | None = None if self.no_videos else processor.video_token_id
        self.needs_parts = needs_parts(processor.tokenizer)
        self._num_tokens: dict[tuple[int, ...], int] = {}  # by size, of images that were not alone in their prompt

    @property
    def placeholders(self) -> set[int]:
        return {self.token_id, self.token_id if self.video_token_id is None else self.video_token_id}

    def templated(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the chat template takes them."""
        return as_parts(messages) if self.needs_parts else list(messages)

    def __call__(self, text: str, pictures: Sequence[AnyPicture]) -> tuple[list[int], ImageInputs]:
        """Token ids of the text, each of its image tokens expanded, and the inputs of the images; ImageError if they do not fit."""
        ids, tensors = self._process(text, pictures)
        tokens = [self._token_of(picture) for picture in pictures]
        num_tokens = (
            [ids.count(tokens[0])] if len(pictures) == 1 else [self._tokens_of(picture) for picture in pictures]
        )
        found = [token for token in ids if token in self.placeholders]
        expected = [token for token, number in zip(tokens, num_tokens) for _ in range(number)]
        if found != expected or not all(num_tokens):
            raise ImageError(
                f"the processor made {len(found)} image tokens of {len(pictures)} images with {num_tokens} tokens each: does the "
                "chat template render an image token for each image, in order, and the text contain none?"
            )
        are_videos = tuple(isinstance(picture, Video) for picture in pictures)
        inputs = ImageInputs(
            tensors,
            self.token_id,
            tuple(num_tokens),
            tuple(picture.digest for picture in pictures),
            tuple(picture.file for picture in pictures),
            are_videos if any(are_videos) else (),
            self.video_token_id if any(are_videos) else None,
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

    def _process(self, text: str, pictures: Sequence[AnyPicture]) -> tuple[list[int], dict[str, Any]]:
        images = [picture.rgb for picture in pictures if isinstance(picture, Picture)]
        videos = [picture for picture in pictures if isinstance(picture, Video)]
        given: dict[str, Any] = {"images": images} if images else {}
        if videos:
            given["videos"] = [video.pixels for video in videos]
            metadata = [video.metadata for video in videos]
            given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata}
        try:
            out = self.processor(text=[text], **given, return_tensors="pt", add_special_tokens=False)
        except (ValueError, IndexError, TypeError, RuntimeError, StopIteration) as error:
            cause = str(error) or type(error).__name__
            raise ImageError(f"the processor ({type(self.processor).__name__}) rejects the prompt: {cause}") from error
        ids: list[int] = out["input_ids"][0].tolist()
        return ids, {name: value for name, value in out.items() if name not in OF_TOKENS and hasattr(value, "shape")}

    def _token_of(self, picture: AnyPicture) -> int:
        """The placeholder token of one."""
        if isinstance(picture, Picture):
            return self.token_id
        if self.video_token_id is None:
            raise ImageError(f"the prompt has videos: {self.no_videos}")
        return self.video_token_id

    def _tokens_of(self, picture: AnyPicture) -> int:
        """Placeholder tokens of one image or video; a function of its size."""
        kind, size = ("video", picture.size) if isinstance(picture, Video) else ("image", picture.rgb.size)
        if size not in self._num_tokens:
            message = {"role": "user", "content": [{"type": kind}]}
            text = self.processor.tokenizer.apply_chat_template([message], tokenize=False)
            self._num_tokens[size] = self._process(text, [picture])[0].count(self._token_of(picture))
        return self._num_tokens[size]


class RowImages:
    """The images and videos of a dataset's rows. processor: see `ImageEncoder`; config: the dataset's."""

    def __init__(self, processor: Any, config: ImageDataConfig) -> None:
        self.encoder = ImageEncoder(processor)
        self.config = config
        self._fetched: dict[str, bytes] = {}  # by URL
        tokenizer = processor.tokenizer
        images = {tokenizer.convert_ids_to_tokens(self.encoder.token_id)}
        images |= {getattr(processor, name, None) for name in ("image_token", "boi_token")}
        own = {PLACEHOLDER: images - {None}, VIDEO_PLACEHOLDER: {getattr(processor, "video_token", None)} - {None}}
        self._own = sorted(str(token) for tokens in own.values() for token in tokens)
        self._refused = {
            str(token): f"the model's own token for {_KINDS[place]}s; write {place} instead"
            for place, tokens in own.items()
            for token in tokens - {*_KINDS}
        }

    def place(self, row: FileRow, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """See `place_images`; ValueError if places and images or videos of the row are not as many."""
        columns = {kind: row.columns.get(name) for kind, name in self._columns.items()}
        for kind, name in self._columns.items():
            with _located(row, name):
                if columns[kind] is not None and not isinstance(columns[kind], list | tuple):
                    raise ValueError(f"must be a list of {kind}s, not {type(columns[kind]).__name__}")
        if self.encoder.no_videos and (columns["video"] or _asks_for_videos(messages)):
            raise ValueError(
                f"{row.location} has videos, or places for them ({VIDEO_PLACEHOLDER}), but {self.encoder.no_videos}"
            )
        with _located(row, self.config.image_key):
            placed = place_images(messages, columns["image"], columns["video"])
            for text in _texts(placed):
                for token, what in self._refused.items():
                    if token in text:
                        raise ValueError(f"a text contains {token}, {what}")
        for message in placed:
            others = {name: value for name, value in message.items() if name != "content"}
            self.check_text(row, "a message", json.dumps(others, ensure_ascii=False, default=str))
        return placed

    @property
    def _columns(self) -> dict[str, str]:
        """Kind -> column."""
        return {"image": self.config.image_key, "video": self.config.video_key}

    def check_text(self, row: FileRow, name: str, text: str) -> None:
        """ValueError if a text that has no places for images contains a token of the model for them. name: of the text."""
        if found := [token for token in self._own if token in text]:
            raise ValueError(f"{row.location}: {name} contains {found[0]}, the model's own token for images or videos")

    def pictures(self, row: FileRow, messages: Sequence[Message]) -> list[AnyPicture]:
        """The images and videos of placed messages; ImageError if one cannot be used."""
        folder, config = Path(row.file).parent, self.config
        fetch = self._fetch if config.allow_image_urls else None
        sampling = Sampling(config.video_fps, config.max_video_frames)
        found: list[AnyPicture] = []
        number = dict.fromkeys(self._columns, 0)
        for kind, value in picture_values(messages):
            with _located(row, self._columns[kind]):
                try:
                    if kind == "video":
                        found.append(read_video(value, folder, sampling=sampling, fetch=fetch))
                    else:
                        found.append(read_image(value, folder, fetch=fetch))
                except ImageError as error:
                    raise ImageError(f"{kind} {number[kind]} {error}") from error
            number[kind] += 1
        return found

    def _fetch(self, url: str) -> bytes:
        """What a URL has, which is fetched once."""
        if url not in self._fetched:
            self._fetched[url] = fetched(url, allow_private=self.config.allow_private_image_urls)
        return self._fetched[url]

    def encode(self, row: FileRow, text: str, pictures: Sequence[AnyPicture]) -> tuple[list[int], ImageInputs]:
        """See `ImageEncoder`."""
        kind = "video" if all(isinstance(picture, Video) for picture in pictures) else "image"
        with _located(row, self._columns[kind]):
            return self.encoder(text, pictures)

    def check_cut(self, row: FileRow, ids: Sequence[int], kept: Sequence[int], key: str) -> None:
        """ValueError if truncation leaves `kept` of `ids`, without a placeholder of an image. key: of the longest length."""
        before, after = (sum(token in self.encoder.placeholders for token in tokens) for tokens in (ids, kept))
        if before != after:
            raise ValueError(
                f"{row.location}: the prompt has {len(ids)} tokens, more than {key}={len(kept)}, and data.truncation="
                f"{getattr(self.config, 'truncation', '')} would cut tokens of an image; raise {key}, or lower data.max_pixels "
                "or data.max_video_pixels"
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


def _asks_for_videos(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages that are not placed have places for videos, or videos."""

    def asks(content: Any) -> bool:
        if isinstance(content, list | tuple):
            return any(asks(part) for part in content)
        if isinstance(content, Mapping):
            return content.get("type") in _VIDEO_TYPES or asks(content.get("text"))
        return isinstance(content, str) and VIDEO_PLACEHOLDER in content

    return any(asks(message.get("content")) for message in messages)


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
