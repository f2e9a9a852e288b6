"""The data files that one entry of `data.train_files` or `data.val_files` means.

    file | folder | org/name[@revision][:config][:split] of the Hub | URL of a file or folder  ──►  local parquet or JSON files

Entries such as `reasoning_gym:chain_sum` mean no files: see `generated_data.py`.

Folders and Hub datasets have splits: by the `configs` of a dataset's README, else by the words train, validation and test in the
names of files and folders. Training takes the train split, validation the validation split, else the test split, else the only one.
A caller that names a split (`examples/data_preprocess`) gets that one; if it is not train, else the only one.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

from lockstep.utils.files import did_you_mean_path
from lockstep.utils.fs import check_protocol, copy_to_local, is_remote
from lockstep.utils.generated_data import EXTRAS, GeneratedData, is_generated, parse_generated
from lockstep.utils.hub import HubName, check_offline, dataset_listing, parse_name, snapshot
from lockstep.utils.model_path import without_prefix

logger = logging.getLogger(__name__)

Use = Literal["train", "val"]
"""What the files are for. Functions take the name of a split in its place."""
SUFFIXES = (".parquet", ".jsonl", ".json")
"""In order of preference: a folder with parquet files is read from those alone."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(?:-[0-9a-f]+)?")
FORMS = (
    "give a .parquet, .jsonl or .json file, a folder of them, org/name[@revision][:config][:split] of the Hugging Face Hub, "
    f"a URL, or {' or '.join(f'{source}:NAME' for source in EXTRAS)}"
)


@dataclass(frozen=True)
class HubDataset:
    """config and split: None selects the default ones."""

    name: HubName
    config: str | None = None
    split: str | None = None


def local_data_files(entries: str | Path | Sequence[str | Path], use: Use | str, key: str) -> list[Path]:
    """The local files of all entries, in order; remote ones are fetched. key: their config key, for messages."""
    found: list[Path] = []
    for entry in [entries] if isinstance(entries, str | Path) else entries:
        try:
            place = locate_data(entry, use)
            if isinstance(place, HubDataset):
                place = _hub_files(place, use)
            elif isinstance(place, GeneratedData):
                raise ValueError("has no files; only lockstep ppo and lockstep grpo read it")
            elif isinstance(place, str):
                copy = Path(copy_to_local(place))
                place = folder_files(copy, use) if copy.is_dir() else [_data_file(copy)]
        except ValueError as error:
            raise ValueError(f"{key}={entry}: {without_prefix(error, entry)}") from error
        found += place
    return found


def locate_data(entry: str | Path, use: Use | str) -> list[Path] | HubDataset | GeneratedData | str:
    """Local files, a dataset of the Hub, generated data, or a URL; ValueError, without the key, if it is none. Contacts nobody."""
    text = str(entry)
    if is_generated(text):
        return parse_generated(text)
    path = Path(text.removeprefix("file://")).expanduser()
    if path.is_dir():
        return folder_files(path, use)
    if path.exists():
        return [_data_file(path)]
    if is_remote(text):
        check_protocol(text)
        return text
    base, *parts = text.split(":")
    name = None if path.suffix in SUFFIXES else parse_name(base, "dataset")
    if name is None or len(parts) > 2 or not all(parts):
        raise ValueError(f"no such file or folder{did_you_mean_path(path)}; {FORMS}")
    check_offline(name)
    config, split = (None, *parts) if len(parts) == 1 else parts or (None, None)
    return HubDataset(name, config, split)


def folder_files(folder: Path, use: Use | str) -> list[Path]:
    """The folder's data files for this use, sorted; hidden files and folders are skipped."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    splits = splits_of(names)
    split = choose_split(splits, None, use, "name its files instead")
    return [folder / name for name in splits[split]]


def splits_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Split -> its data files. Files that name no split are the train split if no file names one, else they are left out."""
    names = [name for name in names if not any(part.startswith(".") for part in PurePosixPath(name).parts)]
    data = [name for name in names if name.endswith(SUFFIXES) and PurePosixPath(name).name not in _NOT_DATA]
    kinds = [kind for kind in SUFFIXES if any(name.endswith(kind) for name in data)]
    if not kinds:
        others = sorted({PurePosixPath(name).suffix for name in names} - {""})
        raise ValueError(f"has no .parquet, .jsonl or .json file (found: {', '.join(others) or 'nothing'})")
    splits: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for name in (name for name in data if name.endswith(kinds[0])):
        split = split_of(name)
        (unnamed if split is None else splits.setdefault(split, [])).append(name)
    if splits and unnamed:
        logger.warning("files that name no split are not read, because others do: %s", ", ".join(unnamed))
    return splits or {"train": unnamed}


