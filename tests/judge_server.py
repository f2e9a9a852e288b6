"""A scripted judge on loopback, with the protocol of OpenAI's chat completions."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """status 200: content of the message, or the whole body if it is no text. delay_s: before the answer."""

    content: Any = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0

    @property
    def body(self) -> bytes:
        if self.status != 200:
            return json.dumps({"error": {"message": str(self.content)}}).encode()
        message = {"choices": [{"message": {"role": "assistant", "content": self.content}}]}
        return json.dumps(message if isinstance(self.content, str) else self.content).encode()


def verdict(score: float, reason: str = "because") -> Answer:
    return Answer(json.dumps({"reason": reason, "score": score}))


class JudgeServer:
    """answer: request body and number of the request -> answer. requests: bodies, with `headers` and `time`."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_running = self.most_running = 0
        lock, judge = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(judge.requests)
                    judge.requests.append(
                        body | {"headers": dict(self.headers), "time": time.monotonic(), "path": self.path}
                    )
                    judge.num_running += 1
                    judge.most_running = max(judge.most_running, judge.num_running)
                reply = answer(body, number)
                time.sleep(reply.delay_s)
                with lock:
                    judge.num_running -= 1
                try:
                    self.send_response(reply.status)
                    for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(reply.body)
                except OSError:
                    pass  # the client did not wait

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    @contextmanager
    def running(self) -> Iterator["JudgeServer"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def serve(answer: Callable[[dict[str, Any], int], Answer]) -> Any:
    return JudgeServer(answer).running()
