"""An endpoint on loopback over a policy that answers from a script."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lockstep.agents.endpoint.answers import AnswerSettings
from lockstep.agents.endpoint.server import Endpoint, ServerSettings
from lockstep.agents.renderer import Renderer
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from tests.tiny import tiny_tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 2
"""<|im_end|> of the tiny tokenizer."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"anyOf": []}}, "required": ["a"]},
}


def tokenizer() -> Any:
    found = tiny_tokenizer()
    found.chat_template = TOOL_TEMPLATE
    return found


class ScriptedPolicy:
    """Answers new requests with the texts of `script`, one after another, each ended by <|im_end|>; a list is token ids.

    A request with the seed of an earlier one goes on with that one's answer. Versions and routes count the calls.
    """

    def __init__(self, script: Sequence[str | list[int]] = ()) -> None:
        self.tokenizer = tokenizer()
        self.script = list(script)
        self.requests: list[GenerationRequest] = []
        self.num_running = self.num_cancelled = 0
        self.gate: Callable[[int], asyncio.Event | None] = lambda number: None
        self._answers: dict[int, tuple[int, list[int]]] = {}

    def restart(self) -> None:
        """Forget all requests and answers."""
        self.script, self.requests, self._answers = [], [], {}

    async def generate(self, request: GenerationRequest) -> Completion:
        number = len(self.requests)
        self.requests.append(request)
        self.num_running += 1
        try:
            if (event := self.gate(number)) is not None:
                await event.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if request.seed not in self._answers:
            answer = self.script.pop(0)
            ids = answer if isinstance(answer, list) else [*self.ids(answer), END]
            self._answers[request.seed] = len(request.prompt_ids), ids
        start, ids = self._answers[request.seed]
        done = len(request.prompt_ids) - start
        assert request.prompt_ids[start:] == ids[:done]
        piece = ids[done : done + request.sampling.max_tokens]
        reason = "stop" if piece[-1] == END else "length"
        log_probs = [-0.01 * (done + i) for i in range(len(piece))]
        routes = np.full((len(request.prompt_ids) + len(piece) - 1, 1, 1), number, np.int16)
        return Completion(piece, log_probs, reason, [number] * len(piece), routes=routes)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


@contextmanager
def serving(policy: ScriptedPolicy, *, server: dict[str, Any] | None = None, **answers: Any) -> Iterator[Endpoint]:
    """The running endpoint, in a thread; server, answers: settings."""
    sampling = SamplingParams(temperature=0.8, max_tokens=400)
    settings = AnswerSettings(**{"sampling": sampling, "max_model_len": 2000} | answers)
    endpoint = Endpoint(policy.generate, Renderer(policy.tokenizer, [END]), settings, ServerSettings(**(server or {})))
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with endpoint.running():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield endpoint
    finally:
        endpoint.stop_now()
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
        assert not thread.is_alive()
