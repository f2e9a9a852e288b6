"""A small server on loopback that speaks the protocol of text-generation-inference with a real model, which it can load again.

Requests are checked as TGI checks them. Tokens come from the embedded engine with the seed of the request, so a run with this
server samples what a run with `rollout.name=embedded` samples.

`POST /reload` is not TGI's: the command of a test calls it in place of a restart. `RELOAD` is such a command.
"""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.models.tokenizer import eos_token_ids
from lockstep.protocol.generation import GenerationRequest, SamplingParams

PARAMETERS = {
    *("best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p", "do_sample"),
    *(
        "max_new_tokens",
        "return_full_text",
        "stop",
        "truncate",
        "watermark",
        "details",
        "decoder_input_details",
        "seed",
    ),
    *("top_n_tokens", "grammar", "adapter_id"),
}
RELOAD = (
    "import sys, urllib.request; url, folder = sys.argv[1:]; print('loading', folder); "
    "urllib.request.urlopen(urllib.request.Request(url + '/reload', folder.encode()))"
)


def reload_command() -> str:
    return f'{sys.executable} -c "{RELOAD}" {{url}} {{folder}}'


@dataclass
class State:
    """How the server should behave, and what it was asked.

    reload:   of `/reload`: load | nothing | restart (it is gone for a while) | die.
    prefill:  whether it shows the prompt's tokens, as with --enable-prefill-logprobs.
    prefix:   text that its tokenizer adds to every prompt.
    faults:   status codes of the next requests for tokens.
    """

    reload: str = "load"
    prefill: bool = False
    prefix: str = ""
    max_total_tokens: int = 512
    max_input_tokens: int = 256
    max_concurrent_requests: int = 128
    faults: deque[int] = field(default_factory=deque)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def asked(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]


