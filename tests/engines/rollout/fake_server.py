"""A small inference server on loopback that speaks vLLM's, SGLang's or OpenAI's protocol and fails on command.

Every request is checked against the published protocol: unknown or missing fields are answered with 422. Tokens depend on the
prompt, the seed and the position alone.

`python -m tests.engines.rollout.fake_server sglang` runs one in a separate process, which prints its URL.
"""

import base64
import json
import pickle
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.utils.fingerprint import fingerprint

EXTENSION = "lockstep.engines.rollout.vllm_worker.WeightUpdates"
LOG_PROB = -0.5
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "stop_token_ids", "ignore_eos"}
_IMAGES = {"content_parts", "return_token_ids"}
_VLLM = {
    "/inference/v1/generate": (
        {"token_ids", "sampling_params"},
        {"request_id", "model", "cache_salt", "stream", *_IMAGES},
    ),
    "/inference/v1/abort_requests": ({"request_ids"}, set()),
    "/collective_rpc": ({"method"}, {"args", "kwargs", "timeout"}),
    "/reset_prefix_cache": (set(), set()),
    "/reset_encoder_cache": (set(), set()),
    "/update_weight_version": ({"new_version"}, set()),
    "/pause": (set(), set()),
    "/resume": (set(), set()),
    "/sleep": (set(), set()),
    "/wake_up": (set(), set()),
}
_UPDATE = {"flush_cache", "abort_all_requests", "weight_version", "load_format"}
_SGLANG = {
    "/generate": ({"input_ids", "sampling_params"}, {"rid", "return_logprob", "extra_key", "stream", "image_data"}),
    "/abort_request": (set(), {"rid", "abort_all"}),
    "/pause_generation": (set(), {"mode"}),
    "/continue_generation": (set(), {"torch_empty_cache"}),
    "/flush_cache": (set(), set()),
    "/update_weights_from_disk": ({"model_path"}, _UPDATE),
    "/update_weights_from_tensor": ({"serialized_named_tensors"}, _UPDATE),
    "/init_weights_update_group": (
        {"master_address", "master_port", "rank_offset", "world_size"},
        {"group_name", "backend"},
    ),
    "/update_weights_from_distributed": ({"names", "dtypes", "shapes"}, {"group_name", *_UPDATE}),
    "/update_weight_version": ({"new_version"}, {"abort_all_requests"}),
    "/release_memory_occupation": (set(), {"tags"}),
    "/resume_memory_occupation": (set(), {"tags"}),
}
_OPENAI = {
    "/v1/completions": (
        {"model", "prompt"},
        {"max_tokens", "seed", "logprobs", "return_token_ids", "return_tokens_as_token_ids", *_SAMPLING, *_IMAGES},
    ),
}
FIELDS: dict[str, dict[str, tuple[set[str], set[str]]]] = {"vllm": _VLLM, "sglang": _SGLANG, "openai": _OPENAI}
"""Path -> required and optional fields of its JSON."""


@dataclass
class State:
    """What the server was asked, and how it should behave.

    faults: of the next requests for tokens, one each: 500 | drop (the connection is closed) | stall | die (the server is gone) |
            short | long | log_probs | no_tokens | null | eos | error.
    calls:  path and body of every request.
    image_tokens: the placeholder token, and how many an image is expanded to.
    """

    kind: str
    model: str = "tiny"
    max_model_len: int = 512
    dev_mode: bool = True
    logprobs_mode: str = "processed_logprobs"
    extension: str | None = EXTENSION
    delay_s: float = 0.0
    stall_s: float = 3.0
    api_key: str | None = None
    faults: deque[str] = field(default_factory=deque)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    label: str = "default"
    weights: dict[str, Tensor] = field(default_factory=dict)
    aborted: dict[str, threading.Event] = field(default_factory=dict)
    image_tokens: tuple[int, int] = (9, 3)
    group: Any = None

    @property
    def generated(self) -> list[Any]:
        path = {"vllm": "/inference/v1/generate", "sglang": "/generate", "openai": "/v1/completions"}[self.kind]
        return [body for called, body in self.calls if called == path][1:]  # the first is the engine's probe

    def paths(self) -> list[str]:
        paths = list(FIELDS[self.kind])
        if not self.dev_mode:
            paths = [path for path in paths if path.startswith("/inference")]
        return paths


class FakeServer:
    def __init__(self, kind: str = "vllm", port: int = 0, **settings: Any) -> None:
        self.state = State(kind, **settings)
        self._port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, also again after `stop`: with the weights it had at first."""
        self.state.label, self.state.weights = "default", {}
        state, owner = self.state, self

        class Handler(_Handler):
            server_state, fake = state, owner

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        self.connections: set[Any] = set()
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Close the port and all connections."""
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(2)


