"""The local folder of a model or tokenizer, whatever its path is.

    local folder | run | run's global_step_N[/actor|/critic] | org/name[@revision] of the Hub | URL
        ──►  folder with config.json, tokenizer, weights; or with adapter_config.json, for a checkpoint of LoRA

`locate_model` tells what a path is without network or heavy imports, for checks; `local_model_folder` fetches it.
"""

import json
import re
from pathlib import Path

from lockstep.utils.checkpoint_folder import MANIFEST, STEP_FOLDER, check_sizes, checkpoints_by_age, read_manifest
from lockstep.utils.files import did_you_mean_path
from lockstep.utils.fs import check_protocol, copy_matching, copy_to_local, is_remote
from lockstep.utils.hub import MODEL_FILES, HubName, check_offline, has_weights, model_snapshot, parse_name
from lockstep.utils.vision import vision_problem

HF_FOLDER, ADAPTER_FOLDER, SHARDS_FOLDER = "huggingface", "lora_adapter", "shards"
ADAPTER_CONFIG = "adapter_config.json"
LORA_FILE = "lora.json"
"""Written next to shards that hold adapters without their base."""
PARTS = ("actor", "critic")
"""Parts of a checkpoint of RL; those of other programs have none."""
VERL_SHARDS = "model_world_size_*_rank_*.pt"
_OF_A_RUN = ("metrics.jsonl", "config.yaml", ".run.lock")
_REMOTE_CHECKPOINT = re.compile(rf"(.*/{STEP_FOLDER.pattern})(?:/({'|'.join(PARTS)}))?")
FORMS = "give a local folder, org/name[@revision] of the Hugging Face Hub, a run or its global_step_N folder, or a URL"


def local_model_folder(path: str | Path, key: str, *, weights: bool = True) -> Path:
    """The folder, on this machine; every process of a run may call this, one per machine downloads.

    key:     the config key of the path, for messages; one of the critic selects the critic of a checkpoint.
    weights: false is enough for a tokenizer or a config. With weights an unsupported vision model is refused, on the Hub
             before its weights are fetched.
    """
    try:
        place = locate_model(path, key)
        if isinstance(place, HubName):
            folder = model_snapshot(place, weights=False)
        elif isinstance(place, Path):
            folder = place
        else:
            folder = Path(copy_to_local(place) if weights else copy_matching(place, MODEL_FILES))
        if weights and (problem := vision_problem(folder)):
            raise ValueError(problem)
        return model_snapshot(place, weights) if isinstance(place, HubName) and weights else folder
    except ValueError as error:
        raise ValueError(f"{key}={path}: {without_prefix(error, path)}") from error


def is_adapter(folder: Path) -> bool:
    """Whether the folder is an adapter of peft, rather than a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def base_folder(folder: Path, key: str, *, weights: bool = True) -> Path:
    """The folder of the base model that an adapter names; any other folder is its own base. An unsupported vision model is
    refused."""
    if not is_adapter(folder):
        if problem := vision_problem(folder):
            raise ValueError(f"{key}={folder} {problem}")
        return folder
    try:
        named = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{key}={folder}: {ADAPTER_CONFIG} cannot be read ({error})") from error
    if not named:
        raise ValueError(f"{key}={folder}: {ADAPTER_CONFIG} does not name its base model (base_model_name_or_path)")
    relative = folder / named  # to the adapter
    return local_model_folder(relative if relative.is_dir() else named, f"base model of {key}", weights=weights)


def weight_folders(path: str, adapter_path: str | None, section: str, *, weights: bool = True) -> list[Path]:
    """The folders that determine a model's weights: its own, of an adapter also its base, and that of `lora_adapter_path`."""
    folder = local_model_folder(path, f"{section}.path", weights=weights)
    found = [folder, base_folder(folder, f"{section}.path", weights=weights)]
    if adapter_path is not None:
        found.append(local_model_folder(adapter_path, f"{section}.lora_adapter_path", weights=weights))
    return list(dict.fromkeys(found))


def revision_of(folder: Path) -> str:
    """The commit of a folder in the Hub cache; empty for others."""
    return folder.name if folder.parent.name == "snapshots" else ""


def without_prefix(error: ValueError, path: str | Path) -> str:
    """The message without the path at its start, for one that begins with the key and the path."""
    return str(error).removeprefix(str(path)).lstrip(": ")


