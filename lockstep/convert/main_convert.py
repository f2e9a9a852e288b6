"""`lockstep convert PATH`: a checkpoint of verl as a Hugging Face folder; a config or a script of verl in our spelling."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lockstep.convert.verl_config import convert_config, convert_script
from lockstep.export.main_export import add_weight_options, exit_code_of
from lockstep.export.staging import CheckFailed, check_target, size_of, staged
from lockstep.utils.hub import MODEL_FILES, has_tokenizer
from lockstep.utils.model_path import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    HF_FOLDER,
    PARTS,
    VERL_SHARDS,
    local_model_folder,
)

_TRACKER = "latest_checkpointed_iteration.txt"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    path = Path(options.path).expanduser()
    try:
        if path.is_dir():
            return _convert_checkpoint(find(path, options.role), options)
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file or folder; give a checkpoint, a YAML file or a shell script of verl"
            )
        text, report = convert_config(path) if path.suffix in (".yaml", ".yml") else convert_script(path)
        if options.output is None:
            sys.stdout.write(text)
        elif Path(options.output).exists() and not options.overwrite:
            raise ValueError(f"-o {options.output} exists; add --overwrite to replace it, or choose another name")
        else:
            Path(options.output).write_text(text, encoding="utf-8")
        if number := len(report.refused) + len(report.to_fix):
            sys.stderr.write(
                f"{number} setting{'s' * (number > 1)} to look at: see `refused` and `to fix` in the comments\n"
            )
        return 1 if number else 0
    except (ValueError, CheckFailed, OSError) as error:
        return exit_code_of(error)


def find(folder: Path, role: str) -> Path:
    """The folder with the shards: of a run (the checkpoint that verl's tracker names), a checkpoint or one of its parts."""
    if (folder / _TRACKER).is_file():
        folder /= f"global_step_{(folder / _TRACKER).read_text().strip()}"
        if not folder.is_dir():
            raise ValueError(f"{folder}, which {_TRACKER} names, does not exist")
    if (folder / role).is_dir():
        folder /= role
    if any(folder.glob(VERL_SHARDS)):
        return folder
    if (folder / "dist_ckpt").is_dir():
        raise ValueError(f"{folder} is a Megatron checkpoint, which is not supported; merge it by verl's model_merger")
    if (folder / "shards").is_dir() or (folder / HF_FOLDER).is_dir():
        raise ValueError(f"{folder} is not a checkpoint of verl with {VERL_SHARDS}; use `lockstep export {folder}`")
    steps = sorted((path.name for path in folder.glob("global_step_*")), key=lambda name: (len(name), name))
    more = f"; give one of {', '.join(steps)}" if steps else ""
    raise ValueError(f"{folder} has no {VERL_SHARDS}, so it is not a checkpoint of verl{more}")


def _convert_checkpoint(part: Path, options: argparse.Namespace) -> int:
    if options.output is None:
        raise ValueError("-o FOLDER is needed to convert a checkpoint")
    target = check_target(options.output, options.overwrite)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    adapter = part / ADAPTER_FOLDER
    if options.adapter and not (adapter / ADAPTER_CONFIG).is_file():
        raise ValueError(f"--adapter: {part} has no {ADAPTER_FOLDER}")
    with staged(target) as folder:
        if options.adapter:
            shutil.copytree(adapter, folder, dirs_exist_ok=True)
        else:
            _write_model(part, folder, options, console)
    console.print(f"wrote {target}: {size_of(target)}")
    return 0


def _write_model(part: Path, folder: Path, options: argparse.Namespace, console: Console) -> None:
    files = _config_folder(part, options.model)
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    from lockstep.convert.verl_checkpoint import VerlCheckpoint
    from lockstep.export.check import check_outputs, check_tensors
    from lockstep.export.outputs import text_rows
    from lockstep.export.sources import HuggingFaceFolder, cast_all, dtype_name
    from lockstep.models.export import save_tensors

    dtype = None if options.dtype == "keep" else getattr(torch, options.dtype)
    console.print(f"reading {part}")
    checkpoint = VerlCheckpoint(part)
    save_tensors(cast_all(checkpoint.tensors(), dtype), folder, options.max_shard_size)
    for notice in checkpoint.notices:
        console.print(notice)
    for file in sorted({file for pattern in MODEL_FILES for file in files.glob(pattern)}):
        if file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype_name(dtype or next(tensor.dtype for _, tensor in checkpoint.tensors()))
    if checkpoint.is_scalar:
        config["num_labels"] = 1
        architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
        config["architectures"] = [architecture] if architecture else config["architectures"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    number = check_tensors(checkpoint.tensors(), folder, dtype, is_scalar=checkpoint.is_scalar)
    console.print(f"{number} tensors are those of the checkpoint" + (f" in {options.dtype}" if dtype else ""))
    source = HuggingFaceFolder(folder, trust_remote_code=False)
    rows = text_rows(source.tokenizer)
    difference = check_outputs(source.outputs(rows), rows, folder, is_scalar=checkpoint.is_scalar)
    what = "scores" if checkpoint.is_scalar else "log-probs"
    console.print(
        f"largest difference of {difference.number} {what} between Lockstep and transformers on it, in float32: "
        f"{difference.largest:.2g}"
    )


def _config_folder(part: Path, given: str | None) -> Path:
    """The folder with the config and tokenizer."""
    if given is not None:
        return local_model_folder(given, "--model", weights=False)
    folder = part / HF_FOLDER
    if not (folder / "config.json").is_file() or not has_tokenizer(folder):
        raise ValueError(f"{folder} has no config.json and tokenizer; give the model that was trained by --model PATH")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep convert",
        description="Convert what verl wrote: a checkpoint (FSDP shards) to a Hugging Face folder, or a YAML config or a shell "
        "script to the settings of Lockstep, with comments on renamed, ineffective and refused ones. Exit code 1 if a setting is "
        "refused.",
    )
    parser.add_argument("path", metavar="PATH", help="global_step_N[/actor|/critic], CONFIG.yaml or SCRIPT.sh")
    parser.add_argument(
        "-o", "--output", metavar="PATH", help="folder of the model; file of the config or script (default: print)"
    )
    parser.add_argument("--role", choices=PARTS, default="actor", help="part of the checkpoint (default: actor)")
    add_weight_options(parser)
    parser.add_argument("--adapter", action="store_true", help="LoRA: copy the adapter instead of merging it")
    parser.add_argument(
        "--model", metavar="PATH", help="model whose config and tokenizer are used, if the checkpoint has none"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output")
    return parser
