"""Train a reward model on preference pairs: `lockstep rm key=value …`, or on several GPUs
`torchrun --nproc_per_node=8 -m lockstep.trainer.main_rm key=value …`.
"""

import sys
from collections.abc import Sequence

from lockstep.config.preference import RMConfig
from lockstep.trainer.supervised.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(argv, RMConfig, "lockstep rm", "Train a reward model on preference pairs.")


if __name__ == "__main__":
    sys.exit(main())
