"""Rollout by servers, against fake ones on loopback: protocols, faults, load, weight updates."""

import base64
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.actor_rollout_ref import RolloutConfig, ServerConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.server.engine import ServerEngine, SglangEngine, share_of
from lockstep.engines.rollout.server.http import ServerError
from lockstep.engines.rollout.server.protocols import OpenAIProtocol
from lockstep.protocol.generation import WeightsLostError
from lockstep.protocol.images import ImageInputs
from lockstep.utils.audit import AuditError
from lockstep.utils.fingerprint import fingerprint
from tests.engines.rollout.fake_server import LOG_PROB, FakeServer, fake_servers
from tests.tiny_vision import tiny_vision_config

ROOT = Path(__file__).parents[3]
EOS = 2
KINDS = ("vllm", "sglang", "openai")
WEIGHTS = [("model.a", torch.arange(6.0).view(2, 3)), ("model.b", torch.ones(4)), ("model.c", torch.zeros(2, 2))]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with fake_servers(request.param) as (made,):
        yield made


@pytest.fixture
def vllm() -> Iterator[FakeServer]:
    with fake_servers("vllm") as (made,):
        yield made


def engine_of(*servers: FakeServer, load: bool = True, path: Path = ROOT, **settings: Any) -> ServerEngine:
    """path: of the model; `ROOT` has none, which stands for one that reads no images."""
    defaults: dict[str, Any] = {"urls": [server.url for server in servers], "retry_backoff_s": 0.05, "max_retries": 3}
    config = RolloutConfig(
        name="server", prompt_length=32, response_length=16, server=ServerConfig(**defaults | settings)
    )
    engine = ServerEngine(config, [EOS], 0)
    if load:
        engine.load(HFModelConfig(path=str(path)), "m", torch.float32, torch.device("cpu"))
    return engine