class FakeTgi:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.state = State(**settings)
        self._lock = threading.Lock()
        self.counting = threading.Lock()
        self._port = 0
        self.load(folder)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def load(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        config = RolloutConfig(prompt_length=256, response_length=256, max_num_seqs=8)
        engine = EmbeddedEngine(config, eos_token_ids(self.tokenizer, folder), self.tokenizer.pad_token_id)
        engine.load(HFModelConfig(path=str(folder)), "model", torch.float32, torch.device("cpu"))
        self._engine = engine
        self.state.loaded.append(str(folder))

    def generate(self, request: GenerationRequest) -> Any:
        with self._lock:
            (completion,) = self._engine.generate([request])
        return completion

    def start(self) -> None:
        owner = self

        class Handler(_Handler):
            fake = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        self.connections: set[Any] = set()
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self, but: Any = None) -> None:
        """Close the port and all connections but one."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self.connections - {but}:
            with suppress(OSError):
                connection.shutdown(2)

    def return_with(self, folder: Path) -> None:
        """After a while."""
        self.load(folder)
        time.sleep(0.2)
        self.start()


@contextmanager
def fake_tgi(folder: Path, **settings: Any) -> Iterator[FakeTgi]:
    server = FakeTgi(folder, **settings)
    try:
        yield server
    finally:
        server.stop()


class _Fault(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeTgi

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
        state = self.fake.state
        if self.path == "/health":
            self._send(200, {})
        elif self.path == "/info":
            names = ("max_total_tokens", "max_input_tokens", "max_concurrent_requests")
            limits = {name: getattr(state, name) for name in names}
            self._send(200, {"model_id": state.loaded[-1], "version": "3.3.5", **limits})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": state.loaded[-1], "object": "model"}]})
        else:
            known = self.path in ("/generate", "/generate_stream", "/tokenize", "/v1/completions")
            self._send(405 if known else 404, {})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/reload":
            return self._reload(Path(data.decode()))
        body = json.loads(data)
        self.fake.state.calls.append((self.path, body))
        try:
            answer = {"/generate": self._generate, "/tokenize": self._tokenize}[self.path](body)
        except _Fault as fault:
            self._send(fault.status, {"error": str(fault), "error_type": "validation"})
        else:
            self._send(200, answer)

    def _reload(self, folder: Path) -> None:
        state = self.fake.state
        if state.reload == "load":
            self.fake.load(folder)
        elif state.reload in ("restart", "die"):
            self.fake.stop(but=self.connection)
        self.close_connection = True
        self._send(200, {})
        if state.reload == "restart":
            threading.Thread(target=self.fake.return_with, args=(folder,)).start()

    def _send(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _encoded(self, text: str) -> list[int]:
        return list(self.fake.tokenizer(self.fake.state.prefix + text)["input_ids"])

    def _tokenize(self, body: Any) -> Any:
        return [{"id": token, "text": "", "start": 0, "stop": 0} for token in self._encoded(body["inputs"])]

    def _generate(self, body: Any) -> Any:
        state = self.fake.state
        with self.fake.counting:
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
        try:
            if state.at_once > state.max_concurrent_requests:
                raise _Fault(429, "Model is overloaded")
            return self._answer(body)
        finally:
            with self.fake.counting:
                state.at_once -= 1

    def _answer(self, body: Any) -> Any:
        state, parameters = self.fake.state, body["parameters"]
        if state.faults:
            raise _Fault(state.faults.popleft(), "Request failed during generation")
        if set(body) - {"inputs", "parameters", "stream"} or set(parameters) - PARAMETERS:
            raise _Fault(422, f"unknown fields in {sorted(body)} or {sorted(parameters)}")
        if not body["inputs"]:
            raise _Fault(422, "Input validation error: `inputs` cannot be empty")
        prompt = self._encoded(body["inputs"])
        _check(parameters, len(prompt), state)
        samples = parameters.get("do_sample") or parameters.keys() & {"temperature", "top_k", "top_p"}
        sampling = SamplingParams(
            temperature=parameters.get("temperature", 1.0) if samples else 0.0,
            top_k=parameters.get("top_k", -1),
            top_p=parameters.get("top_p", 1.0),
            max_tokens=parameters["max_new_tokens"],
        )
        own = GenerationRequest(prompt, sampling).stream_seed  # that of seed 0
        seed = (parameters["seed"] - own) % 2**63
        completion = self.fake.generate(GenerationRequest(prompt, sampling, seed))
        pairs = zip(completion.token_ids, completion.log_probs, strict=True)
        tokens = [{"id": token, "text": "", "logprob": value, "special": False} for token, value in pairs]
        shown = state.prefill and parameters.get("decoder_input_details")
        is_full = len(tokens) == parameters["max_new_tokens"]  # TGI looks at the length first
        details = {
            "finish_reason": "length" if is_full else "eos_token",
            "generated_tokens": len(tokens),
            "seed": parameters["seed"],
            "prefill": [{"id": token, "text": "", "logprob": None} for token in prompt] if shown else [],
            "tokens": tokens,
        }
        return {"generated_text": "", "details": details if parameters.get("details") else None}


def _check(parameters: Any, num_tokens: int, state: State) -> None:
    problem = None
    if parameters.get("temperature", 1.0) <= 0:
        problem = "`temperature` must be strictly positive"
    elif not 0 < parameters.get("top_p", 0.5) < 1:
        problem = "`top_p` must be > 0.0 and < 1.0"
    elif parameters.get("top_k", 1) <= 0:
        problem = "`top_k` must be strictly positive"
    elif num_tokens > state.max_input_tokens:
        problem = f"`inputs` must have less than {state.max_input_tokens} tokens. Given: {num_tokens}"
    elif num_tokens + parameters["max_new_tokens"] > state.max_total_tokens:
        problem = f"`inputs` tokens + `max_new_tokens` must be <= {state.max_total_tokens}"
    if problem is not None:
        raise _Fault(422, f"Input validation error: {problem}")
