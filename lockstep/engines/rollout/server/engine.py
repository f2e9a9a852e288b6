"""Rollout by running servers (`rollout.name=server`, `sglang`, `tgi`): their copy of the weights is updated as that of any engine.

    requests ─► event loop in a thread ─► HTTP, many at once ─► answers ─► completions
    an update:  begin_update ─► update_weights, one bucket after another ─► finish_update (see weights.py and reload.py)

With several workers each has its own share of the URLs; if there are more workers than URLs, some share a server and the first of
them updates it.
"""

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout.rollout_engine import (
    RolloutEngine,
    check_request_placeholders,
    longest_sequence,
    responses_of,
    stop_tokens,
)
from lockstep.engines.rollout.sent_images import check_no_videos
from lockstep.engines.rollout.server.http import KEY, ServerError, Unavailable
from lockstep.engines.rollout.server.inference_server import Server, open_server
from lockstep.engines.rollout.server.pool import InFlight, ServerPool
from lockstep.engines.rollout.server.protocols import Answer
from lockstep.engines.rollout.server.reload import WeightsFolder, reload_server
from lockstep.engines.rollout.server.weights import WeightTransfer, transfer_of
from lockstep.models.placeholders import placeholders_in
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.protocol.generation import Completion, GenerationRequest, Outcome, SamplingParams, WeightsLostError
from lockstep.utils.audit import AuditError
from lockstep.utils.distributed import current_rank, current_world_size, on_first_rank, wait_for_all_ranks
from lockstep.utils.fingerprint import fingerprint
from lockstep.utils.model_path import base_folder, local_model_folder

logger = logging.getLogger(__name__)
T = TypeVar("T")

STEP_S = 0.02
"""How long one step waits for an answer."""
ABORT_S = 5.0
"""How long aborted requests may take to return what they have."""


