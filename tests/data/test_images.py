"""Images of rows: 15 kinds of bad input name file, row and column before the first step; good ones are what the processor makes."""

import base64
import hashlib
import io
import json
import pickle
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.config.data import DataConfig
from lockstep.data import image_urls
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.data.fingerprint import content_of
from lockstep.data.image_prompts import place_images
from lockstep.data.image_urls import fetched
from lockstep.data.images import ImageError, read_image
from lockstep.data.loader import create_dataloader
from lockstep.data.rl_dataset import PromptDataset, RLHFDataset, collate_fn
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.protocol.images import ImageInputs
from lockstep.utils.data_uri import as_data_uri
from tests.data.image_rows import dataset_of, encoded, write
from tests.tiny_vision import FAMILIES, save_tiny_vision_model, tiny_image


def png(width: int, height: int) -> bytes:
    """A PNG file whose header has this size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")
    )


A, B = tiny_image(48, 32), tiny_image(64, 64, seed=1)
FILE = encoded(A)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"))


GOOD = {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [{"bytes": FILE, "path": None}]}
TWO_FRAMES = encoded(A, "GIF", save_all=True, append_images=[A.rotate(90)])
TIFF = encoded(A, "TIFF")
BAD: dict[str, tuple[Any, str]] = {
    "truncated": (FILE[:-200], "image 0 is truncated or damaged"),
    "not an image": (b"hello world", "image 0 is not an image, or not one of PNG, JPEG"),
    "empty file": (b"", "image 0 is empty"),
    "animated": (TWO_FRAMES, r"image 0 is animated or has several pages \(2 frames\)"),
    "decompression bomb": (png(60_000, 60_000), "image 0 has more than 178956970 pixels"),
    "too many pixels": (png(12_000, 12_000), "image 0 has 12000 x 12000 pixels, more than 89478485"),
    "no pixels": (png(0, 0), "image 0 is not an image"),
    "extreme aspect ratio": (encoded(Image.new("RGB", (1, 500))), "image 0 has 1 x 500 pixels: one side is over 200"),
    "mode without range": (encoded(Image.new("F", (8, 8)), "TIFF"), "image 0 has mode F"),
    "missing file": ("nowhere.png", "image 0 no such file: nowhere.png"),
    "folder": ("/tmp", "image 0 cannot be read: Is a directory"),
    "endless file": ("/dev/zero", "image 0 /dev/zero is a device or a pipe"),
    "home of no user": ("~nobody_7719/a.png", "image 0 cannot be read: Could not determine home directory"),
    "truncated animation": (TWO_FRAMES[:-1500], "image 0 is truncated or damaged"),
    "damaged header": (TIFF[:72] + b"\2" + TIFF[73:], r"image 0 is truncated or damaged \('str' object"),
    "URL": ("https://example.com/a.png", r"image 0 is a URL .* set data\.allow_image_urls=true"),
    "damaged data URI": ("data:image/png;base64,@@@@", "image 0 is not valid base64"),
    "no value": ({"bytes": None, "path": None}, "image 0 has neither bytes nor a path"),
    "wrong type": (7, "image 0 is of type int"),
}
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "more places": ({"prompt": "<image> <image>"}, "2 places for images .* but there are 1 images"),
    "more images": ({"prompt": "what?"}, "0 places for images .* but there are 1 images"),
    "model's own token": ({"prompt": "<image> <|image_pad|>"}, r"a text contains <\|image_pad\|>"),
    "no list": ({"images": "a.png"}, "must be a list of images, not str"),
    "model's own video token": (
        {"prompt": "<image><|video_pad|>"},
        r"a text contains <\|video_pad\|>, the model's own token for videos; write <video> instead",
    ),
    "model's own token in another field": (
        {"prompt": [{"role": "user<|image_pad|>", "content": "<image>"}]},
        r"a message contains <\|image_pad\|>, the model's own token",
    ),
    "audio part": ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "has type 'audio'"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", BAD)
def test_bad_images_name_file_row_and_column(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    image, message = BAD[kind]
    rows = [GOOD | {"images": [FILE]}, GOOD | {"images": [image]}]
    if not isinstance(image, bytes):
        rows = [GOOD | {"images": ["good.png"]}, GOOD | {"images": [image]}]
        (tmp_path / "good.png").write_bytes(FILE)
    file = write(tmp_path, *rows, kind="parquet" if isinstance(image, bytes) else "jsonl")
    with pytest.raises(ValueError, match=rf"rows\.\w+, row 1, column 'images': {message}"):
        dataset_of(model, file)
    assert len(dataset_of(model, file, DataConfig(filter_bad_images=True))) == 1
    assert "dropped 1 of 2 rows with images" in caplog.text
    with pytest.raises(ValueError, match=r"no row is left after data\.filter_bad_images"):
        dataset_of(model, write(tmp_path, rows[1], kind=file.rpartition(".")[2]), DataConfig(filter_bad_images=True))


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_rows_whose_places_do_not_fit_are_an_error(model: Path, tmp_path: Path, kind: str) -> None:
    change, message = BAD_ROWS[kind]
    (tmp_path / "a.png").write_bytes(FILE)
    good = {"prompt": "<image>what?", "images": ["a.png"]}
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1.*{message}"):
        dataset_of(model, write(tmp_path, good, good | change, kind="jsonl"), DataConfig(filter_bad_images=True))


@pytest.mark.parametrize(
    "change",
    [
        {"videos": ["a.mp4"]},
        {"prompt": "<image> <video>"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "video", "video": "a.mp4"}]}]},
    ],
)
def test_videos_for_a_model_that_reads_none_are_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    model = save_tiny_vision_model(tmp_path / "model", "llava")
    good = {"prompt": "<image>what?", "images": [as_data_uri(FILE)]}
    message = r"rows\.jsonl, row 1 has videos, or places for them \(<video>\), but models of type llava read no videos"
    with pytest.raises(ValueError, match=message):
        dataset_of(model, write(tmp_path, good, good | change, kind="jsonl"))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_samples_are_what_the_processor_makes(tmp_path: Path, model_type: str) -> None:
    folder = save_tiny_vision_model(tmp_path / "model", model_type)
    two = {"prompt": "<image>, then <image>?", "images": [FILE, encoded(B)]}
    file = write(tmp_path, {"prompt": "<image>what?", "images": [FILE]}, {"prompt": "2?", "images": []}, two)
    dataset = dataset_of(folder, file)
    processor = dataset.images.encoder.processor
    parts = [[{"type": "image"}, {"type": "text", "text": "what?"}]]
    parts += [
        [{"type": "image"}, {"type": "text", "text": ", then "}, {"type": "image"}, {"type": "text", "text": "?"}]
    ]
    for row, content, images in ((0, parts[0], [A]), (2, parts[1], [A, B])):
        messages = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = processor(text=[text], images=images, return_tensors="pt")
        sample = dataset[row]
        inputs = sample["multi_modal_inputs"]
        assert sample["raw_prompt_ids"] == expected["input_ids"][0].tolist()
        assert inputs.tensors and all(torch.equal(value, expected[name]) for name, value in inputs.tensors.items())
        assert sample["raw_prompt_ids"].count(inputs.token_id) == sum(inputs.num_tokens)
        assert len(inputs.num_tokens) == len(inputs.digests) == len(inputs.files) == len(images)
        assert np.array_equal(Image.open(io.BytesIO(inputs.files[0])), A)
    assert dataset[1]["multi_modal_inputs"] is None
    assert dataset[0]["multi_modal_inputs"].digests[0] == dataset[2]["multi_modal_inputs"].digests[0]
    assert len(set(dataset[2]["multi_modal_inputs"].digests)) == 2


def test_all_forms_of_rows_are_the_same_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    uri, text = as_data_uri(FILE), {"type": "text", "text": "what?"}
    rows = [
        {"prompt": "<image>what?", "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [str(tmp_path / "a.png")]},
        {"prompt": "<image>what?", "images": [{"path": "a.png", "bytes": None}]},
        {"prompt": "<image>what?", "images": [uri]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, text]}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}, text]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, text]}]},
        {"prompt": [{"role": "user", "content": [{"type": "input_image", "image_url": uri}, text]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "base64": uri.partition(",")[2]}, text]}]},
    ]
    samples = list(dataset_of(model, write(tmp_path, *rows, kind="jsonl")))
    for sample in samples:
        assert sample["raw_prompt_ids"] == samples[0]["raw_prompt_ids"]
        assert sample["multi_modal_inputs"].digests == samples[0]["multi_modal_inputs"].digests
        assert sample["multi_modal_inputs"].files == (FILE,)
        assert sample["raw_prompt"] == [{"role": "user", "content": [{"type": "image", "image": uri}, text]}]
        assert "images" not in sample and "images" not in sample["extra_info"]
    json.dumps(samples[0]["raw_prompt"])
    assert len(dataset_of(model, write(tmp_path, rows[0], kind="jsonl"), cls=PromptDataset)) == 1


def test_other_columns_and_pixel_limits(model: Path, tmp_path: Path) -> None:
    row = {"prompt": "<image>what?", "pictures": [encoded(tiny_image(128, 128))]}
    file = write(tmp_path, row)
    whole = dataset_of(model, file, DataConfig(image_key="pictures"))[0]["multi_modal_inputs"]
    small = dataset_of(model, file, DataConfig(image_key="pictures", max_pixels=32 * 32))[0]["multi_modal_inputs"]
    assert whole.num_tokens == (16,) and small.num_tokens == (4,)
    with pytest.raises(ValueError, match=r"data\.min_pixels=4096 is above data\.max_pixels=1024"):
        dataset_of(model, file, DataConfig(min_pixels=4096, max_pixels=1024))
    fixed = save_tiny_vision_model(tmp_path / "llava", "llava")
    with pytest.raises(ValueError, match=r"data\.max_pixels=1024: CLIPImageProcessor(Pil)? has no such limits"):
        dataset_of(fixed, file, DataConfig(image_key="pictures", max_pixels=1024))


def test_prompts_are_measured_with_their_image_tokens(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "<image>what?", "images": [FILE]}, {"prompt": "what?", "images": []})
    lengths = [len(sample["raw_prompt_ids"]) for sample in dataset_of(model, file)]
    assert lengths[0] == lengths[1] + 6 + 2  # 48 x 32 pixels of 16 x 16, and the tokens around them
    with pytest.raises(ValueError, match=rf"row 0: the prompt has {lengths[0]} tokens"):
        dataset_of(model, file, DataConfig(max_prompt_length=lengths[0] - 1))
    fitting = dataset_of(model, file, DataConfig(max_prompt_length=lengths[0] - 1, filter_overlong_prompts=True))
    assert [sample["multi_modal_inputs"] for sample in fitting] == [None]
    for cut in ("left", "right", "middle"):
        with pytest.raises(ValueError, match=r"would cut tokens of an image; raise data\.max_prompt_length"):
            dataset_of(model, file, DataConfig(max_prompt_length=10, truncation=cut))
    kept = dataset_of(model, file, DataConfig(max_prompt_length=lengths[0] - 2, truncation="right"))[0]
    assert kept["raw_prompt_ids"].count(kept["multi_modal_inputs"].token_id) == 6


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda image: image.convert("CMYK"), lambda image: image),
        (lambda image: image.convert("L"), lambda image: image.convert("L")),
        (lambda image: image.convert("P"), lambda image: image.convert("P")),
        (lambda image: image.convert("RGBA"), lambda image: image),
        (lambda image: Image.new("RGBA", image.size), lambda image: Image.new("RGB", image.size, "white")),
        (
            lambda image: Image.fromarray(np.full((4, 4), 0x80FF, np.uint16)),
            lambda image: Image.new("RGB", (4, 4), "#808080"),
        ),
        (
            lambda image: Image.frombytes("I;16B", (1, 2), b"\x80\xff\x7f\xff"),
            lambda image: Image.frombytes("L", (1, 2), b"\x80\x7f"),
        ),
    ],
    ids=["CMYK", "grey", "palette", "opaque", "transparent", "16 bit", "16 bit, big-endian"],
)
def test_other_modes_become_rgb(
    change: Callable[[Image.Image], Image.Image], expected: Callable[[Image.Image], Image.Image]
) -> None:
    changed = change(A)
    picture = read_image(encoded(changed, "TIFF" if changed.mode in ("CMYK", "I;16B") else "PNG"))
    assert picture.rgb.mode == "RGB"
    assert np.allclose(np.asarray(picture.rgb, int), np.asarray(expected(A).convert("RGB"), int), atol=1)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.file))), np.asarray(picture.rgb))


def test_a_transparent_16_bit_grey_is_white() -> None:
    grey = Image.fromarray(np.array([[0x80FF, 0x80FE]], np.uint16))
    picture = read_image(encoded(grey, transparency=0x80FF))
    assert np.asarray(picture.rgb)[0, :, 0].tolist() == [255, 0x80]


def test_photos_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = read_image(encoded(A, exif=exif))
    assert np.array_equal(picture.rgb, A.rotate(-90, expand=True)) and picture.original is None
    assert read_image(A).digest == read_image(FILE).digest != picture.digest


class Pictures(BaseHTTPRequestHandler):
    """/a.png is a picture, /cut.png half of one, /slow.png one that takes long, as do the headers of /headers.png and
    the content of the redirect /slow; /to/PORT redirects to /a.png of that port of 127.0.0.1, /ftp to FTP."""

    num_requests = 0

    def do_GET(self) -> None:
        type(self).num_requests += 1
        if self.path.startswith(("/to/", "/ftp", "/slow")) and self.path != "/slow.png":
            kind, port = ("http", self.path[4:]) if self.path.startswith("/to/") else ("ftp", "21")
            self.send_response(302)
            self.send_header("Location", "/a.png" if self.path == "/slow" else f"{kind}://127.0.0.1:{port}/a.png")
            self.end_headers()
            if self.path == "/slow":
                self.write_slowly()
            return
        self.send_response(200 if self.path in ("/a.png", "/cut.png", "/slow.png", "/headers.png") else 404)
        if self.path == "/headers.png":
            self.flush_headers()
            self.write_slowly()
        if self.path == "/cut.png":
            self.send_header("Content-Length", str(2 * len(FILE)))
        self.end_headers()
        for byte in FILE if self.path == "/slow.png" else ():
            self.wfile.write(bytes([byte]))
            time.sleep(0.02)
        self.wfile.write(FILE)

    def write_slowly(self) -> None:
        """3 seconds."""
        with suppress(OSError):
            for number in range(60):
                self.wfile.write(b"X-%d: y\r\n" % number)
                time.sleep(0.05)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def pictures() -> Iterator[HTTPServer]:
    Pictures.num_requests = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_urls_are_fetched_once_if_allowed(model: Path, tmp_path: Path, pictures: HTTPServer) -> None:
    url = f"http://127.0.0.1:{pictures.server_port}"
    config = DataConfig(allow_image_urls=True, allow_private_image_urls=True)
    dataset = dataset_of(
        model, write(tmp_path, {"prompt": "<image>?", "images": [f"{url}/a.png"]}, kind="jsonl"), config
    )
    assert [dataset[0]["multi_modal_inputs"].files for _ in range(2)] == [(FILE,), (FILE,)]
    assert Pictures.num_requests == 1
    part = {"type": "image_url", "image_url": {"url": f"{url}/a.png"}}
    own = dataset_of(model, write(tmp_path, {"prompt": [{"role": "user", "content": [part]}]}, kind="jsonl"), config)
    assert [own[0]["multi_modal_inputs"].files for _ in range(2)] == [(FILE,), (FILE,)]
    assert Pictures.num_requests == 2
    for path, cause in (("b.png", "404"), ("a picture.png", "control characters")):
        with pytest.raises(ImageError, match=rf"row 0, column 'images': image 0 cannot be fetched: .*{cause}"):
            dataset_of(
                model, write(tmp_path, {"prompt": "<image>?", "images": [f"{url}/{path}"]}, kind="jsonl"), config
            )


PRIVATE = (
    "127.0.0.1",
    "localhost",
    "2130706433",
    "127.0.0%2e1",
    "169.254.169.254",
    "10.0.0.1",
    "100.64.0.1",
    "224.0.0.1",
    "192.0.0.192",
    "[::1]",
    "[::ffff:7f00:1]",
    "[::7f00:1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::a00:1]",
    "[2002:7f00:1::1]",
    "[fec0::1]",
)


@pytest.mark.parametrize("host", PRIVATE)
def test_urls_of_private_addresses_are_refused(model: Path, tmp_path: Path, pictures: HTTPServer, host: str) -> None:
    row = {"prompt": "<image>?", "images": [f"http://{host}:{pictures.server_port}/a.png"]}
    message = r"row 0, column 'images': image 0 is not fetched: .*not a public address.* set data\.allow_private_image_urls=true"
    with pytest.raises(ImageError, match=message):
        dataset_of(model, write(tmp_path, row, kind="jsonl"), DataConfig(allow_image_urls=True))
    assert Pictures.num_requests == 0


@pytest.mark.parametrize("host", ["64:ff9b::5db8:d70e", "2606:2800:21f::1"])
def test_public_addresses_of_ipv6(host: str) -> None:
    """The first is a host of IPv4 in a network without."""
    assert image_urls._public_addresses(host, 80) == [(host, 80)]


@pytest.fixture
def public_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of a public address, whose connections reach this machine."""
    resolve, connect = socket.getaddrinfo, socket.create_connection
    public = "93.184.215.14"

    def resolved(host: Any, *args: Any, **options: Any) -> Any:
        return resolve(public if host == "pictures.example" else host, *args, **options)

    def connected(address: tuple[str, int], *args: Any, **options: Any) -> socket.socket:
        host, port = address
        return connect(("127.0.0.1" if host in (public, "pictures.example") else host, port), *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "create_connection", connected)
    return "pictures.example"


