"""One image of a row, in any form that rows have, as a checked RGB picture.

path | bytes | {"bytes", "path"} | data URI | PIL image | URL (if `data.allow_image_urls`)  ──read_image──►  `Picture`
"""

import base64
import binascii
import hashlib
import io
import stat
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lockstep.utils.data_uri import as_data_uri

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats of PIL that are read; others may run programs."""
MOST_PIXELS = 89_478_485
"""Of one image, PIL's own limit: a larger one is taken for a decompression bomb."""
MOST_BYTES = 64 * 2**20
"""Of one image's file."""
MOST_ASPECT = 200
"""Longer side by shorter side; processors round the shorter one to nothing beyond it."""
ORIENTATION = 0x0112
"""EXIF tag."""
_DIRECT = ("RGB", "L", "1", "P", "CMYK", "YCbCr")
"""Modes that PIL converts to RGB without a choice of ours."""
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, RuntimeError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""What PIL's decoders raise for files that are damaged."""
_DATA_URI = "data:"
_URLS = ("http://", "https://")


class ImageError(ValueError):
    """What is wrong with an image, and what to do; without its place, which the caller knows."""


@dataclass(frozen=True, eq=False)
class Picture:
    """rgb: in mode RGB, upright, one frame. original: the encoded file, if its pixels are those of `rgb`."""

    rgb: Image.Image
    original: bytes | None = None

    @cached_property
    def file(self) -> bytes:
        """The picture as a file: the original one, or a PNG."""
        if self.original is not None:
            return self.original
        target = io.BytesIO()
        self.rgb.save(target, "PNG", compress_level=1)
        return target.getvalue()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that tell its pixels from others."""
        return hashlib.blake2b(self.rgb.tobytes(), digest_size=16, salt=struct.pack("<II", *self.rgb.size)).digest()


def read_image(value: Any, folder: Path | None = None, *, fetch: Callable[[str], bytes] | None = None) -> Picture:
    """The picture; ImageError if it cannot be used.

    folder: where relative paths start, if they do not lead from the current folder.
    fetch:  reads URLs, such as `image_urls.fetched`; None refuses them.
    """
    if isinstance(value, Mapping) and isinstance(value.get("image"), Image.Image):
        value = value["image"]
    if isinstance(value, Image.Image):
        return _checked(value, None)
    content = content_of(value, folder, fetch)
    if not content:
        raise ImageError("is empty (0 bytes); write the file again")
    if len(content) > MOST_BYTES:
        raise ImageError(f"has {len(content)} bytes, more than {MOST_BYTES}; make it smaller")
    try:
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ImageError(f"has more than {2 * MOST_PIXELS} pixels (a decompression bomb?); make it smaller") from None
    except Image.UnidentifiedImageError:
        raise ImageError(
            f"is not an image, or not one of {', '.join(FORMATS)} (it begins with {content[:8]!r}); convert it to PNG"
        ) from None
    except _DAMAGED as error:
        raise ImageError(f"cannot be read ({error}); write the file again") from error
    return _checked(opened, content)


def data_uri(picture: Picture) -> str:
    return as_data_uri(picture.file)


def content_of(
    value: Any, folder: Path | None, fetch: Callable[[str], bytes] | None, most_bytes: int = MOST_BYTES
) -> bytes:
    """The file that a row's value has or names; ImageError if it cannot be had. most_bytes: of a file on this machine."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        given = [
            value[key] for key in ("bytes", "image", "image_url", "url", "path", "base64") if value.get(key) is not None
        ]
        if not given:
            raise ImageError(f"has neither bytes nor a path (keys: {', '.join(map(str, value))})")
        if value.get("base64") is given[0]:
            return _decoded(str(given[0]))
        return content_of(given[0], folder, fetch, most_bytes)
    if isinstance(value, Path):
        return _file(value, folder, most_bytes)
    if not isinstance(value, str):
        raise ImageError(
            f"is of type {type(value).__name__}; give a path, bytes, {{'bytes': ...}}, a data URI or a PIL image"
        )
    if value.startswith(_DATA_URI):
        head, comma, body = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ImageError(f"is a data URI without base64 ({head[:40]!r}); write data:image/png;base64,...")
        return _decoded(body)
    if value.lower().startswith(_URLS):
        if fetch is None:
            raise ImageError(f"is a URL ({value[:80]}); download it, or set data.allow_image_urls=true")
        return fetch(value)
    return _file(Path(value.removeprefix("file://")), folder, most_bytes)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"is not valid base64 ({error}); encode the file again") from error


def _file(path: Path, folder: Path | None, most_bytes: int) -> bytes:
    place = regular_file(path, folder, most_bytes)
    try:
        return place.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def regular_file(path: Path, folder: Path | None, most_bytes: int) -> Path:
    """The file that a row's path names; ImageError if there is none, or if it is larger."""
    try:
        place = image_path(path, folder)
        status = place.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ImageError(f"{path} is a device or a pipe; give a file")
        if status.st_size > most_bytes:
            raise ImageError(f"{path} has {status.st_size} bytes, more than {most_bytes}; make it smaller")
        return place
    except FileNotFoundError:
        where = f" (looked in the current folder and in {folder})" if folder and not path.is_absolute() else ""
        raise ImageError(f"no such file: {str(path)[:200]}{where}") from None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~name of no user
        if isinstance(error, ImageError):
            raise
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ImageError:
    return ImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}: {str(path)[:80]!r}")


def image_path(path: Path, folder: Path | None) -> Path:
    """The file that a row's path names."""
    path = path.expanduser()
    return folder / path if folder is not None and not path.is_absolute() and not path.exists() else path


def _checked(opened: Image.Image, content: bytes | None) -> Picture:
    width, height = opened.size
    if not width or not height:
        raise ImageError(f"has no pixels ({width} x {height})")
    if width * height > MOST_PIXELS:
        raise ImageError(
            f"has {width} x {height} pixels, more than {MOST_PIXELS} (a decompression bomb?); make it smaller"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ImageError(
            f"has {width} x {height} pixels: one side is over {MOST_ASPECT} times the other; crop or pad it"
        )
    try:
        if opened.format != "MPO" and (frames := getattr(opened, "n_frames", 1)) > 1:
            raise ImageError(
                f"is animated or has several pages ({frames} frames); write the frame that is meant as PNG"
            )
        opened.load()
        is_upright = opened.getexif().get(ORIENTATION, 1) == 1
        rgb = _as_rgb(opened if is_upright else ImageOps.exif_transpose(opened))
    except ImageError:
        raise
    except _DAMAGED as error:
        raise ImageError(f"is truncated or damaged ({error}); write the file again") from error
    return Picture(rgb, content if rgb is opened else None)


def _as_rgb(image: Image.Image) -> Image.Image:
    """Transparent pixels on white, 16-bit greys by their upper byte."""
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:
            grey[values == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode not in _DIRECT:
        raise ImageError(f"has mode {image.mode}, which has no range of values; write it as 8-bit RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
