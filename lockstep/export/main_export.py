"""`lockstep export CHECKPOINT`: a checkpoint or a run as a Hugging Face folder that is checked before it gets its name.

    huggingface/ | shards/ | lora_adapter/ ─► .NAME.partial ─► tensors and log-probs compared ─► NAME, or NAME.rejected

Runs in one process on the CPU, whatever number of GPUs wrote the checkpoint.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lockstep.config.model import HFModelConfig
from lockstep.config.run_names import model_name
from lockstep.export.staging import CheckFailed, check_target, size_of, staged
from lockstep.utils.model_path import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    HF_FOLDER,
    PARTS,
    SHARDS_FOLDER,
    VERL_SHARDS,
    checkpoint_part,
    is_model_folder,
    local_model_folder,
    refuse_adapter_shards,
    refuse_damage,
)

if TYPE_CHECKING:
    from lockstep.export.sources import Source

DTYPES = ("bfloat16", "float16", "float32", "keep")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Found:
    """Where the weights are. folder: with config.json, adapter_config.json or shards; part: of the checkpoint, if it is one."""

    folder: Path
    part: Path | None


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        found = find(options.checkpoint, options.role)
        if options.adapter and not (found.folder / ADAPTER_CONFIG).is_file():
            raise ValueError(f"--adapter: {found.folder} is not a LoRA adapter")
        if options.adapter and options.dtype != "keep":
            raise ValueError(f"--dtype {options.dtype} does not apply to --adapter, which copies the adapter as it is")
        target = check_target(options.output or default_name(found, options), options.overwrite)
        if target.resolve() == found.folder.resolve():
            raise ValueError(f"-o {options.output} is the folder that is read; choose another name")
        console.print(f"reading {found.folder}")
        with staged(target) as folder:
            if options.adapter:
                shutil.copytree(found.folder, folder, dirs_exist_ok=True)
            else:
                _export(found, folder, options, console)
    except (ValueError, CheckFailed, OSError) as error:
        return exit_code_of(error)
    console.print(f"wrote {target}: {size_of(target)}")
    return 0


def exit_code_of(error: Exception) -> int:
    """Report the error; 2 if the arguments are wrong, 1 if the export failed."""
    sys.stderr.write(f"error: {error}\n")
    return 2 if isinstance(error, ValueError) else 1


def find(path: str, role: str | None) -> Found:
    """The weights of a run, a checkpoint, a part of one or a model's folder; ValueError if there are none. Imports no torch."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or is_model_folder(folder):
        return Found(local_model_folder(path, "CHECKPOINT"), None)
    try:
        part = checkpoint_part(folder, role or "actor")
        if part is None:
            raise ValueError("neither a run nor a checkpoint (global_step_N) nor a Hugging Face folder")
        if role is not None and part.name != role:
            raise ValueError(f"--role {role}: the checkpoint has no {role}, only {part}")
        if any(part.glob(VERL_SHARDS)):
            raise ValueError(f"is a checkpoint of verl; use `lockstep convert {part}`")
        if (part / SHARDS_FOLDER).is_dir() and not any(
            is_model_folder(part / name) for name in (HF_FOLDER, ADAPTER_FOLDER)
        ):
            refuse_adapter_shards(part)
            refuse_damage(part, SHARDS_FOLDER)
            return Found(part / SHARDS_FOLDER, part)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Found(local_model_folder(part, "CHECKPOINT"), part)


