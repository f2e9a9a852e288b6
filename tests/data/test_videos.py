"""Videos of rows: what the processor makes of them, which frames are taken, and errors with file, row and column."""

import importlib
import io
import json
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.config.data import DataConfig, SFTDataConfig
from lockstep.data import videos
from lockstep.data.fingerprint import content_of
from lockstep.data.images import ImageError
from lockstep.data.sft_dataset import MultiTurnSFTDataset
from lockstep.data.videos import Sampling, Video, read_video, sampled_frames
from lockstep.models.processor import hf_processor, load_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.utils.data_uri import as_data_uri
from lockstep.utils.vision import WATCHING
from tests.data import image_rows
from tests.data.image_rows import dataset_of, encoded
from tests.tiny_vision import FAMILIES, needs_torchvision, save_tiny_vision_model, tiny_image

FRAMES = [tiny_image(48, 32, seed=i) for i in range(6)]
SAMPLING = Sampling(2.0, 64)
write = partial(image_rows.write, kind="jsonl")


FILES = [encoded(frame) for frame in FRAMES]
URIS = [as_data_uri(file) for file in FILES]


def grey_levels(num: int) -> list[int]:
    return [8 * (number % 32) for number in range(num)]


def video_file(path: Path, num: int, fps: int, width: int = 64, height: int = 48) -> Path:
    """Frame i is grey of level 8 i, modulo 256."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4_000_000
        for level in grey_levels(num):
            picture = np.full((height, width, 3), level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def numbers_in(video: Video) -> list[int]:
    """Which frames of `video_file` they are."""
    return [round(float(np.asarray(frame).mean()) / 8) for frame in video.frames]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"))


def test_frames_of_a_file_are_sampled_by_its_rate(tmp_path: Path) -> None:
    """30 frames at 10 per second: 3 seconds are 6 frames, evenly from the first to the last."""
    file = video_file(tmp_path / "a.mp4", 30, 10)
    expected = {
        (2.0, 64): [0, 6, 12, 17, 23, 29],
        (0.5, 64): [0, 10, 19, 29],  # at least 4
        (2.0, 4): [0, 10, 19, 29],
        (100.0, 64): list(range(30)),
        (2.0, 5): [0, 10, 19, 29],  # an even number
        (2.0, 1): [0, 29],
    }
    for (fps, most), numbers in expected.items():
        for value in (
            file,
            str(file),
            file.read_bytes(),
            {"video": str(file)},
            {"bytes": file.read_bytes(), "path": None},
        ):
            video = read_video(value, sampling=Sampling(fps, most))
            assert numbers_in(video) == list(video.indices) == numbers
            assert (video.num_source, round(video.fps, 6)) == (30, 10)


def test_options_of_a_video(tmp_path: Path) -> None:
    file = str(video_file(tmp_path / "a.mp4", 30, 10))
    for options, numbers in (
        ({"fps": 4}, 12),
        ({"nframes": 8}, 8),
        ({"max_frames": 5}, 4),
        ({"fps": 0.1, "min_frames": 10}, 10),
        ({"fps": 4, "max_frames": None}, 12),
    ):
        assert len(read_video({"type": "video", "video": file, **options}, sampling=SAMPLING).frames) == numbers
    assert sampled_frames(1, 0.1, SAMPLING, {}) == [0]
    assert sampled_frames(3, 0.1, SAMPLING, {}) == [0, 2]


def test_a_list_of_frames_is_taken_as_it_is() -> None:
    forms: list[Any] = [
        FRAMES,
        FILES,
        URIS,
        [{"bytes": file} for file in FILES],
        {"video": URIS},
        {"video": {"video": URIS}},
    ]
    for form in forms:
        video = read_video(form, sampling=SAMPLING)
        assert [np.asarray(frame).tolist() for frame in video.frames] == [
            np.asarray(frame).tolist() for frame in FRAMES
        ]
        assert (video.indices, video.num_source, video.fps) == ((0, 1, 2, 3, 4, 5), 6, 2.0)
    assert read_video({"video": FRAMES, "fps": 5}, sampling=SAMPLING).fps == 5
    assert read_video({"video": FRAMES, "sample_fps": 5.0}, sampling=SAMPLING).fps == 5
    assert read_video(FRAMES, sampling=Sampling(2.0, 3)).indices == (0, 2, 5)
    assert len(read_video(FRAMES[:1], sampling=SAMPLING).frames) == 2  # a temporal patch


def test_digests_tell_pixels_and_times() -> None:
    one = read_video(FRAMES, sampling=SAMPLING).digest
    assert one == read_video(URIS, sampling=SAMPLING).digest and len(one) == 16
    others = [
        read_video(FRAMES[::-1], sampling=SAMPLING),
        read_video(FRAMES[:4], sampling=SAMPLING),
        read_video({"video": FRAMES, "fps": 4}, sampling=SAMPLING),
        read_video([*FRAMES[:5], FRAMES[0]], sampling=SAMPLING),
    ]
    assert len({one, *(video.digest for video in others)}) == 5


def test_a_video_is_shown_as_its_frames() -> None:
    video = read_video([Image.new("RGB", (64, 32), (0, 40 * i, 0)) for i in range(6)] * 2, sampling=SAMPLING)
    sheet = Image.open(io.BytesIO(video.file))
    assert sheet.format == "JPEG" and sheet.size == (8 * 128, 2 * 64)
    for i in range(12):
        pixel: Any = sheet.getpixel((i % 8 * 128 + 64, i // 8 * 64 + 32))
        assert abs(pixel[1] - 40 * (i % 6)) < 8


BAD: dict[str, tuple[Any, str]] = {
    "no frames": ([], "has no frames"),
    "bad frame": ([URIS[0], "nowhere.png"], "frame 1 no such file: nowhere.png"),
    "sizes": ([URIS[0], as_data_uri(encoded(tiny_image(16, 16)))], "frame 1 has 16 x 16 pixels, frame 0 48 x 32"),
    "missing file": ("nowhere.mp4", "no such file: nowhere.mp4"),
    "device": ("/dev/zero", "/dev/zero is a device or a pipe"),
    "empty file": ("data:video/mp4;base64,", "is empty"),
    "damaged base64": ({"base64": "@@"}, "is not valid base64"),
    "URL": ("https://example.com/a.mp4", r"is a URL .* set data\.allow_image_urls=true"),
    "type": (7, "is of type int; give a list of frames"),
    "no source": ({"fps": 2}, r"has neither frames nor a file \(keys: fps\)"),
    "unknown key": (
        {"video": URIS, "max_pixels": 100},
        r"has the key 'max_pixels', which is not read .*data\.max_video_pixels",
    ),
    "no number": ({"video": URIS, "fps": 0}, "has fps=0; write a number above 0"),
    "both": ({"video": URIS, "fps": 1, "nframes": 4}, "has both fps and nframes"),
    "extreme aspect ratio": ([as_data_uri(encoded(Image.new("RGB", (1, 500))))], "frame 0 has 1 x 500 pixels"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_videos(kind: str, tmp_path: Path) -> None:
    value, message = BAD[kind]
    with pytest.raises(ImageError, match=message):
        read_video(value, tmp_path, sampling=SAMPLING)


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = video_file(tmp_path / "a.mp4", 30, 10)
    content = file.read_bytes()
    for bad in (content[:-500], content[:100], b"hello world", FILES[0][:50]):
        with pytest.raises(ImageError, match=r"is no video that PyAV decodes|is truncated|has no frames"):
            read_video(bad, sampling=SAMPLING)
    with pytest.raises(
        ImageError, match=r"has 6 frames of 64 x 48, together more than 9216 pixels; .*data\.max_video_frames"
    ):
        monkeypatch.setattr(videos, "MOST_FRAME_PIXELS", 3 * 64 * 48)
        read_video(content, sampling=SAMPLING)


def test_frames_that_an_edit_list_leaves_out(tmp_path: Path) -> None:
    """A clip that was cut without encoding it again: the file has all frames, its edit list begins after 2.5 seconds."""
    av = pytest.importorskip("av")
    whole, cut = video_file(tmp_path / "whole.mp4", 60, 10), tmp_path / "cut.mp4"
    with av.open(str(whole)) as source, av.open(str(cut), "w", options={"avoid_negative_ts": "disabled"}) as target:
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is not None:
                packet.pts, packet.dts = (time - int(2.5 / stream.time_base) for time in (packet.pts, packet.dts))
                packet.stream = copied
                target.mux(packet)
    video = read_video(cut, sampling=Sampling(1.0, 64))
    assert (video.num_source, video.fps, video.indices) == (35, 10, (0, 11, 23, 34))
    assert numbers_in(video) == [(25 + index) % 32 for index in video.indices]


@pytest.mark.parametrize(
    "content",
    [
        b"ffconcat version 1.0\nfile other.mp4\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    ],
    ids=["list of files", "session"],
)
def test_contents_that_name_files_and_hosts_open_neither(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video_file(tmp_path / "other.mp4", 8, 4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImageError, match="is no video that PyAV decodes"):
        read_video(content, sampling=SAMPLING)


def test_a_video_from_a_url_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = video_file(tmp_path / "a.mp4", 8, 4).read_bytes()
    assert len(read_video("http://host/a.mp4", sampling=SAMPLING, fetch=lambda url: content).frames) == 4
    monkeypatch.setattr(videos, "MOST_BYTES", len(content) - 1)
    with pytest.raises(ImageError, match=rf"has more than {len(content) - 1} bytes; download it"):
        read_video("http://host/a.mp4", sampling=SAMPLING, fetch=lambda url: content)


def test_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "av", None)
    with pytest.raises(ImageError, match=r'which PyAV decodes: pip install "lockstep-rl\[video\]"'):
        read_video(b"abc", sampling=SAMPLING)


@pytest.mark.vllm
@needs_torchvision
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in WATCHING])
def test_samples_are_what_the_processor_makes(tmp_path: Path, model_type: str) -> None:
    """One video, none, and a video between two images with another video."""
    folder = save_tiny_vision_model(tmp_path / "model", model_type)
    mixed = {
        "prompt": "<image>, <video>, <image> and <video>?",
        "images": [URIS[0], as_data_uri(encoded(tiny_image(64, 64)))],
        "videos": [URIS[:3], {"video": URIS[2:], "fps": 4}],
    }
    file = write(tmp_path, {"prompt": "<video>what?", "videos": [URIS]}, {"prompt": "2?"}, mixed)
    dataset = dataset_of(folder, file)
    processor = load_processor(folder)
    pixels = [np.stack([np.asarray(frame) for frame in FRAMES[a:b]]) for a, b in ((0, 6), (0, 3), (2, 6))]
    cases: list[Any] = [
        (0, "<video>what?", [], [0], [2.0]),
        (2, mixed["prompt"], [FRAMES[0], tiny_image(64, 64)], [1, 2], [2.0, 4.0]),
    ]
    pads = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    for row, prompt, images, chosen, rates in cases:
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for kind, pad in pads.items():
            text = text.replace(f"<{kind}>", pad)
        given = [pixels[i] for i in chosen]
        metadata = [
            {"total_num_frames": len(video), "fps": rate, "frames_indices": list(range(len(video)))}
            for video, rate in zip(given, rates)
        ]
        expected = processor(
            text=[text],
            images=images or None,
            videos=given,
            videos_kwargs={"do_sample_frames": False, "video_metadata": metadata},
            return_tensors="pt",
        )
        sample = dataset[row]
        inputs = sample["multi_modal_inputs"]
        assert sample["raw_prompt_ids"] == expected["input_ids"][0].tolist()
        names = set(expected) - {"input_ids", "attention_mask", "mm_token_type_ids"}
        assert set(inputs.tensors) == names and "pixel_values_videos" in names
        assert all(torch.equal(inputs.tensors[name], expected[name]) for name in names)
        assert sum(sample["raw_prompt_ids"].count(token) for token in inputs.placeholders) == sum(inputs.num_tokens)
        assert inputs.kinds == ((True,) if row == 0 else (False, True, False, True))
        if model_type == "qwen2_5_vl":
            assert inputs.tensors["second_per_grid_ts"].tolist() == [2 / rate for rate in rates]
    assert dataset[1]["multi_modal_inputs"] is None
    assert list(content_of(dataset)) == [file, "images"]
    assert sample["raw_prompt"][0]["content"][2]["type"] == "video"
    assert "videos" not in sample


@pytest.mark.vllm
@needs_torchvision
def test_all_forms_of_rows_are_the_same_prompt(model: Path, tmp_path: Path) -> None:
    for i, file in enumerate(FILES):
        (tmp_path / f"{i}.png").write_bytes(file)
    names = [f"{i}.png" for i in range(len(FILES))]
    text = {"type": "text", "text": "what?"}
    rows = [
        {"prompt": "<video>what?", "videos": [URIS]},
        {"prompt": "<video>what?", "videos": [{"video": names, "fps": 2.0}]},
        {
            "prompt": [{"role": "user", "content": [{"type": "video"}, text]}],
            "videos": [{"type": "video", "video": names}],
        },
        {"prompt": [{"role": "user", "content": [{"type": "video", "video": names, "fps": 2}, text]}]},
    ]
    samples = list(dataset_of(model, write(tmp_path, *rows)))
    parquet = {"prompt": "<video>what?", "videos": [[{"bytes": file, "path": None} for file in FILES]]}
    samples += list(dataset_of(model, write(tmp_path, parquet, kind="parquet")))
    for sample in samples:
        assert sample["raw_prompt_ids"] == samples[0]["raw_prompt_ids"]
        assert sample["multi_modal_inputs"].digests == samples[0]["multi_modal_inputs"].digests


@pytest.mark.vllm
@needs_torchvision
def test_bad_videos_name_file_row_and_column(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"prompt": "<video>what?", "videos": [URIS]}
    file = write(tmp_path, good, good | {"videos": [[*URIS[:1], "nowhere.png"]]})
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, row 1, column 'videos': video 0 frame 1 no such file: nowhere\.png"
    ):
        dataset_of(model, file)
    assert len(dataset_of(model, file, DataConfig(filter_bad_images=True))) == 1
    assert "dropped 1 of 2 rows with images" in caplog.text
    for change, message in (
        ({"prompt": "<video> <video>"}, "2 places for videos .* but there are 1 videos"),
        ({"prompt": "what?"}, "0 places for videos .* but there are 1 videos"),
        ({"videos": "a.mp4"}, "column 'videos': must be a list of videos, not str"),
        ({"prompt": "<video><|video_pad|>"}, r"a text contains <\|video_pad\|>, the model's own token for videos"),
    ):
        with pytest.raises(ValueError, match=rf"row 1.*{message}"):
            dataset_of(model, write(tmp_path, good, good | change))


@pytest.mark.vllm
@needs_torchvision
def test_limits_of_the_config(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "<video>what?", "videos": [[as_data_uri(encoded(tiny_image(64, 64)))] * 8]})

    def tokens(**limits: Any) -> int:
        inputs = dataset_of(model, file, DataConfig(**limits))[0]["multi_modal_inputs"]
        return int(inputs.num_tokens[0])

    assert tokens() == 4 * 16
    assert tokens(max_video_frames=4) == 2 * 16
    assert tokens(max_video_pixels=32 * 32) == 4 * 4
    with pytest.raises(ValueError, match=r"data\.max_video_pixels=100 is below the model's least number, 256"):
        tokens(max_video_pixels=100)
    with pytest.raises(ValueError, match=r"would cut tokens of an image; raise .*or data\.max_video_pixels"):
        tokens(max_prompt_length=20, truncation="right")


@pytest.mark.vllm
@needs_torchvision
def test_conversations_of_supervised_training(model: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "<video>what?"},
        {"role": "assistant", "content": "cat"},
        {"role": "user", "content": "and <image>?"},
        {"role": "assistant", "content": "dog"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages, "videos": [URIS], "images": URIS[:1]}) + "\n")
    config = SFTDataConfig(max_length=256, pad_mode="no_padding")
    tokenizer = hf_tokenizer(model)
    (sample,) = MultiTurnSFTDataset(str(file), tokenizer, config, hf_processor(model, tokenizer, config))
    inputs = sample["multi_modal_inputs"]
    ids = sample["input_ids"].tolist()
    assert inputs.kinds == (True, False)
    assert [ids.count(token) for token in (inputs.video_token_id, inputs.token_id)] == list(inputs.num_tokens)
    trained = tokenizer.decode(sample["input_ids"][sample["loss_mask"].bool()])
    assert "cat" in trained and "dog" in trained and "what" not in trained


def test_without_torchvision(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.utils.vision.find_spec", lambda name: None)
    file = write(tmp_path, {"prompt": "<image>what?", "images": URIS[:1]}, {"prompt": "<video>what?", "videos": [URIS]})
    message = r"row 1 has videos, or places for them \(<video>\), but videos are prepared with torchvision, which is not installed"
    with pytest.raises(ValueError, match=message):
        dataset_of(model, file)
    with pytest.raises(ValueError, match=r"data\.max_video_pixels=1000: videos are prepared with torchvision"):
        dataset_of(model, file, DataConfig(max_video_pixels=1000))
