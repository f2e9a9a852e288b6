"""Rollout by servers of text-generation-inference, against a fake one on loopback that has a real model: protocol and faults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lockstep.config.actor_rollout_ref import RolloutConfig, ServerConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.server.engine import ServerEngine, TgiEngine
from lockstep.engines.rollout.server.http import ServerError
from lockstep.engines.rollout.server.prompt_text import PromptText
from lockstep.protocol.images import ImageInputs
from tests.engines.rollout.fake_tgi import FakeTgi, fake_tgi
from tests.tiny import save_tiny_model, tiny_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(folder: Path) -> Iterator[FakeTgi]:
    with fake_tgi(folder) as made:
        yield made


def engine_of(server: FakeTgi, folder: Path, cls: type[ServerEngine] = TgiEngine, **settings: Any) -> ServerEngine:
    defaults: dict[str, Any] = {"urls": [server.url], "retry_backoff_s": 0.05, "max_retries": 3}
    name = "tgi" if cls is TgiEngine else "server"
    config = RolloutConfig(name=name, prompt_length=32, response_length=16, server=ServerConfig(**defaults | settings))
    engine = cls(config, [EOS], 0)
    engine.load(HFModelConfig(path=str(folder)), "m", torch.float32, torch.device("cpu"))
    return engine


def requests_with(num: int = 4, *, max_tokens: int = 8, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    prompts = [tiny_tokenizer()(f"<|im_start|>user\n{i // 2}+2 é<|im_end|>")["input_ids"] for i in range(num)]
    return [GenerationRequest(prompt, params, seed=i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_the_model(folder: Path, prefill: bool, temperature: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with fake_tgi(folder, prefill=prefill) as server:
        requests = requests_with(temperature=temperature)
        completions = engine_of(server, folder).generate(requests)
        num_checked = len({body["inputs"] for body in server.state.asked("/tokenize")})
    assert num_checked == (0 if prefill else 1 + 2), "asked once for the probe and once for each prompt"
    for request, completion in zip(requests, completions):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / (temperature or 1.0)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.tensor(completion.log_probs) == pytest.approx(expected, abs=1e-4)
        if temperature == 0:
            assert completion.token_ids == logits.argmax(-1).tolist()


def test_what_the_server_is_asked(server: FakeTgi, folder: Path) -> None:
    engine = engine_of(server, folder)
    fixed = {"max_new_tokens": 8, "details": True, "decoder_input_details": True, "return_full_text": False}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"do_sample": True, "temperature": 1.0}),
        ({"temperature": 0.0, "top_k": 5}, {"do_sample": False}),
        (
            {"temperature": 0.5, "top_k": 5, "top_p": 0.9},
            {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9},
        ),
    ]
    for sampling, expected in cases:
        engine.generate(requests_with(1, **sampling))
        body = server.state.asked("/generate")[-1]
        assert body["inputs"] == "<|im_start|>user\n0+2 é<|im_end|>"
        assert body["parameters"].pop("seed") >= 0 and body["parameters"] == fixed | expected


def test_responses_end_at_the_stop_tokens_of_the_request(server: FakeTgi, folder: Path) -> None:
    """The server knows only its model's; what it makes after another one is cut off."""
    engine = engine_of(server, folder)
    (whole,) = engine.generate(requests_with(1, max_tokens=16))
    assert whole.stop_reason == "length"
    stop = whole.token_ids[4]
    place = whole.token_ids.index(stop)
    (cut,) = engine.generate(requests_with(1, max_tokens=16, stop_token_ids=(stop,)))
    assert cut.stop_reason == "stop"
    assert cut.token_ids == whole.token_ids[: place + 1] and cut.log_probs == whole.log_probs[: place + 1]
    last = whole.token_ids[-1]
    (at_the_end,) = engine.generate(requests_with(1, max_tokens=16, stop_token_ids=(last,)))
    assert at_the_end.stop_reason == "stop" and at_the_end.token_ids[-1] == last


@pytest.mark.parametrize("prefill", [False, True])
def test_a_server_that_tokenizes_differently(folder: Path, prefill: bool) -> None:
    with fake_tgi(folder, prefill=prefill) as server:
        engine = engine_of(server, folder)
        server.state.prefix = " "
        (a,) = tiny_tokenizer()("a")["input_ids"]
        message = (
            rf"^{server.url} tokenizes the prompt '<\|im_start\|>user.*' to 14 tokens, the run to 13; .* from token 0"
        )
        with pytest.raises(ServerError, match=message):
            engine.generate(requests_with(1))
        with pytest.raises(ServerError, match=rf"to 2 tokens, the run to 1; .* \(\d+ instead of {a}\)"):
            engine_of(server, folder)


