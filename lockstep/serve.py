"""`lockstep serve MODEL`: an HTTP server with the protocols of OpenAI and Anthropic over a checkpoint or any other model.

HTTP ─► Endpoint ─► RolloutClient ─► one worker with a rollout engine, which batches the requests of all clients
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.observability.console import LogHandler
from lockstep.registry import did_you_mean
from lockstep.utils.local_http import bind
from lockstep.utils.model_path import base_folder, is_model_folder, local_model_folder
from lockstep.utils.untrusted import message_of

if TYPE_CHECKING:
    from lockstep.agents.endpoint.server import Endpoint, ServerSettings
    from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
    from lockstep.workers.rollout_client import RolloutClient

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "LOCKSTEP_SERVE_TOKEN"
LONGEST_BY_DEFAULT = 32768
"""Tokens of prompt and answer, for models that have more positions."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[LogHandler()])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        service = Service(options)
        return asyncio.run(service.run())
    except ValueError as error:
        sys.stderr.write(f"lockstep serve: {error}\n")
        return 2
    except KeyboardInterrupt:  # while the model was loaded
        return 130


class SteadyClient:
    """Requests to the rollout, of which none ends the others' service.

    If the engine fails, it is started again, and the requests that it had are tried again, one at a time: a request that fails
    alone gets the error. An engine that does not answer a simple request either is broken.

    on_broken: called then.
    """

    def __init__(self, client: "RolloutClient", on_broken: Callable[[], None]) -> None:
        self.client, self._on_broken = client, on_broken
        self._alone = asyncio.Lock()

    async def generate(self, request: "GenerationRequest") -> "Completion":
        async with self._alone:  # wait while another one is tried again
            pass
        try:
            return await self.client.generate(request)
        except Exception:
            if self.client.failure is None:  # it is of this request alone
                raise
        async with self._alone:
            await self._recover()
            try:
                return await self.client.generate(request)
            except Exception as error:
                logger.error("a request failed, alone too: %s: %s", type(error).__name__, message_of(error))
                await self._recover()
                raise

    async def _recover(self) -> None:
        """Start the engine again if it has failed; raises if it is broken."""
        if (failure := self.client.failure) is None:
            return
        from lockstep.protocol.generation import GenerationRequest, SamplingParams

        logger.warning("the engine failed and is started again: %s: %s", type(failure).__name__, message_of(failure))
        try:
            await self.client.restart()
            await self.client.generate(GenerationRequest([0], SamplingParams(temperature=0.0, max_tokens=1)))
        except Exception as error:
            self.client.failure = self.client.failure or error
            self._on_broken()
            raise


