"""verl.trainer.fsdp_sft_trainer: `torchrun -m lockstep.verl.trainer.fsdp_sft_trainer key=value ...` is `lockstep sft` on each rank."""

import sys

from lockstep.trainer.fsdp_sft_trainer import main
from lockstep.verl._names import exports

__getattr__ = exports(__name__, {"lockstep.trainer.sft.trainer": ("FSDPSFTTrainer",)})

if __name__ == "__main__":
    sys.exit(main())