def requests_with(num: int = 6, *, max_tokens: int = 8, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return [GenerationRequest([3, 4, 5 + i // 2], params, seed=i) for i in range(num)]


def update(engine: ServerEngine, version: int, changed: float = 0.0) -> dict[str, int]:
    """Send all weights in two buckets; returns their fingerprints."""
    weights = [(name, tensor + changed) for name, tensor in WEIGHTS]
    engine.begin_update()
    engine.update_weights(iter(weights[:2]))
    engine.update_weights(iter(weights[2:]))
    engine.finish_update(version)
    return {name: fingerprint(tensor) for name, tensor in weights}


def test_tokens_and_log_probs(server: FakeServer) -> None:
    engine = engine_of(server)
    completions = engine.generate(requests_with(stop_token_ids=(9, 10)))
    assert all(c.log_probs == [LOG_PROB] * len(c.token_ids) for c in completions)
    assert all(c.policy_versions == [0] * len(c.token_ids) for c in completions)
    for completion in completions:
        assert (completion.stop_reason == "stop") == (completion.token_ids[-1] in (9, 10))
        assert completion.stop_reason == "stop" or len(completion.token_ids) == 8
    assert len(server.state.generated) == 6
    assert engine.generate(requests_with(stop_token_ids=(9, 10))) == completions


def test_sampling_keys_reach_the_server(server: FakeServer) -> None:
    engine_of(server).generate(requests_with(1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, ignore_eos=True))
    (body,) = server.state.generated
    sampling = body.get("sampling_params", body)
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "ignore_eos": True}
    assert {name: sampling[name] for name in expected} == expected
    assert not sampling.get("stop_token_ids")


def test_a_continued_response_has_other_random_numbers(vllm: FakeServer) -> None:
    first, rest = requests_with(1)[0], requests_with(1)[0].after([7, 8])
    engine_of(vllm).generate([first, rest])
    seeds = {body["sampling_params"]["seed"] for body in vllm.state.generated}
    assert len(seeds) == 2


def test_images_are_sent_as_data_uris_with_one_placeholder_each(server: FakeServer) -> None:
    files = (b"\x89PNG one", b"\x89PNG two")
    images = ImageInputs({}, 9, (3, 3), (b"a" * 16, b"b" * 16), files)
    request = GenerationRequest([4, 9, 9, 9, 5, 9, 9, 9], SamplingParams(max_tokens=4, ignore_eos=True), images=images)
    engine = engine_of(server)
    (completion,) = engine.generate([request])
    assert len(completion.token_ids) == 4
    (body,) = server.state.generated
    assert next(body[name] for name in ("token_ids", "input_ids", "prompt") if name in body) == [4, 9, 5, 9]
    uris = body.get("image_data") or [part["url"] for part in body["content_parts"]]
    assert [base64.b64decode(uri.removeprefix("data:image/png;base64,")) for uri in uris] == list(files)
    server.state.image_tokens = (9, 4)
    with pytest.raises(
        ServerError, match=r"as 10 tokens, which are not the 8 of the run's processor.*data\.max_pixels"
    ):
        engine.generate([request])


def test_placeholders_of_a_vision_model_are_never_sampled(server: FakeServer, tmp_path: Path) -> None:
    """Also in responses to text."""
    config = tiny_vision_config("qwen2_5_vl")
    config.image_token_id, config.video_token_id = 9, 11
    config.save_pretrained(tmp_path)
    requests = [replace(request, prompt_ids=[3, 4]) for request in requests_with(20, ignore_eos=True)]
    engine = engine_of(server, path=tmp_path)
    if server.state.kind == "openai":
        with pytest.raises(ServerError, match=r"the placeholder of an image, token (9|11), which no response may have"):
            engine.generate(requests)
        return
    sampled = {token for completion in engine.generate(requests) for token in completion.token_ids}
    assert sampled and not sampled & {9, 11}
    biases = [body["sampling_params"]["logit_bias"] for body in server.state.generated]
    assert biases == [{"9": -100.0, "11": -100.0}] * 20
    of_text = engine_of(server)
    sampled = {token for completion in of_text.generate(requests) for token in completion.token_ids}
    assert sampled & {9, 11} and "logit_bias" not in server.state.generated[-1]["sampling_params"]


def test_placeholders_typed_as_text_are_refused(vllm: FakeServer, tmp_path: Path) -> None:
    config = tiny_vision_config("qwen2_5_vl")
    config.image_token_id, config.video_token_id = 9, 11
    config.save_pretrained(tmp_path)
    vllm.state.image_tokens = (9, 2)
    engine = engine_of(vllm, path=tmp_path)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    images = ImageInputs({}, 9, (2,), (b"a" * 16,), (b"\x89PNG",))
    for ids, given, message in (
        ([4, 9, 5], None, r"1 placeholder tokens \(9\) of an image or video, but no image"),
        ([4, 9, 9, 9], images, "3 placeholder tokens of images, but 2 features"),
        ([11, 9, 9], images, r"1 placeholder tokens \(11\) of an image or video, whose placeholder is token 9"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([GenerationRequest(ids, params, images=given)])
    assert not vllm.state.generated
    assert len(engine.generate([GenerationRequest([4, 9, 9], params, images=images)])) == 1


def test_features_of_images_are_dropped_with_the_weights(vllm: FakeServer, tmp_path: Path) -> None:
    """vLLM keeps them by their pixels, also after an update."""
    tiny_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    update(engine_of(vllm, path=tmp_path), 1)
    paths = [path for path, _ in vllm.state.calls]
    assert paths.index("/reset_encoder_cache") > max(n for n, path in enumerate(paths) if path == "/collective_rpc")
    update(engine_of(vllm), 2)
    assert [path for path, _ in vllm.state.calls].count("/reset_encoder_cache") == 1


def test_a_server_that_does_not_show_the_prompt_gets_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageInputs({}, 9, (1,), (b"a" * 16,), (b"\x89PNG",))
    request = GenerationRequest([9], SamplingParams(max_tokens=1, ignore_eos=True), images=images)
    answer = OpenAIProtocol.answer
    monkeypatch.setattr(OpenAIProtocol, "answer", lambda *args: replace(answer(*args), prompt_ids=None))
    with fake_servers("openai") as (server,), pytest.raises(ServerError, match="does not tell the tokens of a prompt"):
        engine_of(server).generate([request])


def test_kind_is_found_and_model_named(server: FakeServer) -> None:
    assert type(engine_of(server)._pool.servers[0].protocol).__name__.lower().startswith(server.state.kind)
    with pytest.raises(ServerError, match=rf"server\.model=other: {server.url} serves tiny"):
        engine_of(server, model="other")


def test_servers_that_cannot_serve_the_run_are_refused_at_the_start(vllm: FakeServer) -> None:
    vllm.state.max_model_len = 40
    with pytest.raises(ServerError, match=r"at most 40 tokens per sequence, data\.max_prompt_length .* is 48"):
        engine_of(vllm)
    vllm.state.max_model_len, vllm.state.logprobs_mode = 512, "raw_logprobs"
    with pytest.raises(ServerError, match="start it with --logprobs-mode processed_logprobs"):
        engine_of(vllm)


def test_a_server_without_token_ids_or_log_probs_is_refused_at_the_start() -> None:
    with fake_servers("openai") as (server,):
        server.state.calls.append(("/v1/completions", {}))  # the probe is then no longer exempt from faults
        server.state.faults.append("no_tokens")
        with pytest.raises(ServerError, match=r"lacks token ids or log-probs .*server\.kind"):
            engine_of(server)


def test_api_key_comes_from_the_environment_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_servers("vllm", api_key="secret-1") as (server,):
        with pytest.raises(ServerError, match=r"answered 401: Unauthorized"):
            engine_of(server)
        with pytest.raises(ValueError, match=r"api_key_env=ROLLOUT_KEY: this environment variable is not set"):
            engine_of(server, api_key_env="ROLLOUT_KEY")
        monkeypatch.setenv("ROLLOUT_KEY", "secret-1")
        with caplog.at_level(logging.DEBUG):
            assert len(engine_of(server, api_key_env="ROLLOUT_KEY").generate(requests_with(2))) == 2
    assert "secret-1" not in caplog.text


def test_refused_connection() -> None:
    with fake_servers("vllm") as (server,):
        pass
    with pytest.raises(ServerError, match=rf"{server.url}: cannot connect .* gave up after 2 attempts .*server\.urls"):
        engine_of(server, max_retries=1)


@pytest.mark.parametrize("fault", ["500", "drop", "abort", "stall"])
def test_a_fault_that_passes_is_retried(fault: str, server: FakeServer) -> None:
    engine = engine_of(server, timeout_s=0.5 if fault == "stall" else 30)
    expected = engine.generate(requests_with())
    num_before = len(server.state.generated)
    server.state.faults.extend([fault, fault])
    assert engine.generate(requests_with()) == expected
    num_sent = len(server.state.generated) - num_before
    # On a slow machine the short deadline may pass for other requests too.
    assert num_sent >= 6 + 2 if fault == "stall" else num_sent == 6 + 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("500", r"answered 500: EngineDeadError; gave up after 2 attempts \(.*server\.max_retries\)"),
        ("drop", r"connection lost .*; gave up after 2 attempts"),
        ("stall", r"no answer within .*server\.timeout_s=0\.3; gave up after 2 attempts"),
    ],
)
def test_a_fault_that_stays_stops_with_its_cause(fault: str, cause: str, vllm: FakeServer) -> None:
    engine = engine_of(vllm, timeout_s=0.3, max_retries=1)
    vllm.state.faults.extend([fault] * 20)
    with pytest.raises(ServerError, match=f"^{vllm.url}.*{cause}"):
        engine.generate(requests_with(2))
    assert engine.unfinished() == []
    vllm.state.faults.clear()
    assert len(engine.generate(requests_with(2))) == 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("short", "1 tokens and the reason length, 8 were asked for"),
        ("long", "9 tokens, 8 were asked for"),
        ("eos", r"the reason stop, but its last token \d+ is no stop token of the run \(2\)"),
        ("error", "answered 400: bad request"),
        ("no_tokens", "lacks token ids or log-probs"),
        ("null", "log-probs that are not numbers"),
    ],
)
def test_a_wrong_answer_stops_at_once(fault: str, cause: str, vllm: FakeServer) -> None:
    engine = engine_of(vllm)
    vllm.state.faults.append(fault)
    with pytest.raises(ServerError, match=f"^{vllm.url}.*{cause}"):
        engine.generate(requests_with(1))
    assert len(vllm.state.generated) == 1


def test_log_probs_of_another_length(server: FakeServer) -> None:
    engine = engine_of(server)
    server.state.faults.append("log_probs")
    with pytest.raises(ServerError, match="8 tokens, but 7 log-probs"):
        engine.generate(requests_with(1))


def test_death_in_the_middle_of_a_batch_moves_its_requests() -> None:
    with fake_servers("vllm", "vllm", delay_s=0.005) as (dying, other):
        engine = engine_of(dying, other)
        expected = engine.generate(requests_with(12))
        assert dying.state.generated and other.state.generated
        dying.state.faults.append("die")
        assert engine.generate(requests_with(12)) == expected


def test_death_and_return(vllm: FakeServer) -> None:
    engine = engine_of(vllm, max_retries=8)
    expected = engine.generate(requests_with())
    vllm.state.faults.append("die")
    with engine.serving():
        for place, request in enumerate(requests_with()):
            engine.add(place, request)
        completions: dict[int, Completion] = {}
        while len(completions) < 6:
            completions |= engine.step()
            if vllm._http.socket.fileno() == -1:
                vllm.start()
    assert [completions[place] for place in range(6)] == expected


def test_a_server_that_returns_with_old_weights_is_left_out() -> None:
    with fake_servers("vllm", "vllm") as (returned, other):
        engine = engine_of(returned, other)
        update(engine, 1)
        expected = engine.generate(requests_with())
        returned.stop()
        returned.start()
        assert engine.generate(requests_with()) == expected
        assert all(server.is_current == (server.url == other.url) for server in engine._pool.servers)
        sent = update(engine, 2, changed=1.0)
        assert all(server.is_current for server in engine._pool.servers)
        assert engine.fingerprints(list(sent)) == sent


def test_the_only_server_returns_with_old_weights(vllm: FakeServer) -> None:
    engine = engine_of(vllm)
    update(engine, 1)
    vllm.stop()
    vllm.start()
    with pytest.raises(WeightsLostError, match=rf"no server has the weights of the last update .*{vllm.url}"):
        engine.generate(requests_with(2))
    update(engine, 1)  # the trainer sends them again
    assert engine.generate(requests_with(2))


def test_groups_stay_on_one_server_and_load_is_spread() -> None:
    with fake_servers("vllm", "vllm", delay_s=0.002) as servers:
        engine = engine_of(*servers)
        engine.generate(requests_with(12))
        assert not engine._pool._homes
        prompts = [{tuple(body["token_ids"]) for body in server.state.generated} for server in servers]
        assert len(prompts[0]) == len(prompts[1]) == 3 and not prompts[0] & prompts[1]


def test_outstanding_requests_are_limited(vllm: FakeServer) -> None:
    vllm.state.delay_s = 0.01
    engine = engine_of(vllm, max_outstanding=2)
    most = 0
    with engine.serving():
        for place, request in enumerate(requests_with(8)):
            engine.add(place, request)
        left = 8
        while left:
            most = max(most, len(vllm.state.aborted))
            left -= len(engine.step())
    assert most == 2


def test_abort_keeps_the_tokens(server: FakeServer) -> None:
    server.state.delay_s = 0.03
    engine = engine_of(server)
    with engine.serving():
        for place, request in enumerate(requests_with(3, max_tokens=16)):
            engine.add(place, request)
        time.sleep(0.2)
        partial = engine.abort([0, 1, 99])
        assert partial.keys() == {0, 1} and engine.unfinished() == [2]
        assert all(c.stop_reason == "abort" and len(c.log_probs) == len(c.token_ids) for c in partial.values())
        if server.state.kind != "openai":  # which has no way to ask
            assert all(1 <= len(c.token_ids) < 16 for c in partial.values())
    assert engine.unfinished() == []


def test_shares_of_workers() -> None:
    assert [share_of(["a", "b", "c"], rank, 2) for rank in range(2)] == [["a", "c"], ["b"]]
    assert [share_of(["a", "b"], rank, 3) for rank in range(3)] == [["a"], ["b"], ["a"]]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weight_update(kind: str, tmp_path: Path) -> None:
    with fake_servers(kind, kind) as servers:
        engine = engine_of(*servers, weights_folder=str(tmp_path) if kind == "vllm" else None)
        for version in (1, 2):
            sent = update(engine, version, changed=float(version))
            assert engine.fingerprints(list(sent)) == sent
            for server in servers:
                assert {name: fingerprint(tensor) for name, tensor in server.state.weights.items()} == sent
                assert server.state.label == f"lockstep-{version}"
            assert {c.policy_version for c in engine.generate(requests_with())} == {version}
        paths = [path for path, _ in servers[0].state.calls]
        flush = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}[kind]
        assert paths.count(flush) == 2
    assert not list(tmp_path.iterdir())
    salt = {"vllm": "cache_salt", "sglang": "extra_key"}[kind]
    assert {body[salt] for body in servers[0].state.generated} == {"version 1", "version 2"}


