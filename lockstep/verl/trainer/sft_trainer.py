"""verl.trainer.sft_trainer: as a program (`-m`, also under torchrun) the same as `lockstep sft`."""

import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from lockstep.config.compose import config_from_tree
from lockstep.config.sft import SFTConfig
from lockstep.trainer.fsdp_sft_trainer import main
from lockstep.trainer.supervised.command import run_training
from lockstep.verl._names import exports

__all__ = ["main", "run_sft"]

__getattr__ = exports(__name__)


def run_sft(config: Any) -> int:
    """Train with the program's config, which may have the keys of sft_trainer_engine.yaml; returns 0, or 130 if it was stopped."""
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    assert isinstance(plain, Mapping)
    return run_training(config_from_tree(SFTConfig, {str(key): value for key, value in plain.items()}, True))


if __name__ == "__main__":
    sys.exit(main())
