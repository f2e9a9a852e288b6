"""Supervised fine-tuning: `lockstep sft key=value …`, or on several GPUs
`torchrun --nproc_per_node=8 -m lockstep.trainer.fsdp_sft_trainer key=value …`.
"""

import sys
from collections.abc import Sequence

from lockstep.config.sft import SFTConfig
from lockstep.trainer.supervised.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(argv, SFTConfig, "lockstep sft", "Fine-tune a language model on supervised data.")


if __name__ == "__main__":
    sys.exit(main())