def test_images_are_refused(server: FakeTgi, folder: Path) -> None:
    request = GenerationRequest([9], SamplingParams(), images=ImageInputs({}, 9, (1,), (b"a" * 16,)))
    with pytest.raises(ValueError, match=r"/generate takes no images; use vLLM or SGLang servers.*name=embedded"):
        engine_of(server, folder).generate([request])


def test_a_prompt_that_no_text_gives(server: FakeTgi, folder: Path) -> None:
    """Half of a character of two bytes."""
    prompt = tiny_tokenizer()("é")["input_ids"][:1]
    with pytest.raises(
        ServerError, match=r"^the run's own tokenizer tokenizes the prompt '.' to 3 tokens, the run to 1"
    ):
        engine_of(server, folder).generate([GenerationRequest(prompt, SamplingParams(max_tokens=2))])


def tokenizer_with_bos() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    start = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.convert_tokens_to_ids(start))]
    )
    return tokenizer


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), tokenizer_with_bos()], ids=["plain", "bos"])
def test_texts_of_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = PromptText(tokenizer)
    for text in ("1+1=", "<|im_start|>user\nhé<|im_end|>", " a  b "):
        token_ids = tokenizer(text)["input_ids"]
        assert prompts.text_of(token_ids) == text and prompts.prompt_like(token_ids) == token_ids
    for token_ids in ([EOS], list(range(3, 147))):  # a canary of bytes that are no text
        like = prompts.prompt_like(token_ids)
        assert prompts.text_of(like) and prompts.tokens_of(prompts.text_of(like)) == like
    assert len(like) > 100


def test_a_model_whose_tokenizer_adds_a_first_token(tmp_path: Path) -> None:
    """The probe is more than that token, whose text is empty; TGI refuses an empty text."""
    tokenizer = tokenizer_with_bos()
    tokenizer.save_pretrained(save_tiny_model(tmp_path))
    with fake_tgi(tmp_path) as server:
        engine = engine_of(server, tmp_path)
        request = GenerationRequest(tokenizer("1+1=")["input_ids"], SamplingParams(max_tokens=4))
        assert len(engine.generate([request])[0].token_ids) >= 1
        assert [body["inputs"] for body in server.state.asked("/generate")] == ["a", "1+1="]


def test_a_prompt_without_the_first_token_that_the_server_adds() -> None:
    prompts = PromptText(tokenizer_with_bos())
    with pytest.raises(ServerError, match=r"to 3 tokens, the run to 2; they differ from token 0 on \(0 instead of"):
        prompts.text_of(tiny_tokenizer()("ab")["input_ids"])


def test_limits_of_the_server(server: FakeTgi, folder: Path) -> None:
    server.state.max_total_tokens = 40
    with pytest.raises(ServerError, match=r"at most 40 tokens per sequence, data\.max_prompt_length .* is 48"):
        engine_of(server, folder)
    server.state.max_total_tokens, server.state.max_input_tokens = 512, 20
    with pytest.raises(ServerError, match=r"takes prompts of at most 20 tokens, data\.max_prompt_length is 32"):
        engine_of(server, folder)
    server.state.max_input_tokens, server.state.max_concurrent_requests = 256, 2
    assert len(engine_of(server, folder, max_retries=0).generate(requests_with(12))) == 12
    assert server.state.most_at_once <= 2


def test_a_failed_generation_is_repeated(server: FakeTgi, folder: Path) -> None:
    engine = engine_of(server, folder)
    expected = engine.generate(requests_with())
    server.state.faults.extend([424, 429])
    assert engine.generate(requests_with()) == expected


def test_the_kind_must_be_named(server: FakeTgi, folder: Path) -> None:
    with pytest.raises(ServerError, match=rf"{server.url} is a server of TGI; set .*rollout\.server\.kind=tgi"):
        engine_of(server, folder, ServerEngine)
    assert len(engine_of(server, folder, ServerEngine, kind="tgi").generate(requests_with(2))) == 2


def test_without_a_reload_command_it_takes_no_weights(server: FakeTgi, folder: Path) -> None:
    engine = engine_of(server, folder)
    assert not engine.takes_weights()
    message = (
        r"has no endpoints for weight updates; set .*kind=vllm or sglang and start such a server, or set .*reload_command, which "
        r"restarts this one with the new weights; or train nothing"
    )
    with pytest.raises(ServerError, match=message):
        engine.begin_update()


def test_the_canary_may_end_early(server: FakeTgi, folder: Path) -> None:
    """TGI cannot ignore end-of-sequence tokens."""
    engine = engine_of(server, folder)
    prompt = engine.prompt_like(list(range(3, 147)))
    (canary,) = engine.canaries(GenerationRequest(prompt[:30], SamplingParams(max_tokens=8, ignore_eos=True)))
    assert 1 <= len(canary.token_ids) <= 8
