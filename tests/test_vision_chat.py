"""`Policy`, `lockstep chat` and `lockstep serve` with images."""

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from lockstep import cli
from lockstep.config.actor_rollout_ref import RolloutConfig, ServerConfig
from lockstep.config.data import ImageDataConfig
from lockstep.config.model import HFModelConfig
from lockstep.data.image_prompts import ImageEncoder
from lockstep.data.images import data_uri, read_image
from lockstep.engines.rollout import Completion, GenerationRequest, RolloutEngine, SamplingParams
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.server.engine import ServerEngine
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import eos_token_ids, hf_tokenizer
from lockstep.policy import Policy
from lockstep.serve import Service, _parser
from tests.tiny import save_tiny_model
from tests.tiny_vision import save_tiny_vision_model, tiny_image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def question(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "how many?"}]}]


def test_answers_depend_on_the_image(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{seed}.png" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        tiny_image(64, 48, seed=seed).save(path)
    policy = Policy(model)
    settings: dict[str, Any] = {"temperature": 0.8, "max_tokens": 20}
    answers = policy.generate([question(path) for path in paths], **settings)
    assert answers[0] != answers[1]
    assert answers[0] == policy.generate(question(paths[0].read_bytes()), **settings)
    lines = ["/image", f"/image {paths[0]}", "how many?", "is <image> a tag?", "/reset", "how many?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    shown: list[str] = []

    def show(text: str) -> str:
        shown.append(text)
        return text

    monkeypatch.setattr("lockstep.chat._printable", show)
    assert cli.main(["chat", str(model), "--temperature", "0.8", "--max-tokens", "20"]) == 0
    without = policy.generate("how many?", seed=2, **settings)
    said = {"role": "assistant", "content": answers[0]}
    later = policy.generate(
        [*question(paths[0]), said, {"role": "user", "content": "is <image> a tag?"}], seed=1, **settings
    )
    assert "".join(shown) == answers[0] + later + without
    assert "cannot be read" in capsys.readouterr().err


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads no images"):
        Policy(save_tiny_model(tmp_path / "model")).num_tokens(question(tiny_image()))


def test_videos_are_refused(model: Path) -> None:
    message = {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}
    with pytest.raises(ValueError, match="message 0 has type 'video'; text and image are supported"):
        Policy(model).generate([message])


@contextmanager
def in_thread(service: Service) -> Iterator[str]:
    """Its URL while it runs."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def run() -> None:
        async with service.client.running(), service.endpoint.running():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield service.endpoint.url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def test_a_served_model_is_a_rollout_server_for_prompts_with_images(model: Path) -> None:
    tokenizer = hf_tokenizer(model)
    encoder = ImageEncoder(hf_processor(model, tokenizer, ImageDataConfig()))
    sampling = SamplingParams(temperature=0, max_tokens=12)
    requests = []
    for sizes in ([(64, 48)], [(32, 32), (48, 64)], []):
        pictures = [read_image(tiny_image(*size, seed=number)) for number, size in enumerate(sizes)]
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "how many?"}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids, images = encoder(text, pictures) if pictures else (tokenizer.encode(text, add_special_tokens=False), None)
        requests.append(GenerationRequest(ids, sampling, images=images))

    def generate(engine_class: type[RolloutEngine], **settings: Any) -> list[Completion]:
        config = RolloutConfig(prompt_length=64, response_length=16, **settings)
        engine = engine_class(config, eos_token_ids(tokenizer, model), 0)  # type: ignore[call-arg]
        engine.load(HFModelConfig(path=str(model)), "m", torch.float32, torch.device("cpu"))
        return engine.generate(requests)

    expected = generate(EmbeddedEngine, name="embedded", load_format="auto")
    service = Service(_parser().parse_args([str(model), "--port", "0", "--name", "tiny", "--device", "cpu"]))
    with in_thread(service) as url:
        completions = generate(ServerEngine, name="server", server=ServerConfig(urls=[url]))
        body = {"model": "tiny", "prompt": [7, encoder.token_id]}
        image = {"type": "image_url", "url": data_uri(read_image(tiny_image()))}
        parts = [[image, image], [{"type": "video_url", "url": "data:video/mp4;base64,QUJD"}]]
        errors = [httpx2.post(f"{url}/v1/completions", json=body | {"content_parts": p}).json()["error"] for p in parts]
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert len({tuple(c.token_ids) for c in completions}) == 3
    for completion, same in zip(completions, expected):
        assert completion.log_probs == pytest.approx(same.log_probs, abs=1e-5)
    assert "1 image tokens" in errors[0]["message"] and "not 'video_url'" in errors[1]["message"]


def test_served_images_are_data_uris(model: Path) -> None:
    service = Service(_parser().parse_args([str(model), "--port", "0", "--name", "tiny", "--device", "cpu"]))
    uris = [data_uri(read_image(tiny_image(64, 48, seed=seed))) for seed in (1, 2)]
    text = {"type": "text", "text": "how many?"}

    async def talk() -> tuple[list[Any], list[Any]]:
        async with (
            service.client.running(),
            service.endpoint.running(),
            httpx2.AsyncClient(base_url=service.endpoint.url, timeout=60) as client,
        ):

            async def chat(url: str, *more: Any, kind: str = "image_url") -> Any:
                first = {"role": "user", "content": [{"type": kind, kind: {"url": url}}, text]}
                body = {"model": "tiny", "messages": [first, *more], "max_tokens": 12, "temperature": 0}
                return (await client.post("/s/one/v1/chat/completions", json=body)).json()

            answers = [await chat(uri) for uri in uris]
            said = answers[0]["choices"][0]["message"]
            later = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uris[1]}}]}
            answers.append(await chat(uris[0], said, later))
            source = {"type": "base64", "media_type": "image/png", "data": uris[0].partition(",")[2]}
            body = {"model": "tiny", "max_tokens": 12, "temperature": 0}
            user = {"role": "user", "content": [{"type": "image", "source": source}, text]}
            answers.append((await client.post("/v1/messages", json=body | {"messages": [user]})).json())
            item = {"role": "user", "content": [{"type": "input_image", "image_url": uris[0]}, text]}
            body = {"model": "tiny", "max_output_tokens": 12, "temperature": 0, "input": [item]}
            answers.append((await client.post("/v1/responses", json=body)).json())
            wrong = [
                await chat(url) for url in ("http://localhost/x.png", "/etc/hostname", "data:image/png;base64,QUJD")
            ]
            wrong.append(await chat("data:video/mp4;base64,QUJD", kind="video_url"))
            return answers, wrong

    answers, wrong = asyncio.run(talk())
    texts = [answer["choices"][0]["message"]["content"] for answer in answers[:2]]
    assert texts[0] != texts[1]
    assert texts[0] == answers[3]["content"][0]["text"] == answers[4]["output"][0]["content"][0]["text"]
    placeholders = answers[0]["usage"]["prompt_tokens"]
    assert answers[2]["usage"]["prompt_tokens"] > placeholders + answers[0]["usage"]["completion_tokens"]
    assert ["data URI" in str(answer["error"]) for answer in wrong[:3]] == [True, True, False]
    assert "not an image" in str(wrong[2]["error"])
    assert "only parts of text and images are supported, not 'video_url'" in str(wrong[3]["error"])
