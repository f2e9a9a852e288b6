"""New weights for servers that cannot take them: a Hugging Face folder, and the user's command that restarts or reloads a server.

    buckets ─► partial/ ─► step_N/ (renamed when it is complete) ─► reload_command, for each server ─► health ─► one token

Rank 0 writes the folder. The one before it is kept until the next update, because a server may still have it open.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lockstep.config.actor_rollout_ref import ServerConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout.server.http import KEY, ServerError, Unavailable
from lockstep.engines.rollout.server.inference_server import Server
from lockstep.models.export import WeightFiles, policy_files
from lockstep.models.loading import open_causal_lm
from lockstep.utils.child_process import how_it_ended
from lockstep.utils.files import ensure_writable

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Pause between two questions whether a server is ready."""
LAST_LINES = 5
"""Lines of a command's output in a message."""


class WeightsFolder:
    """Writes the weights of each version into the folder `step_{version}` of `root`, complete or not at all.

    model, key, dtype: as in `RolloutEngine.load`; the written model has its architecture and settings.
    """

    def __init__(
        self, root: Path, model: HFModelConfig, key: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.root = ensure_writable(root, f"{KEY}.weights_folder").resolve()
        self._partial = self.root / "partial"
        self._tokenizer = tokenizer
        plain = replace(model, lora_rank=0, load_in_4bit=False)  # adapters come merged
        self._model, _ = open_causal_lm(plain, key, dtype, torch.device("cpu"), alone=True)
        self._files: WeightFiles | None = None

    def begin(self) -> None:
        """Make room: only the newest folder is kept."""
        shutil.rmtree(self._partial, ignore_errors=True)
        folders = sorted(self.root.glob("step_*"), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[:-1]:
            shutil.rmtree(folder)
        self._partial.mkdir()
        self._files = policy_files(self._model, self._partial)

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert self._files is not None, "begin comes first"
        for name, tensor in weights:
            self._files.add(name, tensor)

    def commit(self, version: int) -> Path:
        """Complete the folder and give it its name."""
        assert self._files is not None, "begin comes first"
        self._files.close()
        self._files = None
        self._tokenizer.save_pretrained(self._partial)
        folder = self.root / f"step_{version}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed from an earlier step
        return self._partial.rename(folder)


async def reload_server(
    server: Server, config: ServerConfig, folder: Path, version: int, probe: Callable[[Server], Awaitable[None]]
) -> None:
    """Run `reload_command` for a server and wait until it answers; ServerError if that fails or takes longer than allowed.

    probe: raises Unavailable until the server generates.
    """
    deadline = time.monotonic() + config.reload_timeout_s
    command = Command(config, server.url, folder, version)
    await command.run(deadline)
    failure: Unavailable | None = None
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s):
                await server.get(server.protocol.health_path)
                server.retry_at = 0.0
                return await probe(server)
        except Unavailable as error:
            failure = error
        except TimeoutError:
            break
        await asyncio.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    why = failure or f"{server.url} does not answer"
    raise ServerError(
        f"{why}; not ready {KEY}.reload_timeout_s={config.reload_timeout_s:g} after {KEY}.reload_command began, which {command}"
    )


class Command:
    """One run of `reload_command`. Its output is in a file of the folder; a server that it starts may go on writing there."""

    def __init__(self, config: ServerConfig, url: str, folder: Path, version: int) -> None:
        assert config.reload_command is not None
        values = {"{folder}": str(folder), "{version}": str(version), "{url}": url}
        self.words = [_filled(word, values) for word in shlex.split(config.reload_command)]
        self._log = folder / f"reload-{urlsplit(url).netloc.replace(':', '_')}.log"
        self._url = url
        self._timeout_s = config.reload_timeout_s
        self._ended = "has not ended"

    async def run(self, deadline: float) -> None:
        """deadline: of `time.monotonic`. ServerError unless the command ends with 0 before it."""
        logger.info("reloading %s: %s", self._url, shlex.join(self.words))
        try:
            with self._log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *self.words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the terminal must not reach the server
                )
        except OSError as error:
            raise ServerError(
                f"{self._url}: {KEY}.reload_command cannot be started ({error.strerror or error}): {shlex.join(self.words)}"
            ) from error
        try:
            code = await asyncio.wait_for(process.wait(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise ServerError(
                f"{self._url}: {KEY}.reload_command did not end within {KEY}.reload_timeout_s={self._timeout_s:g} and was killed: "
                f"{self}"
            ) from None
        self._ended = how_it_ended(code)
        if code != 0:
            raise ServerError(f"{self._url}: {KEY}.reload_command failed: {self}")

    def __str__(self) -> str:
        """How it ended, what ran, and the end of its output, on one line."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [" ".join(line.split()) for line in lines if line.strip()][-LAST_LINES:]
        said = f"its last output: {' | '.join(last)}" if last else "without output"
        return f"{self._ended}: {shlex.join(self.words)}; {said} ({self._log})"


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
