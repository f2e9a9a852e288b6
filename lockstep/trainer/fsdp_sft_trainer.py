"""Supervised fine-tuning: `lockstep sft key=value …`, or on several GPUs
`torchrun --nproc_per_node=8 -m lockstep.trainer.fsdp_sft_trainer key=value …`.

The config is checked before torch is imported, so that errors in it are reported immediately.
"""

import io
import logging
import os
import sys
import time
from contextlib import redirect_stderr

from lockstep.config.commandline import config_from_command_line
from lockstep.config.sft import SFTConfig
from lockstep.kernels.gpu_warmup import start_gpu_warmup
from lockstep.trainer.interrupt import stop_on_sigterm
from lockstep.trainer.sft import OTHERS_WAIT_S


def main(argv: list[str] | None = None) -> int:
    first = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if first else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        with stop_on_sigterm():
            config = _config(argv, first)
            if config is None:
                return 0
            logging.getLogger(__name__).info("loading torch and transformers")
            if (
                os.environ.get("WORLD_SIZE", "1") == "1"
            ):  # on several GPUs it would open a context on the first for each rank
                start_gpu_warmup(config.trainer.device)
            from lockstep.trainer.sft.program import run

            return run(config)
    except KeyboardInterrupt:
        if first:
            sys.stderr.write(
                "stopped by the user; run the same command to resume from the last checkpoint, if there is one\n"
            )
        return 130


def _config(argv: list[str] | None, first: bool) -> SFTConfig | None:
    errors = io.StringIO()
    try:
        with redirect_stderr(sys.stderr if first else errors):
            return config_from_command_line(
                argv, SFTConfig, prog="lockstep sft", description="Fine-tune a language model on supervised data."
            )
    except SystemExit:
        if not first:
            time.sleep(OTHERS_WAIT_S)
            sys.stderr.write(errors.getvalue())
        raise


if __name__ == "__main__":
    sys.exit(main())
