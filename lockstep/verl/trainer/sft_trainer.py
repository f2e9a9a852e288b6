"""verl.trainer.sft_trainer: as a program (`-m`, also under torchrun) the same as `lockstep sft`."""

import sys

from lockstep.trainer.fsdp_sft_trainer import main as main
from lockstep.verl._names import exports

__getattr__ = exports(__name__, {"lockstep.verl.trainer._fsdp_sft": ["run_sft"]})


if __name__ == "__main__":
    sys.exit(main())