def split_of(name: str) -> str | None:
    """`data/train-00000-of-00002.parquet` is of split train, `validation/0.jsonl` of validation, `problems.parquet` of none."""
    path = PurePosixPath(name)
    if (shard := _SHARD.fullmatch(path.stem)) and path.parts[:1] == ("data",):
        return shard[1]
    for part in (path.stem, *reversed(path.parts[:-1])):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _WORDS:
                return _WORDS[word]
    return None


def choose_split(splits: Mapping[str, Any], wanted: str | None, use: Use | str, remedy: str) -> str:
    """The wanted split, or the one for this use. remedy: what to do if there is none."""
    preferred = [wanted] if wanted else ["validation", "test"] if use == "val" else [use]
    for split in preferred:
        if split in splits:
            return split
    if not wanted and use != "train" and len(splits) == 1:
        return next(iter(splits))
    raise ValueError(f"has no {' or '.join(preferred)} split, only {', '.join(splits)}; {remedy}")


def _data_file(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    return path


def _hub_files(dataset: HubDataset, use: Use | str) -> list[Path]:
    """Download the files of one split."""
    name = dataset.name
    folder, names = dataset_listing(name)
    readme = folder / "README.md"
    card = _card(readme.read_text(encoding="utf-8")) if readme.is_file() else {}
    configs = _configs(card, names)
    config = _choose_config(configs, dataset)
    splits = _splits(configs[config], names)
    split = choose_split(splits, dataset.split, use, f"write {name}:{'' if len(configs) == 1 else config + ':'}SPLIT")
    files = splits[split]
    commit = HubName(name.repo, folder.name, "dataset")
    logger.info("%s at %s: %d files of split %s", name, folder.name[:7], len(files), split)
    fetched = snapshot(commit, files)
    missing = [file for file in files if not (fetched / file).is_file()] or _missing_shards(files)
    if missing:
        raise ValueError(f"{missing[0]} is not in {fetched}; run `{name.command}` with network access")
    return [fetched / file for file in files]


def _card(readme: str) -> dict[str, Any]:
    """The YAML block at the start of a README."""
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", readme, flags=re.S)
    try:
        card = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        card = None
    return card if isinstance(card, dict) else {}


def _configs(card: Mapping[str, Any], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Config -> its entry in the README; without those, one config per folder, or one for all files."""
    entries = [entry for entry in card.get("configs") or () if isinstance(entry, Mapping)]
    if entries:
        return {str(entry.get("config_name", "default")): entry for entry in entries}
    folders = sorted({name.partition("/")[0] for name in names if name.endswith(SUFFIXES)})
    if len(folders) > 1 and not any(folder.endswith(SUFFIXES) or split_of(f"{folder}/x") for folder in folders):
        return {folder: {"data_dir": folder} for folder in folders}
    return {"default": {}}


def _choose_config(configs: Mapping[str, Mapping[str, Any]], dataset: HubDataset) -> str:
    if dataset.config is not None and dataset.config in configs:
        return dataset.config
    listed = f"has the configs {', '.join(configs)}; write {dataset.name}:CONFIG:SPLIT"
    if dataset.config is not None:
        raise ValueError(f"has no config {dataset.config}; it {listed}")
    marked = [config for config, entry in configs.items() if entry.get("default") or config == "default"]
    if not marked and len(configs) > 1:
        raise ValueError(listed)
    return next(iter(marked or configs))


def _splits(entry: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """Split -> files of one config."""
    below = f"{str(entry['data_dir']).strip('/')}/" if entry.get("data_dir") else ""
    files = entry.get("data_files")
    if not files:
        return splits_of(name for name in names if name.startswith(below))
    if isinstance(files, Mapping):
        files = [{"split": split, "path": path} for split, path in files.items()]
    if isinstance(files, str) or not isinstance(files[0], Mapping):
        files = [{"split": "train", "path": files}]
    return {str(file["split"]): _matching(file["path"], names, below) for file in files}


def _matching(patterns: str | Sequence[str], names: Sequence[str], below: str) -> list[str]:
    wanted = [below + pattern for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    found = [name for name in names if any(fnmatch(name, p) or name.startswith(f"{p.rstrip('/')}/") for p in wanted)]
    if not found or not all(name.endswith(SUFFIXES) for name in found):
        problem = "no parquet or JSON files" if found else "not there"
        raise ValueError(
            f"its README names {', '.join(wanted)}, which are {problem}; the Hub's parquet copy may be at "
            "@refs/convert/parquet"
        )
    return sorted(found)


def _missing_shards(files: Sequence[str]) -> list[str]:
    """What is missing by the numbering `-00000-of-00002`; only a cache without a listing can lack a shard."""
    counted: dict[tuple[str, int], int] = {}
    for file in files:
        if shard := _SHARD.fullmatch(PurePosixPath(file).stem):
            place = (f"{PurePosixPath(file).parent}/{shard[1]}", int(shard[2]))
            counted[place] = counted.get(place, 0) + 1
    return [f"a part of {name} ({count} files of {total})" for (name, total), count in counted.items() if count < total]
