"""One inference server: its protocol, load and health."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import ceil

from transformers import PreTrainedTokenizerBase

from lockstep.config.actor_rollout_ref import RolloutConfig, ServerConfig
from lockstep.engines.rollout.rollout_engine import longest_sequence
from lockstep.engines.rollout.server.http import KEY, Connection, ServerError, Unavailable
from lockstep.engines.rollout.server.protocols import PROTOCOLS, ServerProtocol
from lockstep.engines.rollout.server.tgi import TgiProtocol
from lockstep.utils.distributed import current_world_size

MAX_BACKOFF_S = 30.0

logger = logging.getLogger(__name__)


class Server(Connection):
    """
    protocol:      set by `open_server`, like model, paths and no_updates.
    model:         name of the model in requests.
    no_updates:    why its weights cannot be updated; None if they can.
    outstanding:   tokens of its unfinished requests: prompts and the most that they may generate.
    retry_at:      time of the loop before which no request is sent to it, after a failure.
    weights_label: label that its answers must carry; None if it got no weights from this run.
    is_current:    whether it has the weights of the last update.
    """

    def __init__(self, url: str, config: ServerConfig) -> None:
        super().__init__(url, config)
        self.protocol: ServerProtocol
        self.model = ""
        self.no_updates: str | None = None
        self.outstanding = 0
        self.retry_at = 0.0
        self.weights_label: str | None = None
        self.is_current = True
        self.slots = asyncio.Semaphore(config.max_outstanding)
        self._num_failures = 0

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, error: Unavailable) -> None:
        """Pause before the next request; requests that fail together count once."""
        now = asyncio.get_running_loop().time()
        if now >= self.retry_at:
            pause_s = min(self.config.retry_backoff_s * 2**self._num_failures, MAX_BACKOFF_S)
            self.retry_at = now + pause_s
            self._num_failures += 1
            logger.warning("%s; next attempt in %.3g s", error, pause_s)


async def open_server(
    server: Server,
    config: RolloutConfig,
    kind: str,
    open_tokenizer: Callable[[], PreTrainedTokenizerBase],
    placeholders: Sequence[int] = (),
) -> None:
    """Find the server's protocol and model; ServerError if they do not fit the config. placeholders: see `ServerProtocol`."""
    server.protocol = PROTOCOLS.get(kind if kind != "auto" else await _kind_of(server))(open_tokenizer, placeholders)
    server.paths = {path for path in server.protocol.optional if await server.has(path)}
    models = {model.name: model for model in await server.protocol.models(server)}
    wanted = config.server.model
    if wanted is None and len(models) != 1:
        raise ServerError(f"{server.url} serves {', '.join(models) or 'no model'}; name one with {KEY}.model")
    if wanted is not None and wanted not in models:
        raise ServerError(f"{KEY}.model={wanted}: {server.url} serves {', '.join(models) or 'no model'}")
    model = models[wanted] if wanted is not None else next(iter(models.values()))
    server.model = model.name
    longest = longest_sequence(config)
    if model.max_length is not None and model.max_length < longest:
        raise ServerError(
            f"{server.url} serves at most {model.max_length} tokens per sequence, data.max_prompt_length + "
            f"data.max_response_length is {longest}; lower them, or start the server with a longer maximum length"
        )
    if model.max_prompt is not None and model.max_prompt < config.prompt_length:
        raise ServerError(
            f"{server.url} takes prompts of at most {model.max_prompt} tokens, data.max_prompt_length is "
            f"{config.prompt_length}; lower it, or start the server with longer prompts"
        )
    if model.max_requests is not None:
        num_sharing = ceil(current_world_size() / len(config.server.urls))
        most = max(1, model.max_requests // num_sharing)
        server.slots = asyncio.Semaphore(min(most, config.server.max_outstanding))
    await server.protocol.check(server, config)
    reloads = config.server.reload_command is not None
    server.no_updates = None if reloads else await server.protocol.why_no_updates(server)


async def _kind_of(server: Server) -> str:
    """vllm, sglang or openai. A server of another kind has to be named, because config checks depend on what it lacks."""
    kind = "openai"
    for name in ("vllm", "sglang"):
        marker = PROTOCOLS.get(name).marker
        if marker is not None and await server.has(marker):
            kind = name
    if kind == "openai" and await server.has(TgiProtocol.marker):
        raise ServerError(f"{server.url} is a server of TGI; set {KEY}.kind=tgi")
    return kind
