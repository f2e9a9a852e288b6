"""One video of a row, in any form that rows have, as checked RGB frames with their times.

list of frames | path | bytes | URL | {"video": one of these, "fps": ...}  ──read_video──►  `Video`

Frames of a file are sampled as Qwen's own tools do: `fps` per second of the video, at least 4, at most `max_frames`, an even
number, evenly from the first to the last. A list of frames is taken as it is, `fps` of them per second; of one that has more than
`max_frames` as many are taken evenly.
"""

import hashlib
import io
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.data.images import MOST_ASPECT, MOST_BYTES, MOST_PIXELS, ImageError, content_of, read_image, regular_file

SOURCES = ("video", "bytes", "video_url", "url", "path", "base64")
"""Keys of a video's mapping that say where it is; the first that is given counts."""
MIN_FRAMES = 4
"""Sampled from a file that has as many."""
MOST_FILE_BYTES = 4 * 2**30
"""Of a video's file."""
MOST_FRAME_PIXELS = 4 * MOST_PIXELS
"""Of all sampled frames together: 1 GiB of RGB."""
_OPTIONS = ("fps", "sample_fps", "nframes", "min_frames", "max_frames")
_SHEET_COLUMNS = 8
_SHEET_WIDTH = 128
"""Of a frame in `Video.file`."""


@dataclass(frozen=True)
class Sampling:
    """fps: frames per second of a video's file, and of a list of frames that does not say it. max_frames: of a video."""

    fps: float
    max_frames: int


