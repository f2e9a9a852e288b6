"""Names on the Hugging Face Hub (`org/name[@revision]`) and the folders of their files in the local Hub cache."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.utils.files import did_you_mean_path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w./-]+))?")

MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
"""Config and tokenizer."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
"""A folder with one of them has a tokenizer."""
SAFETENSORS, PICKLES = "*.safetensors", "pytorch_model*.bin"
_NOT_THE_MODEL = ("*/*", "consolidated*")
"""Subfolders hold other formats (ONNX, GGUF), `consolidated` is a second copy of the weights."""


@dataclass(frozen=True)
class HubName:
    """A repository. revision: branch, tag or commit; None is main."""

    repo: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def command(self) -> str:
        """The shell command that fetches it."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repo}{revision}{' --repo-type dataset' if self.kind == 'dataset' else ''}"


def parse_name(text: str, kind: Literal["model", "dataset"] = "model") -> HubName | None:
    """The repository that `text` names, or None if it cannot be a name."""
    match = _NAME.fullmatch(text)
    return None if match is None or ".." in text or "--" in match[1] else HubName(match[1], match[2], kind)


def check_offline(name: HubName) -> None:
    """ValueError if the Hub may not be asked (`HF_HUB_OFFLINE`) and the cache has nothing of the repository."""
    from huggingface_hub import constants

    stored = Path(constants.HF_HUB_CACHE) / f"{name.kind}s--{name.repo.replace('/', '--')}"
    revision = name.revision or constants.DEFAULT_REVISION
    is_stored = (stored / "refs" / revision).exists() or (stored / "snapshots" / revision).exists()
    if constants.HF_HUB_OFFLINE and not is_stored:
        raise ValueError(_not_cached(name, "HF_HUB_OFFLINE=1"))


def model_snapshot(name: HubName, weights: bool) -> Path:
    """The folder of the model's files in the Hub cache; missing ones are downloaded, by one process per machine.

    A model that is complete in the cache is used without asking the Hub. weights: false fetches only config and tokenizer.
    """
    wanted = (*MODEL_FILES, SAFETENSORS) if weights else MODEL_FILES
    if (folder := _cached(name, wanted, weights)) is not None:
        return folder
    with _one_process(name):
        if (folder := _cached(name, wanted, weights)) is not None:
            return folder
        logger.info("fetching %s from the Hub", name)
        folder = snapshot(name, wanted, _NOT_THE_MODEL)
        if weights and not any(folder.glob(SAFETENSORS)):
            folder = snapshot(name, (*MODEL_FILES, PICKLES), _NOT_THE_MODEL)
    lacks = ""
    if not (folder / "config.json").is_file() and (weights or not has_tokenizer(folder)):
        lacks = "config.json" if weights else "config.json and no tokenizer"
    elif weights and not has_weights(folder):
        lacks = f"complete weights (looked for {SAFETENSORS} and {PICKLES})"
    if lacks:
        raise ValueError(
            f"{folder} has no {lacks}; run `{name.command}` with network access, or choose a repository in the format of "
            "transformers"
        )
    return folder


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights, and every shard that its index names."""
    for pattern in (SAFETENSORS, PICKLES):
        shards = set()
        for index in folder.glob(f"{pattern}.index.json"):
            shards |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if shards:
            return all((folder / shard).is_file() for shard in shards)
        if any("-of-" not in file.name for file in folder.glob(pattern)):  # a shard without its index is not enough
            return True
    return False


def dataset_listing(name: HubName) -> tuple[Path, list[str]]:
    """The dataset's folder in the Hub cache, with its README, and the names of all its files.

    The Hub is asked for the current revision; if it cannot be reached, the cached one is used.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    folder = snapshot(name, ("README.md", ".gitattributes"))
    try:
        files = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=folder.name)
        return folder, sorted(file.path for file in files)
    except CachedRepoTreeNotFoundError:  # the cache was not written by a snapshot download
        return folder, sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def snapshot(name: HubName, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Download the files that match `wanted` and not `unwanted`; ValueError in one sentence if that fails."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
    try:
        with _progress_bars():
            folder = snapshot_download(
                name.repo,
                repo_type=name.kind,
                revision=name.revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(unwanted),
            )
        return Path(folder)
    except GatedRepoError as error:
        gated = f"the {name.kind} is gated: accept its terms on its Hub page, then set HF_TOKEN or run `hf auth login`"
        raise ValueError(gated) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"the Hub's {name.kind} {name.repo} has no revision {name.revision}") from error
    except RepositoryNotFoundError as error:
        near = did_you_mean_path(name.repo)
        missing = f"no such folder{near}, and the Hub has no {name.kind} of this name; if it is private, set HF_TOKEN"
        raise ValueError(missing) from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE=1" if constants.HF_HUB_OFFLINE else _reason(error.__cause__ or error)
        raise ValueError(_not_cached(name, why)) from error
    except (HTTPError, OSError) as error:
        raise ValueError(f"it cannot be downloaded to {constants.HF_HUB_CACHE}: {_reason(error)}") from error


def _cached(name: HubName, wanted: Sequence[str], weights: bool) -> Path | None:
    """The model's folder in the cache, if it has all that is wanted."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(_NOT_THE_MODEL),
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    try:  # with the repository's listing in the cache, `snapshot_download` has compared
        get_cached_repo_tree(name.repo, revision=folder.name)
        complete = True
    except CachedRepoTreeNotFoundError:  # loaders of transformers store single files
        complete = (folder / "config.json").is_file() and has_tokenizer(folder)
    return folder if complete and (not weights or has_weights(folder)) else None


@contextmanager
def _one_process(name: HubName) -> Iterator[None]:
    """Let the other processes of this machine wait, so that there is one download and one progress bar."""
    from filelock import FileLock
    from huggingface_hub import constants

    locks = Path(constants.HF_HUB_CACHE) / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"lockstep-{name.repo.replace('/', '--')}.lock").acquire()
    except OSError as error:
        raise ValueError(f"it cannot be downloaded to {constants.HF_HUB_CACHE}: {_reason(error)}") from error
    with lock:
        yield


@contextmanager
def _progress_bars() -> Iterator[None]:
    """Show them although transformers' bars are off, unless HF_HUB_DISABLE_PROGRESS_BARS is set."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS or not are_progress_bars_disabled():
        yield
        return
    enable_progress_bars()
    try:
        yield
    finally:
        disable_progress_bars()


def _not_cached(name: HubName, why: str) -> str:
    from huggingface_hub import constants

    return (
        f"no such folder{did_you_mean_path(name.repo)}, and the Hub's {name.kind} of this name is not in the cache "
        f"{constants.HF_HUB_CACHE} (or not all of it) and cannot be fetched ({why}); run `{name.command}` with network access"
    )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
