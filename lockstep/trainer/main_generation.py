"""Generate responses to the prompts of a file: `python -m lockstep.trainer.main_generation key=value …`, or
`lockstep generate key=value …`.

The config and the output are checked before torch is imported, so that errors are reported immediately.
"""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.generation import GenerationConfig, as_validation, with_own_keys
from lockstep.config.placement import controller_of
from lockstep.data.files import TEXT_MODEL, refuse_media
from lockstep.kernels.gpu_warmup import start_gpu_warmup
from lockstep.trainer.generation.generated_rows import GeneratedRows, job_of
from lockstep.trainer.run.command import run_program
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.inputs import why_no_videos_in_rows
from lockstep.trainer.run.preflight import check_positions, check_weights
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.files import ensure_writable
from lockstep.utils.imports import without_collections
from lockstep.utils.model_path import base_folder, local_model_folder, weight_folders
from lockstep.utils.progress import ProgressLog, phase
from lockstep.utils.vision import reads_images

if TYPE_CHECKING:
    from lockstep.trainer.generation.generate import GenerationRunner

logger = logging.getLogger(__name__)


def run_generation(config: GenerationConfig) -> int:
    """Generate, in this process or on Ray; returns 0. RunError if it fails."""
    try:
        output = prepare(config)
        if output.is_complete():
            logger.info("nothing to do: %s has the responses of this command", output.output)
            return 0
        output.check_parts()
    except ValueError as error:
        raise RunError(with_own_keys(str(error)), exit_code=2) from error
    if controller_of(as_validation(config)) == "ray":
        from lockstep.trainer.run.ray_runner import run_on_ray

        logger.info("connecting to Ray, or starting it on this machine")
        return run_on_ray(as_validation(config), partial(_runner, config, output))
    logger.info("loading torch and transformers")
    with ProgressLog(), phase("load torch and transformers"), without_collections():
        start_gpu_warmup(config.trainer.device)
        runner = _runner(config, output)
    return runner.run(as_validation(config))


def _runner(config: GenerationConfig, output: GeneratedRows) -> "GenerationRunner":
    from lockstep.trainer.generation.generate import GenerationRunner

    return GenerationRunner(config, output)


def prepare(config: GenerationConfig) -> GeneratedRows:
    """Check what is outside the config, and fetch model and data; ValueError with the first problem."""
    is_local = controller_of(as_validation(config)) == "local"
    ensure_writable(Path(config.data.output_path).expanduser().absolute().parent, "data.output_path")
    folders = weight_folders(config.model.path, config.model.lora_adapter_path, "model", weights=is_local)
    base = base_folder(folders[0], "model.path", weights=is_local)
    check_positions(as_validation(config), base)
    if is_local:
        check_weights("model.path", str(folders[0]))
    if config.model.tokenizer_path:
        local_model_folder(config.model.tokenizer_path, "model.tokenizer_path", weights=False)
    files = local_data_files(config.data.path, "val", "data.path")
    text_only = None if reads_images(base) else TEXT_MODEL
    no_videos = why_no_videos_in_rows(base, config.rollout.name)
    refuse_media(files, "data.path", config.data, text_only=text_only, no_videos=no_videos)
    return GeneratedRows(config, job_of(config, folders, files))


def main(argv: list[str] | None = None) -> int:
    return run_program(
        argv,
        GenerationConfig,
        run_generation,
        prog="lockstep generate",
        description="Generate responses to the prompts of a file, and write them to a parquet or jsonl file.",
        if_stopped="; run the same command to go on after the last finished batch",
    )


if __name__ == "__main__":
    sys.exit(main())