@dataclass(frozen=True, eq=False)
class Video:
    """
    frames:     in mode RGB, of one size; two at least.
    indices:    their numbers among the frames of the source.
    num_source: frames of the source.
    fps:        of the source.
    """

    frames: tuple[Image.Image, ...]
    indices: tuple[int, ...]
    num_source: int
    fps: float

    @property
    def size(self) -> tuple[int, int, int]:
        """Width, height and number of frames."""
        return (*self.frames[0].size, len(self.frames))

    @property
    def metadata(self) -> dict[str, Any]:
        """As transformers' video processors take it."""
        return {"total_num_frames": self.num_source, "fps": self.fps, "frames_indices": list(self.indices)}

    @cached_property
    def pixels(self) -> np.ndarray:
        """(frames, height, width, 3)"""
        return np.stack([np.asarray(frame) for frame in self.frames])

    @cached_property
    def file(self) -> bytes:
        """Small copies of the frames side by side, as a JPEG."""
        width, height = self.frames[0].size
        small = (_SHEET_WIDTH, max(1, _SHEET_WIDTH * height // width))
        columns = min(_SHEET_COLUMNS, len(self.frames))
        sheet = Image.new("RGB", (columns * small[0], -(-len(self.frames) // columns) * small[1]))
        for i, frame in enumerate(self.frames):
            sheet.paste(frame.resize(small), (i % columns * small[0], i // columns * small[1]))
        target = io.BytesIO()
        sheet.save(target, "JPEG", quality=80)
        return target.getvalue()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that tell its pixels and their times from others."""
        found = hashlib.blake2b(digest_size=16, salt=b"video")
        found.update(struct.pack(f"<3Idq{len(self.indices)}I", *self.size, self.fps, self.num_source, *self.indices))
        for frame in self.frames:
            found.update(frame.tobytes())
        return found.digest()


def read_video(
    value: Any, folder: Path | None = None, *, sampling: Sampling, fetch: Callable[[str], bytes] | None = None
) -> Video:
    """The video; ImageError if it cannot be used. folder, fetch: see `read_image`."""
    options: dict[str, Any] = {}
    while isinstance(value, Mapping):
        key = next((key for key in SOURCES if value.get(key) is not None), None)
        if key is None:
            raise ImageError(f"has neither frames nor a file (keys: {', '.join(map(str, value))})")
        if key == "base64":
            value = content_of({"base64": value[key]}, folder, fetch, MOST_FILE_BYTES)
            break
        options |= {name: given for name, given in value.items() if name not in SOURCES and given is not None}
        value = value[key]
    options = _checked_options(options)
    if isinstance(value, list | tuple):
        return _of_frames(value, folder, fetch, sampling, options)
    return _of_file(_source(value, folder, fetch), sampling, options)


def sampled_frames(num: int, seconds: float, sampling: Sampling, options: Mapping[str, Any]) -> list[int]:
    """Which of `num` frames over `seconds` are taken. options: those of the video, over `sampling`."""
    most = min(num, sampling.max_frames, int(options.get("max_frames", num)))
    wanted = options.get("nframes", seconds * options.get("fps", sampling.fps))
    count = min(max(wanted, options.get("min_frames", MIN_FRAMES)), most)
    return _spread(num, max(2, int(count) // 2 * 2) if num > 1 else 1)


def _spread(num: int, count: int) -> list[int]:
    found: list[int] = np.linspace(0, num - 1, min(num, count)).round().astype(int).tolist()
    return found


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in options.items() if name not in ("type", *SOURCES)}
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ImageError(
                f"has the key {name!r}, which is not read (keys that are: {', '.join(_OPTIONS)}); remove it, or use "
                "data.video_fps, data.max_video_frames and data.max_video_pixels, which hold for all videos"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ImageError(f"has {name}={value!r}; write a number above 0")
    if "sample_fps" in options:  # qwen_vl_utils' name for the fps of a list of frames
        options.setdefault("fps", options.pop("sample_fps"))
    if "nframes" in options and "fps" in options:
        raise ImageError("has both fps and nframes; remove one of them")
    return options


def _of_frames(
    values: Sequence[Any],
    folder: Path | None,
    fetch: Callable[[str], bytes] | None,
    sampling: Sampling,
    options: Mapping[str, Any],
) -> Video:
    if not values:
        raise ImageError("has no frames")
    most = min(sampling.max_frames, int(options.get("nframes", options.get("max_frames", len(values)))))
    indices = _spread(len(values), max(1, most))
    frames = []
    for i in indices:
        try:
            frames.append(read_image(values[i], folder, fetch=fetch).rgb)
        except ImageError as error:
            raise ImageError(f"frame {i} {error}") from error
    return _checked(frames, indices, len(values), float(options.get("fps", sampling.fps)))


def _source(value: Any, folder: Path | None, fetch: Callable[[str], bytes] | None) -> Any:
    """What PyAV opens: a path, or a file of bytes."""
    is_place = isinstance(value, str) and value.lower().startswith(("data:", "http://", "https://"))
    if isinstance(value, str | Path) and not is_place:
        return str(regular_file(Path(str(value).removeprefix("file://")), folder, MOST_FILE_BYTES))
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise ImageError(
            f"is of type {type(value).__name__}; give a list of frames, a path, bytes, or {{'video': one of these}}"
        )
    content = content_of(value, folder, fetch, MOST_FILE_BYTES)
    is_url = isinstance(value, str) and not value.lower().startswith("data:")
    if len(content) > (most := MOST_BYTES if is_url else MOST_FILE_BYTES):
        raise ImageError(f"has more than {most} bytes; {'download it' if is_url else 'make it smaller'}")
    if not content:
        raise ImageError("is empty (0 bytes); write the file again")
    return io.BytesIO(content)


def _of_file(source: Any, sampling: Sampling, options: Mapping[str, Any]) -> Video:
    try:
        import av
    except ImportError as error:
        raise ImageError(
            'is a file, which PyAV decodes: pip install "lockstep-rl[video]", or write it as a list of frames'
        ) from error
    try:
        # content may name other files and hosts (playlists, SDP), which are not opened
        protocols = "file" if isinstance(source, str) else "none"
        with av.open(source, options={"protocol_whitelist": protocols}) as container:
            if not container.streams.video:
                raise ImageError("has no video stream; give a file with one")
            stream = container.streams.video[0]
            if stream.width * stream.height > MOST_PIXELS:
                raise ImageError(
                    f"has {stream.width} x {stream.height} pixels, more than {MOST_PIXELS}; make it smaller"
                )
            times = sorted(
                packet.pts for packet in container.demux(stream) if packet.pts is not None and not packet.is_discard
            )
            # an edit list may leave frames out, too; the duration is without them
            if len(times) < stream.frames and not _reaches_end(stream, times):
                raise ImageError(f"is truncated: it has {len(times)} of {stream.frames} frames; write the file again")
            if not times:
                raise ImageError("has no frames")
            fps = _fps_of(stream, times)
            indices = sampled_frames(len(times), len(times) / fps, sampling, options)
            _check_pixels(stream.width, stream.height, len(indices))
            frames = _decoded(container, stream, indices)
    except ImageError:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise ImageError(f"is no video that PyAV decodes ({error}); convert it to MP4") from error
    if len(frames) < len(indices):
        raise ImageError(f"is truncated or damaged: {len(frames)} of {len(indices)} frames are decoded")
    return _checked(frames, indices, len(times), fps)


def _fps_of(stream: Any, times: Sequence[int]) -> float:
    """Frames per second: by the times of the first and the last frame, or by the header of a single frame."""
    if len(times) > 1 and times[-1] > times[0]:
        return float((len(times) - 1) / ((times[-1] - times[0]) * stream.time_base))
    return float(stream.average_rate or 1)


def _reaches_end(stream: Any, times: Sequence[int]) -> bool:
    """Whether the last frame is where the stream's duration ends, up to three frames."""
    if not times or not stream.duration:
        return False
    return bool(times[-1] - (stream.start_time or 0) + 3 * stream.duration / len(times) >= stream.duration)


def _decoded(container: Any, stream: Any, indices: Sequence[int]) -> list[Image.Image]:
    """The frames of these numbers, upright; fewer if the stream ends before."""
    container.seek(0)
    stream.thread_type = "AUTO"
    found: list[Image.Image] = []
    wanted = set(indices)
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            image = frame.to_image()
            found.append(image.rotate(frame.rotation, expand=True) if frame.rotation else image)
        if number == indices[-1]:
            break
    return found


def _check_pixels(width: int, height: int, num_frames: int) -> None:
    if width * height * num_frames > MOST_FRAME_PIXELS:
        raise ImageError(
            f"has {num_frames} frames of {width} x {height}, together more than {MOST_FRAME_PIXELS} pixels; make it smaller, or "
            "lower data.max_video_frames or data.video_fps"
        )


def _checked(frames: Sequence[Image.Image], indices: Sequence[int], num_source: int, fps: float) -> Video:
    width, height = frames[0].size
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ImageError(
            f"has {width} x {height} pixels: one side is over {MOST_ASPECT} times the other; crop or pad it"
        )
    _check_pixels(width, height, len(frames))
    for i, frame in zip(indices, frames):
        if frame.size != (width, height):
            raise ImageError(f"frame {i} has {frame.size[0]} x {frame.size[1]} pixels, frame 0 {width} x {height}")
    if len(frames) == 1:  # a temporal patch has two frames
        return Video((frames[0], frames[0]), (0, 0), 2, fps)
    return Video(tuple(frames), tuple(indices), num_source, fps)