def default_name(found: Found, options: argparse.Namespace) -> str:
    """In the current folder, `RUN-stepN`, with the critic, the adapter and the dtype in its name."""
    part = (found.part or found.folder).resolve()
    ends = ["critic"] * (part.name == "critic") + ["adapter"] * options.adapter
    ends += [options.dtype] * (options.dtype != "keep")
    return "-".join([model_name(str(part)), *(ends or ["hf"] * (found.part is None))])


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB`, `2GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _export(found: Found, folder: Path, options: argparse.Namespace, console: Console) -> None:
    import torch

    from lockstep.export.check import check_outputs, check_tensors
    from lockstep.export.outputs import text_rows
    from lockstep.export.sources import dtype_name

    source = _source(found, options)
    dtype = source.own_dtype if options.dtype == "keep" else getattr(torch, options.dtype)
    if options.check == "log_probs" and 4 * source.num_parameters > (memory := _host_memory()):
        raise ValueError(
            f"the model has {4 * source.num_parameters / 1e9:.0f} GB in float32, but the host has {memory / 1e9:.0f} GB of memory; "
            "use --check tensors"
        )
    rows = text_rows(source.tokenizer)
    expected = source.outputs(rows) if options.check == "log_probs" else []
    source.write(folder, dtype, options.max_shard_size)
    kind = {"is_scalar": source.is_scalar, "trust_remote_code": options.trust_remote_code}
    number = check_tensors(source.tensors(), folder, dtype, **kind)
    console.print(f"{number} tensors are those of the checkpoint" + (f" in {dtype_name(dtype)}" if dtype else ""))
    if options.check == "log_probs":
        difference = check_outputs(expected, rows, folder, **kind)
        what = "scores" if source.is_scalar else "log-probs"
        console.print(
            f"largest difference of {difference.number} {what} between the checkpoint and transformers on the exported "
            f"folder, in float32: {difference.largest:.2g}"
        )


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _source(found: Found, options: argparse.Namespace) -> "Source":
    from lockstep.export.sources import Adapter, HuggingFaceFolder, Shards

    if (found.folder / ADAPTER_CONFIG).is_file():
        return Adapter(found.folder, options.model, options.trust_remote_code)
    if (found.folder / "config.json").is_file():
        return HuggingFaceFolder(found.folder, options.trust_remote_code)
    assert found.part is not None
    return Shards(found.folder, base_model(found.part, options.model, options.trust_remote_code))


def base_model(part: Path, given: str | None, trust_remote_code: bool) -> HFModelConfig:
    """The model that the run started from, by the checkpoint's config.yaml.

    given: its path, if it is elsewhere now. The file is data: what could run code is not read from it.
    """
    from lockstep.trainer.run.run_config import saved_config

    saved: Any = saved_config(part.parent if part.name in PARTS else part)
    if part.name in PARTS:
        saved = saved.get("actor_rollout_ref" if part.name == "actor" else "critic") or {}
    section = saved.get("model") or {}
    path = given or section.get("path")
    tokenizer = section.get("tokenizer_path") if given is None else None
    if not path:
        raise ValueError(f"{part} does not say which model the run started from; give it by --model")
    if "${" in f"{path}{tokenizer}":  # a checkpoint of others must not choose what is read from the environment
        raise ValueError(
            f"{part} was trained from {path} (tokenizer: {tokenizer or 'its own'}); environment variables in a saved config are "
            "not read, so give the model by --model"
        )
    return HFModelConfig(
        path=str(path),
        tokenizer_path=tokenizer,
        override_config=section.get("override_config") or {},
        custom_chat_template=section.get("custom_chat_template"),
        trust_remote_code=trust_remote_code,
    )


def add_weight_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="dtype of the weights (default: keep)")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=parse_size, default="5GB", help="most bytes per file (default: 5GB)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep export",
        description="Write a checkpoint as a Hugging Face folder for transformers, vLLM and others, and check that it computes "
        "the same.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a run (its newest checkpoint), global_step_N, or a model folder"
    )
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="folder to write (default: RUN-stepN in the current one)"
    )
    add_weight_options(parser)
    parser.add_argument("--role", choices=PARTS, help="part of an RL checkpoint (default: actor)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--merged", action="store_true", help="LoRA: merge the adapter into its base model (the default)")
    form.add_argument("--adapter", action="store_true", help="LoRA: copy the adapter")
    parser.add_argument(
        "--model", metavar="PATH", help="the run's base model, if it is no longer where the run read it"
    )
    parser.add_argument(
        "--check",
        choices=("log_probs", "tensors"),
        default="log_probs",
        help="tensors: compare the weights only, without loading the model (default: log_probs, which needs memory for the "
        "model in float32)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FOLDER")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's folder")
    return parser