@contextmanager
def fake_servers(*kinds: str, **settings: Any) -> Iterator[list[FakeServer]]:
    servers = [FakeServer(kind, **settings) for kind in kinds]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


class _Fault(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: State
    fake: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        self.fake.connections.add(self.connection)
        try:
            super().handle()
        except OSError:
            pass
        finally:
            self.fake.connections.discard(self.connection)

    def do_GET(self) -> None:
        self._respond(None)

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self._respond(json.loads(self.rfile.read(size)) if size else {})

    def _respond(self, body: Any) -> None:
        state, target = self.server_state, urlsplit(self.path)
        try:
            if state.api_key is not None and self.headers.get("Authorization") != f"Bearer {state.api_key}":
                raise _Fault(401, "Unauthorized")
            answer = self._get(target.path) if body is None else self._post(target.path, parse_qs(target.query), body)
            status = 200
        except _Fault as fault:
            answer, status = {"error": {"message": str(fault)}}, fault.status
        if answer is None:
            self.close_connection = True
            self.connection.shutdown(2)
            return
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _get(self, path: str) -> Any:
        state = self.server_state
        if path == "/health" and state.kind != "openai":
            return {}
        if path == "/v1/models":
            return {"data": [{"id": state.model, "max_model_len": state.max_model_len}]}
        if path == "/server_info" and state.kind == "vllm" and state.dev_mode:
            parallel = {"worker_extension_cls": state.extension}
            return {
                "vllm_config": {"model_config": {"logprobs_mode": state.logprobs_mode}, "parallel_config": parallel}
            }
        if path == "/get_server_info" and state.kind == "sglang":
            return {"tp_size": 1, "dp_size": 1, "weight_version": state.label}
        raise _Fault(405 if path in state.paths() else 404, f"no GET of {path}")

    def _post(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        state = self.server_state
        if path not in state.paths():
            raise _Fault(404, f"no {path}")
        required, optional = FIELDS[state.kind][path]
        if not required <= set(body) <= required | optional:
            raise _Fault(422, f"{path}: missing {required - set(body)}, unknown {set(body) - required - optional}")
        state.calls.append((path, body | {name: values[0] for name, values in query.items()} if query else body))
        if path in ("/inference/v1/generate", "/generate", "/v1/completions"):
            return self._generate(body)
        return {"vllm": self._vllm, "sglang": self._sglang}[state.kind](path, body)

    def _vllm(self, path: str, body: Any) -> Any:
        state = self.server_state
        if path == "/inference/v1/abort_requests":
            for name in body["request_ids"]:
                if (ended := state.aborted.get(name.removeprefix("generate-tokens-"))) is not None:
                    ended.set()
        if path == "/update_weight_version":
            state.label = body["new_version"]
        if path == "/collective_rpc":
            return {"results": [self._rpc(body["method"], *body.get("args", ()))]}
        return {"success": True}

    def _rpc(self, method: str, *args: Any) -> Any:
        state = self.server_state
        if method == "lockstep_load_file":
            state.weights |= {name: tensor.clone() for name, tensor in load_file(args[0]).items()}
        elif method == "lockstep_fingerprints":
            return {name: fingerprint(state.weights[name]) for name in args[0] if name in state.weights}
        elif method == "lockstep_unread":
            return {}
        elif method == "lockstep_finish_update":
            return ""
        elif method != "lockstep_begin_update":
            raise _Fault(500, f"no method {method}")
        return None

    def _sglang(self, path: str, body: Any) -> Any:
        state = self.server_state
        if path == "/abort_request" and (ended := state.aborted.get(body["rid"])) is not None:
            ended.set()
        elif path == "/pause_generation" and body["mode"] not in ("abort", "retract", "in_place"):
            raise _Fault(422, "mode")
        elif path.endswith("_memory_occupation") and not set(body["tags"]) <= {"kv_cache", "weights", "cuda_graph"}:
            raise _Fault(422, "tags")
        elif path == "/update_weights_from_tensor":
            (payload,) = body["serialized_named_tensors"]  # one per rank
            state.weights |= dict(pickle.loads(base64.b64decode(payload, validate=True)))
        elif path == "/update_weight_version":
            state.label = body["new_version"]
        elif path == "/init_weights_update_group":
            state.group = _join(body)
        elif path == "/update_weights_from_distributed":
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                state.weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                torch.distributed.broadcast(state.weights[name], src=0, group=state.group)
        return {"success": True, "message": "ok"}

    def _generate(self, body: Any) -> Any:
        state = self.server_state
        sampling = body.get("sampling_params", body)
        if state.kind != "openai":
            length = {"vllm": "max_tokens", "sglang": "max_new_tokens"}[state.kind]
            own = {
                "vllm": {"seed", "logprobs", "detokenize", "logit_bias"},
                "sglang": {"sampling_seed", "skip_special_tokens", "no_stop_trim", "logit_bias"},
            }
            if not set(sampling) <= _SAMPLING | own[state.kind] | {length}:
                raise _Fault(422, f"sampling_params: {sorted(sampling)}")
        else:
            length = "max_tokens"
        if "model" in body and body["model"] != state.model:
            raise _Fault(404, f"The model `{body['model']}` does not exist.")
        prompt = next(body[name] for name in ("token_ids", "input_ids", "prompt") if name in body)
        if not prompt or not all(type(token) is int for token in prompt):
            raise _Fault(422, "the prompt must be token ids")
        seed = sampling.get("seed", sampling.get("sampling_seed"))
        stops = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids", ())
        fault = state.faults.popleft() if state.faults and len(state.generated) else ""
        if fault == "500":
            raise _Fault(500, "EngineDeadError")
        if fault == "error":
            raise _Fault(400, "bad request")
        if fault == "drop":
            return None
        if fault == "die":
            self.fake.stop()
            return None
        if fault == "stall":
            time.sleep(state.stall_s)
        name = body.get("request_id", body.get("rid", ""))
        ended = state.aborted.setdefault(name, threading.Event())
        rng, tokens, finish = random.Random(f"{prompt} {seed}"), [], "length"
        for _ in range(sampling[length]):
            if ended.wait(state.delay_s) if state.delay_s else False:
                finish = "abort"
                break
            banned = sampling.get("logit_bias", {})
            tokens.append(rng.choice([token for token in range(3, 50) if banned.get(str(token), 0) > -100]))
            if tokens[-1] in stops:
                finish = "stop"
                break
        state.aborted.pop(name, None)
        return self._answer(self._expanded(prompt, body), tokens, finish, fault)

    def _expanded(self, prompt: list[int], body: Any) -> list[int]:
        """The prompt with the placeholder of each image repeated; the images must be PNG data URIs."""
        images = body.get("image_data", [part["url"] for part in body.get("content_parts", ())])
        for image in images:
            if base64.b64decode(image.removeprefix("data:image/png;base64,"), validate=True)[1:4] != b"PNG":
                raise _Fault(400, "not an image")
        token, length = self.server_state.image_tokens
        if images and prompt.count(token) != len(images):
            raise _Fault(400, f"{prompt.count(token)} placeholders, {len(images)} images")
        return [kept for found in prompt for kept in [found] * (length if images and found == token else 1)]

    def _answer(self, prompt: list[int], tokens: list[int], finish: str, fault: str) -> Any:
        state = self.server_state
        log_probs: list[Any] = [LOG_PROB] * len(tokens)
        if fault == "short":
            tokens, log_probs, finish = tokens[:1], log_probs[:1], "length"
        elif fault == "long":
            tokens, log_probs = [*tokens, 7], [*log_probs, LOG_PROB]
        elif fault == "log_probs":
            log_probs = log_probs[:-1]
        elif fault == "null":
            log_probs[0] = None
        elif fault == "eos":
            finish = "stop"
        elif fault == "abort":
            tokens, log_probs, finish = tokens[:1], log_probs[:1], "abort"
        spans = [{"version": state.label, "start": 0, "end": len(tokens)}]
        if state.kind == "sglang":
            pairs = [[value, token, None] for value, token in zip(log_probs, tokens)]
            about = {"finish_reason": {"type": finish}, "output_token_logprobs": pairs, "weight_version": state.label}
            about["prompt_tokens"] = len(prompt)
            return {"text": "", "meta_info": about} | ({} if fault == "no_tokens" else {"output_ids": tokens})
        if state.kind == "vllm":
            content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, log_probs)]
            choice = {"index": 0, "finish_reason": finish, "weight_versions": spans, "logprobs": {"content": content}}
        else:
            choice = {"index": 0, "finish_reason": finish, "text": "", "logprobs": {"token_logprobs": log_probs}}
            choice["prompt_token_ids"] = prompt
        choices = [choice | ({} if fault == "no_tokens" else {"token_ids": tokens})]
        return {"choices": choices} | ({"prompt_token_ids": prompt} if state.kind == "vllm" else {})


def _join(body: Any) -> Any:
    """A rank of the group that the protocol describes, as SGLang's workers make it."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world, rendezvous

    place, name = f"tcp://{body['master_address']}:{body['master_port']}", body["group_name"]
    size, timeout = body["world_size"], timedelta(seconds=30)
    store, rank, size = next(rendezvous(place, body["rank_offset"], size, timeout=timeout))
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        torch.distributed.Backend(body["backend"]),
        torch.distributed.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {place: place for place in range(size)}
    return group


def main() -> None:
    server = FakeServer(sys.argv[1])
    print(server.url, flush=True)
    sys.stdin.read()
    sums = {name: fingerprint(tensor) for name, tensor in server.state.weights.items()}
    print(json.dumps({"weights": sums, "label": server.state.label}), flush=True)


if __name__ == "__main__":
    main()
