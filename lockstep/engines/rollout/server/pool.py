"""Which server gets a request, and what happens if it fails.

A request goes to the server with the fewest outstanding tokens, or to the one that has its prompt. An attempt that fails is made
again, on another server if there is one; only the answer of the last attempt counts.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from uuid import uuid4

from lockstep.config.actor_rollout_ref import ServerConfig
from lockstep.engines.rollout.server.http import KEY, ServerError, Unavailable
from lockstep.engines.rollout.server.inference_server import Server
from lockstep.engines.rollout.server.protocols import Answer
from lockstep.protocol.generation import GenerationRequest, WeightsLostError
from lockstep.protocol.images import content_ids


@dataclass
class InFlight:
    """A request that was added.

    stops:      tokens that end it.
    salt:       of its cached prefix.
    only:       the server that must answer; None for any.
    server:     where it is running, under `name`; None while it waits.
    is_aborted: the server was asked to end it.
    """

    request: GenerationRequest
    stops: frozenset[int]
    salt: str
    only: Server | None = None
    server: Server | None = None
    name: str = ""
    is_aborted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


class ServerPool:
    def __init__(self, servers: list[Server], config: ServerConfig) -> None:
        self.servers = servers
        self.config = config
        self._homes: dict[tuple[int, ...], Server] = {}
        self._names = (f"lockstep-{uuid4().hex[:12]}-{number}" for number in count())

    def forget_prompts(self) -> None:
        """Equal prompts of different batches may go to different servers."""
        self._homes.clear()

    async def complete(self, flight: InFlight) -> Answer:
        """The answer to a request; ServerError after the last retry, or at once if another attempt would end the same."""
        attempts = 0
        while True:
            server = self._choose(flight)
            server.outstanding += flight.num_tokens
            try:
                answer = await self.attempt(server, flight)
            except Unavailable as error:
                attempts += 1
                server.failed(error)
                if attempts > self.config.max_retries:
                    raise ServerError(f"{error}; gave up after {attempts} attempts ({KEY}.max_retries)") from error
                if flight.is_aborted:
                    return Answer([], [], "abort")
            else:
                server.succeeded()
                return answer
            finally:
                server.outstanding -= flight.num_tokens
                flight.server = None

    async def attempt(self, server: Server, flight: InFlight) -> Answer:
        pause_s = server.retry_at - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        async with server.slots:
            flight.server = server
            flight.name = next(self._names)
            protocol = server.protocol
            body = protocol.body(flight.request, flight.name, server.model, sorted(flight.stops), flight.salt)
            reply = await server.post(protocol.generate_path, body)
        try:
            answer = protocol.answer(reply)
        except (LookupError, TypeError, ValueError) as error:
            raise ServerError(
                f"{server.url}{protocol.generate_path}: the answer lacks token ids or log-probs ({type(error).__name__}: {error}); "
                f"set {KEY}.kind to the server's protocol"
            ) from error
        _check_weights(server, answer)
        await protocol.check_prompt(server, flight.request, answer)
        if not protocol.takes_stop_tokens:
            answer = _until_stop(answer, flight.stops)
        _check_answer(server, flight, answer)
        return answer

    def _choose(self, flight: InFlight) -> Server:
        current = [server for server in self.servers if server.is_current]
        if flight.only is not None:
            current = [flight.only]
        if not current:
            urls = ", ".join(server.url for server in self.servers)
            raise WeightsLostError(f"no server has the weights of the last update any more ({KEY}.urls: {urls})")
        now = asyncio.get_running_loop().time()
        prompt = tuple(content_ids(flight.request.prompt_ids, flight.request.images))
        home = self._homes.get(prompt)
        if home is None or home not in current or home.retry_at > now:
            healthy = [server for server in current if server.retry_at <= now]
            if healthy:
                home = min(healthy, key=lambda server: server.outstanding)
            else:
                home = min(current, key=lambda server: server.retry_at)
            self._homes[prompt] = home
        return home


def _check_weights(server: Server, answer: Answer) -> None:
    """A server that was restarted has the weights it started with: its answers do not count, and it gets no more requests."""
    label = server.weights_label
    if label is not None and answer.token_ids and answer.weights != {label}:
        server.is_current = False
        raise Unavailable(
            f"{server.url} sampled with weights {_listed(answer.weights or {'of unknown version'})} instead of "
            f"{label}: it was restarted or updated by another program, and is left out until the next update"
        )


def _until_stop(answer: Answer, stops: frozenset[int]) -> Answer:
    """The response up to its first stop token, after which the server may have gone on."""
    for place, token in enumerate(answer.token_ids):
        if token in stops:
            tokens, log_probs = answer.token_ids[: place + 1], answer.log_probs[: place + 1]
            return replace(answer, token_ids=tokens, log_probs=log_probs, finish="stop")
    return answer


def _check_answer(server: Server, flight: InFlight, answer: Answer) -> None:
    tokens = answer.token_ids
    log_probs = answer.log_probs
    most = flight.request.sampling.max_tokens
    cause = None
    if len(tokens) != len(log_probs):
        cause = f"{len(tokens)} tokens, but {len(log_probs)} log-probs"
    elif not all(isinstance(value, int | float) and math.isfinite(value) for value in log_probs):
        cause = "log-probs that are not numbers"
    elif found := sorted(set(tokens).intersection(server.protocol.placeholders)):
        cause = (
            f"the placeholder of an image, token {found[0]}, which no response may have; use a server of vLLM or SGLang, which are "
            "told not to sample it"
        )
    elif len(tokens) > most:
        cause = f"{len(tokens)} tokens, {most} were asked for"
    elif answer.finish == "abort":
        if not flight.is_aborted:
            raise Unavailable(f"{server.url} aborted a request")
    elif answer.finish == "length":
        if len(tokens) < most:
            cause = f"{len(tokens)} tokens and the reason length, {most} were asked for; raise its maximum length"
    elif answer.finish != "stop":
        cause = f"the reason {answer.finish!r}, expected stop or length"
    elif not tokens or tokens[-1] not in flight.stops:
        last = f"its last token {tokens[-1]} is" if tokens else "it has"
        cause = f"the reason stop, but {last} no stop token of the run ({_listed(map(str, sorted(flight.stops)))})"
    if cause is not None:
        raise ServerError(f"{server.url}{server.protocol.generate_path} answered with {cause}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
