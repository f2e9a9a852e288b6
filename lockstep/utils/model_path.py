"""The local folder of a model or tokenizer, whatever its path is.

    local folder | run's global_step_N | org/name[@revision] of the Hub | URL  ──►  folder with config.json, tokenizer, weights

`locate_model` tells what a path is without network or heavy imports, for checks; `local_model_folder` fetches it.
"""

import re
from pathlib import Path

from lockstep.utils.fs import check_protocol, copy_matching, copy_to_local, is_remote
from lockstep.utils.hub import MODEL_FILES, HubName, check_offline, model_snapshot, parse_name

_STEP_FOLDER = re.compile(r"global_step_\d+")
_SECTIONS = {"actor": "actor_rollout_ref.actor", "critic": "critic", "": "trainer"}
"""Part of a checkpoint -> the section of its `checkpoint` settings; SFT's has no parts."""
FORMS = "give a local folder, org/name[@revision] of the Hugging Face Hub, a run's global_step_N folder or a URL"


def local_model_folder(path: str | Path, key: str, *, weights: bool = True) -> Path:
    """The folder, on this machine; every process of a run may call this, one per machine downloads.

    key:     the config key of the path, for messages; one of the critic selects the critic of a checkpoint.
    weights: false is enough for a tokenizer or a config.
    """
    try:
        place = locate_model(path, key)
        if isinstance(place, HubName):
            return model_snapshot(place, weights)
        if isinstance(place, Path):
            return place
        return Path(copy_to_local(place) if weights else copy_matching(place, MODEL_FILES))
    except ValueError as error:
        raise ValueError(f"{key}={path}: {without_prefix(error, path)}") from error


def revision_of(folder: Path) -> str:
    """The commit of a folder in the Hub cache; empty for others."""
    return folder.name if folder.parent.name == "snapshots" else ""


def without_prefix(error: ValueError, path: str | Path) -> str:
    """The message without the path at its start, for one that begins with the key and the path."""
    return str(error).removeprefix(str(path)).lstrip(": ")


def locate_model(path: str | Path, key: str) -> Path | HubName | str:
    """The local folder, the name on the Hub or the URL that `path` means; ValueError, without the key, if there is none."""
    text = str(path)
    folder = Path(text.removeprefix("file://")).expanduser()
    role = "critic" if key.startswith("critic.") else "actor"
    if text and folder.is_dir():
        return _model_in(folder, role)
    if is_remote(text):
        check_protocol(text)
        is_checkpoint = _STEP_FOLDER.fullmatch(text.rstrip("/").rpartition("/")[2])
        return f"{text.rstrip('/')}/{role}/huggingface" if is_checkpoint else text
    name = parse_name(text)
    if name is None:
        wrong = (
            "is a file, not a model's folder"
            if folder.is_file()
            else f"no such folder (looked for {folder.absolute()})"
        )
        raise ValueError(f"{wrong}; {FORMS}")
    check_offline(name)
    return name


def _model_in(folder: Path, role: str) -> Path:
    """The folder itself, or the Hugging Face folder of a checkpoint: `global_step_N/<role>/huggingface`, without the role if SFT
    wrote it."""
    if (folder / "config.json").is_file():
        return folder
    if _STEP_FOLDER.fullmatch(folder.resolve().name):
        part = next((part for part in (role, "actor") if (folder / part).is_dir()), "")
        return _exported(folder / part)
    if folder.name in ("actor", "critic") and _STEP_FOLDER.fullmatch(folder.resolve().parent.name):
        return _exported(folder)
    steps = sorted(folder.glob("global_step_*"), key=lambda step: int(step.name.rpartition("_")[2] or 0))
    if steps:
        raise ValueError(f"is a run's folder; give one of its checkpoints, such as {steps[-1]}")
    return folder


def _exported(part: Path) -> Path:
    if (part / "huggingface" / "config.json").is_file():
        return part / "huggingface"
    name = part.name if part.name in _SECTIONS else ""
    raise ValueError(
        f"the checkpoint has no {f'{name}/huggingface'.lstrip('/')} folder, because it was saved without hf_model; add hf_model "
        f"to {_SECTIONS[name]}.checkpoint.save_contents in the run that writes it"
    )
