"""verl.trainer.fsdp_sft_trainer: as a program (`-m`, also under torchrun) the same as `lockstep sft`."""

import sys
from typing import Any

from lockstep.trainer.fsdp_sft_trainer import main
from lockstep.verl._names import refuse


def __getattr__(name: str) -> Any:
    if name != "FSDPSFTTrainer":
        raise refuse(__name__, name)
    from lockstep.trainer.supervised.sft import SFTTrainer

    return SFTTrainer


if __name__ == "__main__":
    sys.exit(main())