def test_every_server_answers_the_canary() -> None:
    with fake_servers("vllm", "vllm") as servers:
        engine = engine_of(*servers)
        assert len(engine.canaries(requests_with(1)[0])) == 2
        assert all(len(server.state.generated) == 1 for server in servers)


def test_a_tensor_that_one_server_lost_is_named() -> None:
    with fake_servers("vllm", "vllm") as servers:
        engine = engine_of(*servers)
        sent = update(engine, 1)
        servers[1].state.weights["model.b"] += 1
        with pytest.raises(AuditError, match=rf"model\.b of {servers[1].url} differs from that of {servers[0].url}"):
            engine.fingerprints(list(sent))


def test_a_server_that_fails_in_an_update_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with fake_servers("vllm", "vllm") as (failing, other):
        engine = engine_of(failing, other, max_retries=1)
        failing.stop()
        sent = update(engine, 1)
        assert f"{failing.url}: cannot connect" in caplog.text
        assert engine.fingerprints(list(sent)) == sent
        assert len(engine.generate(requests_with())) == 6
        failing.start()


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"kind": "openai"}, "has no endpoints for weight updates"),
        ({"kind": "vllm", "dev_mode": False}, "has no /collective_rpc, .* VLLM_SERVER_DEV_MODE=1"),
        ({"kind": "vllm", "extension": None}, "start it with --worker-extension-cls lockstep"),
    ],
)
def test_a_server_without_weight_updates_is_refused_by_name(settings: dict[str, Any], cause: str) -> None:
    server = FakeServer(**settings)
    try:
        engine = engine_of(server)
        assert len(engine.generate(requests_with(2))) == 2 and not engine.takes_weights()
        with pytest.raises(ServerError, match=rf"{server.url} .*{cause}.* or train nothing \(trainer\.val_only"):
            engine.begin_update()
    finally:
        server.stop()