def test_redirects_to_private_addresses_are_refused(pictures: HTTPServer, public_name: str) -> None:
    port = pictures.server_port
    assert fetched(f"http://{public_name}:{port}/a.png") == FILE
    with pytest.raises(
        ImageError, match=r"is not fetched: http://pictures.example.*127\.0\.0\.1, which is not a public"
    ):
        fetched(f"http://{public_name}:{port}/to/{port}")
    assert Pictures.num_requests == 2
    assert fetched(f"http://{public_name}:{port}/to/{port}", allow_private=True) == FILE
    for allow_private in (False, True):
        with pytest.raises(ImageError, match=r"cannot be fetched: .*ftp"):
            fetched(f"http://{public_name}:{port}/ftp", allow_private=allow_private)


def test_a_connection_that_ends_early_is_an_error(pictures: HTTPServer) -> None:
    with pytest.raises(ImageError, match=rf"cannot be fetched: .*{len(FILE)} more expected"):
        fetched(f"http://127.0.0.1:{pictures.server_port}/cut.png", allow_private=True)


def test_private_addresses_are_refused_behind_a_proxy(pictures: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{pictures.server_port}")
    monkeypatch.setenv("no_proxy", "")
    for host in ("169.254.169.254", "user@127.0.0.1:80", "127.0.0%2e1"):
        with pytest.raises(ImageError, match="is not fetched"):
            fetched(f"http://{host}/a.png")
    assert Pictures.num_requests == 0
    with pytest.raises(ImageError, match=r"cannot be fetched: .*404"):
        fetched("http://93.184.215.14/a.png")  # the proxy is asked for the whole URL
    assert Pictures.num_requests == 1


def test_a_proxy_may_be_private_and_of_another_scheme(pictures: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"https://127.0.0.1:{pictures.server_port}")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ImageError, match=r"cannot be fetched: .*SSL"):  # the proxy speaks no TLS
        fetched("http://93.184.215.14/a.png")
    with pytest.raises(ImageError, match=r"is not fetched: .*169\.254\.169\.254, which is not a public"):
        fetched("http://169.254.169.254/a.png")