class ServerEngine(RolloutEngine):
    info = ROLLOUT_ENGINES.built_in["server"]

    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.config = config
        self.kind: str = self.info.server_kind or config.server.kind
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = longest_sequence(config)
        self._awake = {"weights", "kv_cache"}
        self._flights: dict[int, InFlight] = {}
        self._answers: dict[int, Future[Answer]] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._received: dict[str, int] = {}
        self._transfer: WeightTransfer | None = None
        self._folder: WeightsFolder | None = None
        self._reloads = config.server.reload_command is not None

    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        urls = self.config.server.urls
        self._leads = current_rank() < len(urls)
        self._shares_servers = current_world_size() > len(urls)
        if self.config.server.sleep and self._shares_servers:
            raise ServerError(f"{KEY}.sleep needs a server for each of the {current_world_size()} workers")
        open_tokenizer = cache(
            lambda: hf_tokenizer(
                model.tokenizer_path or model.path,
                trust_remote_code=model.trust_remote_code,
                custom_chat_template=model.custom_chat_template,
                key=f"{key}.tokenizer_path",
            )
        )
        self._open_tokenizer = open_tokenizer
        folder = local_model_folder(model.path, f"{key}.path", weights=False)
        self._placeholders = placeholders_in(base_folder(folder, f"{key}.path", weights=False))
        self._open_folder = lambda root, owner: WeightsFolder(root, owner, model, key, dtype, open_tokenizer())
        self._loop = EventLoop()
        self._pool = self._loop.run(self._open(share_of(urls, current_rank(), current_world_size())))
        names = ", ".join(f"{server.model} at {server.url}" for server in self._pool.servers)
        logger.info("responses come from %s", names)

    async def _open(self, urls: list[str]) -> ServerPool:
        servers = [Server(url, self.config.server) for url in urls]
        self._loop.closing += [server.close for server in servers]
        pool = ServerPool(servers, self.config.server)
        await asyncio.gather(*(self._retried(server, self._probe(pool)) for server in servers))
        return pool

    def _probe(self, pool: ServerPool) -> Callable[[Server], Awaitable[None]]:
        """Find out what a server is; one token shows whether it returns token ids and log-probs."""

        async def probe(server: Server) -> None:
            await open_server(server, self.config, self.kind, self._open_tokenizer, self._placeholders)
            prompt = server.protocol.probe_prompt(self.eos_token_ids[0] if self.eos_token_ids else 0)
            request = GenerationRequest(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
            await pool.attempt(server, self._in_flight(request, server))

        return probe

    async def _retried(self, server: Server, call: Callable[[Server], Awaitable[None]]) -> None:
        for attempt in range(self.config.server.max_retries + 1):
            try:
                return await call(server)
            except Unavailable as error:
                if attempt == self.config.server.max_retries:
                    raise ServerError(f"{error}; gave up after {attempt + 1} attempts ({KEY}.urls)") from error
                server.failed(error)
                await asyncio.sleep(max(0.0, server.retry_at - asyncio.get_running_loop().time()))

    def add(self, request_id: int, request: GenerationRequest) -> None:
        check_request_placeholders(request, self._placeholders)
        if request.images is not None:
            check_no_videos(request, "rollout.name=server")
            self._check_images()
        self._start(request_id, self._in_flight(request))

    def _check_images(self) -> None:
        for server in self._pool.servers:
            if not server.protocol.takes_images:
                raise ValueError(
                    f"{server.url}{server.protocol.generate_path} takes no images; use vLLM or SGLang servers, or "
                    "actor_rollout_ref.rollout.name=embedded, hf or vllm for prompts with images"
                )

    def _in_flight(self, request: GenerationRequest, only: Server | None = None) -> InFlight:
        """only: the server that must answer, even if it cannot ignore an end-of-sequence token as asked."""
        if only is not None and not only.protocol.ignores_eos:
            request = replace(request, sampling=replace(request.sampling, ignore_eos=False))
        return InFlight(request, stop_tokens(request.sampling, self.eos_token_ids), self._salt(), only=only)

    def _start(self, request_id: int, flight: InFlight) -> None:
        self._flights[request_id] = flight
        self._answers[request_id] = self._loop.start(self._pool.complete(flight))
        self._answers[request_id].add_done_callback(lambda _: self._ended.put(request_id))

    def step(self) -> dict[int, Outcome]:
        ended = set()
        try:
            ended.add(self._ended.get(timeout=STEP_S))
            while True:
                ended.add(self._ended.get_nowait())
        except queue.Empty:
            pass
        done = [name for name in ended if name in self._answers and self._answers[name].done()]
        return {request_id: self._take(request_id) for request_id in done}

    def _take(self, request_id: int) -> Outcome:
        self._flights.pop(request_id)
        call = self._answers.pop(request_id)
        if isinstance(error := call.exception(), ServerError | WeightsLostError):
            return error
        answer = call.result()
        versions = [self.policy_version] * len(answer.token_ids)
        return Completion(answer.token_ids, answer.log_probs, answer.finish, versions)  # type: ignore[arg-type]

    def unfinished(self) -> list[int]:
        return list(self._answers)

    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        chosen = [request_id for request_id in request_ids if request_id in self._answers]
        if chosen:
            self._loop.run(self._ask_to_end([self._flights[request_id] for request_id in chosen]))
        wait([self._answers[name] for name in chosen if self._flights[name].is_aborted], ABORT_S)
        completions: dict[int, Completion] = {}
        for request_id in chosen:
            answer = self._answers[request_id]
            if answer.done() and answer.exception() is None:
                completions |= responses_of({request_id: self._take(request_id)})
            else:
                answer.cancel()  # closes the connection, which ends the request
                completions[request_id] = Completion([], [], "abort", [])
                del self._answers[request_id], self._flights[request_id]
        if not self._answers:
            self._pool.forget_prompts()
        return completions

    async def _ask_to_end(self, flights: list[InFlight]) -> None:
        for server in self._pool.servers:
            running = [flight for flight in flights if flight.server is server]
            if not running:
                continue
            for flight in running:
                flight.is_aborted = True
            try:
                asked = await asyncio.wait_for(server.protocol.abort(server, [f.name for f in running]), ABORT_S)
            except (ServerError, TimeoutError):
                asked = False
            for flight in running:
                flight.is_aborted = asked

    def canaries(self, request: GenerationRequest) -> list[Completion]:
        """From every server that has the last update; shorter if one stops at an end-of-sequence token."""
        servers = [server for server in self._pool.servers if server.is_current]
        with self.serving():
            for place, server in enumerate(servers):
                self._start(place, self._in_flight(request, server))
            completions: dict[int, Completion] = {}
            while len(completions) < len(servers):
                completions |= responses_of(self.step())
        return [completions[place] for place in range(len(servers))]

    def prompt_like(self, token_ids: list[int]) -> list[int]:
        return self._pool.servers[0].protocol.prompt_like(token_ids)

    def takes_weights(self) -> bool:
        return all(server.no_updates is None for server in self._pool.servers)

    def begin_update(self) -> None:
        self._received = {}
        if self._leads:
            self._wake("weights")
        for server in self._pool.servers:
            server.is_current = True
            server.weights_label = None
        if self._reloads and current_rank() == 0:
            if self._folder is None:
                root, owner = self.config.server.weights_folder, self.config.server.weights_owner
                assert root is not None and owner is not None, "the config has defaults for them"
                self._folder = self._open_folder(Path(root), Path(owner))
            self._folder.begin()
        elif self._leads and not self._reloads:
            self._loop.run(self._begin())

    async def _begin(self) -> None:
        for server in self._pool.servers:
            if server.no_updates is not None:
                nothing = "trainer.val_only=true, actor_rollout_ref.actor.optim.lr=0"
                raise ServerError(f"{server.no_updates}; or train nothing ({nothing})")
        if self._transfer is None:
            self._transfer = transfer_of(self._pool.servers, self.config.server, self.device)
            await self._transfer.open(self._pool.servers)
        await self._on_current(lambda server: self._retried(server, server.protocol.begin_update))

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        tensors = list(weights)
        self._received |= {name: fingerprint(tensor) for name, tensor in tensors}
        if self._folder is not None:
            self._folder.add(tensors)
        elif self._leads and not self._reloads:
            assert self._transfer is not None, "begin_update comes first"
            self._loop.run(self._transfer.send(tensors, self._on_current))

    def finish_update(self, version: int) -> None:
        label = f"lockstep-{version}"
        if self._reloads:
            self._reload(version)
        elif self._leads:
            self._loop.run(self._on_current(lambda server: server.protocol.finish_update(server, label)))
        if self._shares_servers:
            wait_for_all_ranks()
        for server in self._pool.servers:
            server.weights_label = None if self._reloads else label
        if self._reloads and not self._leads:  # its model may have another name now
            probe = self._probe(self._pool)
            self._loop.run(self._on_current(lambda server: self._retried(server, probe)))
        super().finish_update(version)

    def _reload(self, version: int) -> None:
        """Rank 0 completes the folder; then each rank reloads its servers."""
        folder = on_first_rank(lambda: self._folder.commit(version))  # type: ignore[union-attr]
        if self._leads:
            probe = self._probe(self._pool)
            self._loop.run(
                self._on_current(lambda server: reload_server(server, self.config.server, folder, version, probe))
            )

    async def _on_current(self, call: Callable[[Server], Awaitable[None]]) -> None:
        """Call it for every server that takes part in the update; one that fails is left out until the next update."""
        servers = [server for server in self._pool.servers if server.is_current]
        errors = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        failed = {server: error for server, error in zip(servers, errors) if error is not None}
        for error in failed.values():
            if not isinstance(error, ServerError) or len(failed) == len(servers):
                raise error
        for server, error in failed.items():
            logger.warning("%s; the server is left out until the next weight update", error)
            server.is_current = False

    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        return self._loop.run(self._fingerprints(names))

    async def _fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        first: dict[str, int] | None = None
        for server in self._pool.servers:
            if not server.is_current:
                continue
            found = None if self._reloads else await server.protocol.fingerprints(server, names)
            if found is None:
                found = {name: value for name, value in self._received.items() if name in names}
            if first is None:
                first = found
            elif first != found:
                name = next(name for name in names if first.get(name) != found.get(name))
                raise AuditError(f"{name} of {server.url} differs from that of {self._pool.servers[0].url}")
        return first or {}

    def unread_weights(self, names: Sequence[str]) -> dict[str, str]:
        return self._loop.run(self._unread_weights(names))

    async def _unread_weights(self, names: Sequence[str]) -> dict[str, str]:
        unread: dict[str, str] = {}
        for server in self._pool.servers:
            if server.is_current and self._reloads:
                unread |= dict.fromkeys(names, f"{server.url} is reloaded by a command")
            elif server.is_current:
                unread |= await server.protocol.unread_weights(server, names)
        return unread

    def drop_cached_prefixes(self) -> None:
        if not self._reloads:  # which leaves none
            self._loop.run(self._on_current(lambda server: server.protocol.drop_cached_prefixes(server)))

    def sleep(self) -> None:
        if self.config.server.sleep and self._awake:
            self._loop.run(self._on_current(lambda server: server.protocol.sleep(server)))
            self._awake = set()

    def wake(self) -> None:
        self._wake("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        asleep = [part for part in parts if part not in self._awake]
        if asleep:
            self._loop.run(self._on_current(lambda server: server.protocol.wake(server, asleep)))
            self._awake |= set(asleep)

    def _salt(self) -> str:
        """Key of cached prefixes: blocks of one policy version are never used by another."""
        return f"version {self.policy_version}"


class SglangEngine(ServerEngine):
    """Servers of SGLang."""

    info = ROLLOUT_ENGINES.built_in["sglang"]


class TgiEngine(ServerEngine):
    """Servers of Hugging Face's text-generation-inference."""

    info = ROLLOUT_ENGINES.built_in["tgi"]


class EventLoop:
    """An event loop in a thread, which ends with this object. closing: called in the loop at its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.closing: list[Callable[[], Awaitable[None]]] = []
        threading.Thread(target=_serve, args=(self._loop, self.closing), name="rollout servers", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.start(call).result()


def _serve(loop: asyncio.AbstractEventLoop, closing: list[Callable[[], Awaitable[None]]]) -> None:
    async def close() -> None:
        await asyncio.gather(*(call() for call in closing), return_exceptions=True)

    loop.run_forever()
    loop.run_until_complete(close())
    loop.close()


def share_of(urls: list[str], rank: int, world_size: int) -> list[str]:
    """The URLs of one worker: every `world_size`-th, or one that it shares if there are fewer URLs than workers."""
    return urls[rank::world_size] or [urls[rank % len(urls)]]