def test_memory_is_released_between_rollouts() -> None:
    with fake_servers("sglang") as (server,):
        engine = engine_of(server, sleep=True)
        engine.sleep()
        update(engine, 1)
        engine.generate(requests_with(1))
        engine.sleep()
        calls = [(path, body) for path, body in server.state.calls if path.endswith("_memory_occupation")]
        released = ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        resumed = [("/resume_memory_occupation", {"tags": [part]}) for part in ("weights", "kv_cache")]
        assert calls == [released, *resumed, released]


def test_sglang_speaks_its_own_protocol() -> None:
    with fake_servers("sglang") as (server,):
        config = RolloutConfig(name="sglang", prompt_length=32, response_length=16, server=ServerConfig([server.url]))
        engine = SglangEngine(config, [EOS], 0)
        engine.load(HFModelConfig(path=str(ROOT)), "m", torch.float32, torch.device("cpu"))
        assert len(engine.generate(requests_with(3))) == 3 and len(server.state.generated) == 3


def test_a_transfer_that_the_server_lacks(vllm: FakeServer) -> None:
    engine = engine_of(vllm, weight_transfer="tensor")
    with pytest.raises(ValueError, match=r"weight_transfer=tensor: .* takes weights by file or distributed"):
        engine.begin_update()


def test_sglang_takes_weights_by_broadcast() -> None:
    """The server is another process, which joins a gloo group in the way of SGLang."""
    command = [sys.executable, "-m", "tests.engines.rollout.fake_server", "sglang"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        server = ServerConfig(urls=[url], weight_transfer="distributed", timeout_s=30)
        engine = SglangEngine(
            RolloutConfig(name="sglang", prompt_length=32, response_length=16, server=server), [EOS], 0
        )
        engine.load(HFModelConfig(path=str(ROOT)), "m", torch.float32, torch.device("cpu"))
        for version in (1, 2):
            sent = update(engine, version, changed=float(version))
        output, _ = process.communicate(timeout=20)
        assert json.loads(output) == {"weights": sent, "label": "lockstep-2"}
    finally:
        process.kill()
        process.wait()