class Service:
    """The server of one command; creating it loads the model. It ends if the engine is broken."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._stopping = asyncio.Event()
        self.settings = self._server_settings()  # checked before the model is loaded
        self.client, self.endpoint = self._load()

    async def run(self) -> int:
        """Serve until Ctrl-C or SIGTERM; the exit code."""
        async with self.client.running(), self.endpoint.running():
            self._stop_on_signals()
            sys.stdout.write(f"serving {self.settings.models[0]} at {self.endpoint.url}/v1 (Ctrl-C stops)\n")
            sys.stdout.flush()
            await self._stopping.wait()
        if (failure := self.client.failure) is not None:
            sys.stderr.write(f"lockstep serve: generation failed: {type(failure).__name__}: {failure}\n")
            return 1
        return 0

    def _server_settings(self) -> "ServerSettings":
        try:
            from lockstep.agents.endpoint.server import ServerSettings
        except ModuleNotFoundError as error:
            raise ValueError(f"{error.name} is not installed: pip install 'lockstep-rl[serve]'") from error
        options = self.options
        for name, low, high in (("port", 0, 65535), ("max_num_seqs", 1, None)):
            value = getattr(options, name)
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"{low} to {high}"
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be {allowed}")
        self.sampling = _sampling(options)
        names = (options.name or _default_name(options.model), *options.alias)
        token = options.token or os.environ.get(TOKEN_VARIABLE) or None
        try:
            settings = ServerSettings(options.host, options.port, token, names, open_sessions=True)
        except ValueError as error:
            raise ValueError(f"{error} (--token, or the environment variable {TOKEN_VARIABLE})") from error
        bind(options.host, options.port).close()  # whether the port is free
        return settings

    def _load(self) -> "tuple[RolloutClient, Endpoint]":
        """The model in a worker of this process, and the endpoint over it."""
        options = self.options
        folder = local_model_folder(options.model, "MODEL")
        if not is_model_folder(folder):
            raise ValueError(f"{folder} is neither a model, a checkpoint nor a run: it has no config.json")
        base = base_folder(folder, "MODEL")
        max_model_len = _max_model_len(base, options.max_model_len)
        logger.info("loading %s", folder)

        from lockstep.agents.endpoint.answers import AnswerSettings
        from lockstep.agents.endpoint.server import Endpoint
        from lockstep.agents.renderer import Renderer
        from lockstep.agents.tool_parser import ToolParser
        from lockstep.config.data import ImageDataConfig
        from lockstep.data.image_prompts import ImageEncoder
        from lockstep.models.processor import hf_processor
        from lockstep.models.tokenizer import eos_token_ids, hf_tokenizer
        from lockstep.workers.rollout_client import RolloutClient

        if ":" not in options.tool_format and options.tool_format not in ToolParser.registry:
            hint = did_you_mean(options.tool_format, list(ToolParser.registry))
            raise ValueError(f"--tool-format {options.tool_format}: no such tool parser. {hint}")
        sampling = replace(self.sampling, max_tokens=min(options.max_tokens, max_model_len))
        tokenizer = hf_tokenizer(folder, key="MODEL")
        parser = ToolParser.get_tool_parser(options.tool_format, tokenizer)
        stop_ids = [*eos_token_ids(tokenizer, base), *parser.stop_token_ids]
        processor = hf_processor(folder, tokenizer, ImageDataConfig(), key="MODEL")
        renderer = Renderer(tokenizer, stop_ids, encoder=None if processor is None else ImageEncoder(processor))
        answers = AnswerSettings(sampling, max_model_len, options.tool_format, seed=options.seed)
        client = RolloutClient(_worker_group(options, max_model_len))
        steady = SteadyClient(client, on_broken=lambda: self._stopping.set())
        return client, Endpoint(steady.generate, renderer, answers, self.settings)

    def _stop_on_signals(self) -> None:
        """The first signal lets running requests end, the second does not."""

        def stop() -> None:
            if self._stopping.is_set():
                self.endpoint.stop_now()
            else:
                logger.info("stopping when running requests end; press Ctrl-C again to drop them")
                self._stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)


def _sampling(options: argparse.Namespace) -> "SamplingParams":
    """The default of requests that do not say."""
    from lockstep.protocol.generation import SamplingParams

    try:
        return SamplingParams(options.temperature, options.top_k, options.top_p, max_tokens=options.max_tokens)
    except ValueError as error:
        name, _, problem = str(error).partition("=")
        raise ValueError(f"--{name.replace('_', '-')} {problem}") from error


def _worker_group(options: argparse.Namespace, max_model_len: int) -> Any:
    from lockstep.config.generation import (
        GenerationConfig,
        GenerationDataConfig,
        GenerationRolloutConfig,
        as_validation,
    )
    from lockstep.config.model import HFModelConfig
    from lockstep.single_controller import ClassWithInitArgs, ResourcePool
    from lockstep.single_controller.local import LocalWorkerGroup
    from lockstep.utils.device import resolve_device
    from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker

    rollout = GenerationRolloutConfig(
        name=options.engine,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )
    data = GenerationDataConfig(max_prompt_length=max_model_len - 1, max_response_length=1)
    config = as_validation(GenerationConfig(data=data, model=HFModelConfig(path=options.model), rollout=rollout))
    init = ClassWithInitArgs(
        ActorRolloutRefWorker,
        config=config.actor_rollout_ref,
        role="rollout",
        device=resolve_device(options.device),
    )
    group: Any = LocalWorkerGroup(ResourcePool([1]), init)
    group.init_model()
    return group


def _default_name(model: str) -> str:
    """A folder's name; a name on the Hub as it is."""
    return Path(model).resolve().name if Path(model).expanduser().exists() else model


def _max_model_len(folder: Path, wanted: int | None) -> int:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings |= settings.get("text_config") or {}
    positions = settings.get("max_position_embeddings")
    if wanted is None:
        return min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    if wanted < 2 or (positions is not None and wanted > positions):
        raise ValueError(f"--max-model-len {wanted}: must be 2 to {positions or 'the positions of the model'}")
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep serve",
        description="Serve a checkpoint or any other model over HTTP, with the protocols of OpenAI and Anthropic.",
        epilog="docs/endpoint.md has the routes, and what is recorded per session.",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a run's folder (its newest checkpoint), a global_step_N folder, or what model.path takes",
    )
    add("--host", default="127.0.0.1", help="address; default: %(default)s. Others than loopback need a token")
    add("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    add("--token", help=f"what clients must send as their API key; default: the variable {TOKEN_VARIABLE}")
    add("--name", help="the model's name in requests; default: the name of its folder")
    add("--alias", action="append", default=[], help="another name in requests; '*' is any; may be repeated")
    engines = [name for name, info in ROLLOUT_ENGINES.built_in.items() if not info.is_remote]
    add("--engine", choices=engines, default="embedded", help="default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add(
        "--max-model-len",
        type=int,
        help=f"tokens of prompt and answer; default: the model's, up to {LONGEST_BY_DEFAULT}",
    )
    add("--max-num-seqs", type=int, default=256, help="requests that decode at once; default: %(default)s")
    add("--gpu-memory-utilization", type=float, default=0.8, help="as in rollout.*; default: %(default)s")
    add("--temperature", type=float, default=1.0, help="of requests without one; default: %(default)s")
    add("--top-p", type=float, default=1.0, help="of requests without one; default: %(default)s")
    add("--top-k", type=int, default=-1, help="of requests without one; default: %(default)s, all tokens")
    add("--max-tokens", type=int, default=4096, help="of requests without one; default: %(default)s")
    add("--tool-format", default="hermes", help="how the model writes tool calls; default: %(default)s")
    add("--seed", type=int, default=0, help="of sampling; default: %(default)s")
    return parser