def test_urls_are_limited_in_time(pictures: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while headers come, or what urllib would read of a redirect."""
    url = f"http://127.0.0.1:{pictures.server_port}"
    monkeypatch.setattr(image_urls, "TIMEOUT_S", 0.3)
    start = time.monotonic()
    with pytest.raises(ImageError, match=r"cannot be fetched: .*not complete after 0\.3 s"):
        fetched(f"{url}/headers.png", allow_private=True)
    assert fetched(f"{url}/slow", allow_private=True) == FILE
    assert time.monotonic() - start < 2


def test_urls_are_limited_in_size_and_time(pictures: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{pictures.server_port}"
    monkeypatch.setattr(image_urls, "TIMEOUT_S", 0.1)
    with pytest.raises(ImageError, match=r"cannot be fetched: .*not complete after 0\.1 s"):
        fetched(f"{url}/slow.png", allow_private=True)
    monkeypatch.setattr(image_urls, "MOST_BYTES", 100)
    assert fetched(f"{url}/a.png", allow_private=True) == FILE[:101]


def test_loader_processes_make_the_same_batches(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "<image>?" * (i % 3), "images": [encoded(tiny_image(32, 32 + 16 * i))] * (i % 3)} for i in range(6)
    ]
    for row in rows:
        row["prompt"] = row["prompt"] or "no image"
    tokenizer = hf_tokenizer(model)
    processor = hf_processor(model, tokenizer, DataConfig())
    dataset: Any = create_rl_dataset(write(tmp_path, *rows), tokenizer, DataConfig(), processor=processor)
    batches = [
        list(create_dataloader(dataset, 3, shuffle=True, seed=1, num_workers=workers, collate_fn=collate_fn))
        for workers in (0, 2)
    ]
    for own, other in zip(*batches, strict=True):
        assert list(own["raw_prompt_ids"]) == list(other["raw_prompt_ids"])
        for one, two in zip(own["multi_modal_inputs"], other["multi_modal_inputs"]):
            assert (one is None) == (two is None)
            if isinstance(one, ImageInputs):
                assert (one.digests, one.files, one.num_tokens) == (two.digests, two.files, two.num_tokens)
                assert all(torch.equal(value, two.tensors[name]) for name, value in one.tensors.items())


def test_images_take_no_file_descriptors_between_processes() -> None:
    inputs = ImageInputs({"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, 7, (1,), (b"d",), (b"f",))
    rows = pickle.loads(pickle.dumps([inputs, inputs]))
    assert rows[0] is rows[1] and rows[0].files == (b"f",)
    assert all(torch.equal(rows[0].tensors[name], value) for name, value in inputs.tensors.items())
    assert isinstance(inputs.__getstate__()["tensors"]["a"], np.ndarray)


def test_a_changed_image_file_changes_the_fingerprint(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    file = write(tmp_path, {"prompt": "<image>?", "images": ["a.png"]}, kind="jsonl")
    before = content_of(dataset_of(model, file))
    assert content_of(dataset_of(model, file)) == before
    (tmp_path / "a.png").write_bytes(encoded(A.rotate(180)))
    after = content_of(dataset_of(model, file))
    assert before[file] == after[file] == hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert before["images"] != after["images"]


def test_templates_that_need_parts_get_them(model: Path, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<|image_pad|>{% elif p['type'] == 'text' %}"
        "{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>what?"}]
    file = write(tmp_path, {"prompt": messages, "images": [FILE]})
    dataset = RLHFDataset(file, tokenizer, DataConfig(), hf_processor(model, tokenizer, DataConfig()))
    text = tokenizer.decode(dataset[0]["raw_prompt_ids"])
    assert text.startswith("Be brief.") and text.endswith("what?")
    assert dataset[0]["raw_prompt"][0] == messages[0]


def test_places_are_filled_in_order() -> None:
    image = {"type": "image"}
    messages = [
        {"role": "user", "content": "a<image>b<image>"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [image, {"type": "text", "text": "d<image>"}, {"type": "image", "image": "own"}]},
    ]
    placed = place_images(messages, [1, 2, 3, 4])
    parts = [part.get("image", part.get("text")) for message in (placed[0], placed[2]) for part in message["content"]]
    assert parts == ["a", 1, "b", 2, 3, "d", 4, {"image": "own"}]
    assert placed[1] == messages[1]


def test_data_uris_of_all_formats() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        content = encoded(A, kind)
        uri = as_data_uri(content)
        assert uri.startswith(f"data:image/{kind.lower()};base64,")
        assert base64.b64decode(uri.partition(",")[2]) == content
        assert read_image(uri).rgb.size == A.size
