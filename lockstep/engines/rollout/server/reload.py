"""New weights for servers that cannot take them: a Hugging Face folder, and the user's command that restarts or reloads a server.

    buckets ─► partial/ ─► step_N/ (renamed when it is complete) ─► reload_command, for each server ─► health ─► one token

Rank 0 writes the folder. The one before it is kept until the next update, because a server may still have it open. Only folders
with this run's `MARKER` are removed: others may be anybody's.
"""

import asyncio
import contextlib
import logging
import os
import re
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
from lockstep.utils.progress import waiting

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Pause between two questions whether a server is ready."""
LAST_LINES = 5
"""Lines of a command's output in a message."""
MARKER = "lockstep_run.txt"
"""File of each written folder: the folder of the run that wrote it."""


class WeightsFolder:
    """Writes the weights of each version into the folder `step_{version}` of `root`, complete or not at all.

    owner:             folder of the run; the folders of other runs are refused.
    model, key, dtype: as in `RolloutEngine.load`; the written model has its architecture and settings.
    """

    def __init__(
        self,
        root: Path,
        owner: Path,
        model: HFModelConfig,
        key: str,
        dtype: torch.dtype,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.root = ensure_writable(root, f"{KEY}.weights_folder").resolve()
        self._owner = str(owner.expanduser().resolve())
        self._partial = self.root / "partial"
        self._tokenizer = tokenizer
        plain = replace(model, lora_rank=0, load_in_4bit=False)  # adapters come merged
        self._model, _ = open_causal_lm(plain, key, dtype, torch.device("cpu"), alone=True)
        self._model.__dict__["_weight_conversions"] = []  # weights come as `save_pretrained` writes them
        self._files: WeightFiles | None = None
        if strange := [path.name for path in self._steps() if _owner_of(path) is None]:
            logger.warning(
                "%s.weights_folder=%s: Lockstep did not write %s; the run stops if it has to write a folder of that name",
                *(KEY, self.root, ", ".join(sorted(strange))),
            )

    def _steps(self) -> list[Path]:
        return [path for path in self.root.iterdir() if re.fullmatch(r"step_\d+", path.name)]

    def begin(self) -> None:
        """Make room: of this run's folders only the newest is kept."""
        steps = self._steps()
        owners = {path: _owner_of(path) for path in [*steps, self._partial]}
        for path, owner in owners.items():
            if owner not in (None, self._owner):
                raise ServerError(
                    f"{KEY}.weights_folder={self.root}: the run in {owner} wrote {path.name} there, this run is in {self._owner}; "
                    f"set {KEY}.weights_folder to a folder of this run alone, delete {path} if that run has ended, or set "
                    f"{KEY}.weights_owner={owner} if it is this run and was moved"
                )
        self._remove(self._partial)
        own = sorted((path for path in steps if owners[path] is not None), key=lambda path: path.stat().st_mtime)
        for folder in own[:-1]:
            _remove_marked(folder)
        self._partial.mkdir()
        (self._partial / MARKER).write_text(f"{self._owner}\n", encoding="utf-8")
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
        self._remove(folder)  # written before the run was resumed from an earlier step
        return self._partial.rename(folder)

    def _remove(self, path: Path) -> None:
        """Remove this run's folder, if it is there; ServerError if something else is."""
        if _owner_of(path) == self._owner:
            _remove_marked(path)
        elif os.path.lexists(path):
            raise ServerError(
                f"{KEY}.weights_folder={self.root}: {path.name} is there, and this run did not write it (no {MARKER} of it); set "
                f"{KEY}.weights_folder to an empty folder, or move {path} away"
            )


def _remove_marked(folder: Path) -> None:
    """The marker goes last, so that what a stop leaves is removed next time."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    shutil.rmtree(folder)


def _owner_of(path: Path) -> str | None:
    """The run that wrote a folder; None if no run did."""
    marker = path / MARKER
    if path.is_symlink() or not marker.is_file():
        return None
    return marker.read_text(encoding="utf-8", errors="replace").strip()


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
            with waiting("server", f"{self._url}, {KEY}.reload_command (pid {process.pid})"):
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
