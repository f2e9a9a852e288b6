"""Direct preference optimization: `lockstep dpo key=value …`, or on several GPUs
`torchrun --nproc_per_node=8 -m lockstep.trainer.main_dpo key=value …`.
"""

import sys
from collections.abc import Sequence

from lockstep.config.preference import DPOConfig
from lockstep.trainer.supervised.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(argv, DPOConfig, "lockstep dpo", "Train a language model on preference pairs by DPO.")


if __name__ == "__main__":
    sys.exit(main())