def is_model_folder(folder: Path) -> bool:
    """Whether it is a model of transformers or an adapter of peft."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def locate_model(path: str | Path, key: str) -> Path | HubName | str:
    """The local folder, the name on the Hub or the URL that `path` means; ValueError, without the key, if there is none."""
    text = str(path)
    folder = _folder(path)
    role = "critic" if key.startswith("critic.") else "actor"
    if text and folder.is_dir():
        part = None if is_model_folder(folder) else checkpoint_part(folder, role)
        return folder if part is None else _model_in(part)
    if is_remote(text):
        check_protocol(text)
        remote = _REMOTE_CHECKPOINT.fullmatch(text.rstrip("/"))
        return f"{remote[1]}/{remote[3] or role}/{HF_FOLDER}" if remote else text
    refuse_missing_step(folder)
    name = parse_name(text)
    if name is None:
        wrong = (
            "is a file, not a model's folder"
            if folder.is_file()
            else f"no such folder (looked for {folder.absolute()}){did_you_mean_path(folder)}"
        )
        raise ValueError(f"{wrong}; {FORMS}")
    check_offline(name)
    return name


def newest_of_run(path: str | Path) -> Path | None:
    """The newest complete checkpoint if `path` is a run's folder, None if it is not; ValueError if the run has none."""
    folder = _folder(path)
    if not folder.is_dir() or is_model_folder(folder) or STEP_FOLDER.fullmatch(folder.resolve().name):
        return None
    checkpoints = checkpoints_by_age(folder)
    if checkpoints and checkpoints[-1][0] >= 0:
        return checkpoints[-1][2]
    if checkpoints:
        names = _names([step for _, step, _ in checkpoints])
        raise ValueError(
            f"is a run's folder without a complete checkpoint ({names}: no valid {MANIFEST}); give one of its checkpoints"
        )
    if any((folder / name).is_file() for name in _OF_A_RUN):
        raise ValueError("is a run's folder, but has no checkpoint yet (trainer.save_freq)")
    return None


def checkpoint_part(folder: Path, role: str) -> Path | None:
    """`global_step_N/<role>` of a run, a checkpoint or one of its parts, without the role if the checkpoint has no parts; None
    for any other folder.

    A checkpoint without a critic gives its actor, from which a critic may start.
    """
    folder = newest_of_run(folder) or folder
    actual = folder.resolve()
    if STEP_FOLDER.fullmatch(actual.name):
        return next((folder / part for part in (role, "actor") if (folder / part).is_dir()), folder)
    return folder if actual.name in PARTS and STEP_FOLDER.fullmatch(actual.parent.name) else None


def refuse_missing_step(folder: Path) -> None:
    """ValueError if `folder` would be a checkpoint, or a part of one, that does not exist in a folder that does."""
    step = folder.parent if folder.name in PARTS else folder
    if folder.is_dir() or not STEP_FOLDER.fullmatch(step.name) or not step.parent.is_dir():
        return
    if step.is_dir():
        held = [part for part in PARTS if (step / part).is_dir()]
        raise ValueError(f"no such folder; {step.name} has {', '.join(held) or 'no parts: leave out ' + folder.name}")
    steps = [number for _, number, _ in checkpoints_by_age(step.parent)]
    raise ValueError(f"no such checkpoint; {step.parent} has {_names(steps) if steps else 'none'}")


def _folder(path: str | Path) -> Path:
    return Path(str(path).removeprefix("file://")).expanduser()


def _names(steps: list[int]) -> str:
    return ", ".join(f"global_step_{step}" for step in sorted(steps))


def _model_in(part: Path) -> Path:
    """The Hugging Face folder of a checkpoint's part, or its adapter."""
    for name in (HF_FOLDER, ADAPTER_FOLDER):
        if is_model_folder(part / name) and has_weights(part / name):
            refuse_damage(part, name)
            return part / name
    if any(part.glob(VERL_SHARDS)):
        raise ValueError(
            f"is a checkpoint of verl without Hugging Face weights; run `lockstep convert {part} -o FOLDER`"
        )
    refuse_adapter_shards(part)
    if (part / SHARDS_FOLDER).is_dir():
        raise ValueError(
            "the checkpoint was saved without hf_model (checkpoint.save_contents), so it has no Hugging Face weights; run "
            f"`lockstep export {part} -o FOLDER`, and give FOLDER"
        )
    raise ValueError(
        f"the checkpoint is damaged: {part} has neither {HF_FOLDER} nor {ADAPTER_FOLDER} nor {SHARDS_FOLDER}"
    )


def refuse_adapter_shards(part: Path) -> None:
    """ValueError if the shards of a checkpoint's part are those of LoRA adapters, which need their base."""
    if (part / LORA_FILE).is_file():
        raise ValueError(
            f"the checkpoint has LoRA adapters without {ADAPTER_FOLDER}, because it was saved without hf_model; run the same "
            "command with hf_model in checkpoint.save_contents to save it again"
        )


def refuse_damage(part: Path, name: str) -> None:
    """By the sizes in the manifest; a folder that was copied without it is not checked."""
    step, below = (part.parent, f"{part.name}/{name}/") if part.name in PARTS else (part, f"{name}/")
    if (step / MANIFEST).is_file():
        try:
            check_sizes(step, read_manifest(step.resolve()), below)
        except ValueError as damage:
            raise ValueError(f"the checkpoint is damaged: {damage}") from damage
