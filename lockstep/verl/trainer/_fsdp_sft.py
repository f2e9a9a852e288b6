"""SFT with verl's constructor and functions; `lockstep.verl.trainer.fsdp_sft_trainer` imports them on first use."""

import os
from typing import Any

import torch

from lockstep.config.sft import SFTConfig
from lockstep.data import sft_dataset
from lockstep.trainer.supervised.command import run_training
from lockstep.trainer.supervised.runner import TIMEOUT_S
from lockstep.trainer.supervised.sft import SFTTrainer
from lockstep.utils.device import resolve_device
from lockstep.utils.distributed import join_process_group
from lockstep.verl._config import typed_config, typed_section


class FSDPSFTTrainer(SFTTrainer):
    """Trains when `fit` is called.

    config:      the program's DictConfig.
    device_mesh: gives the kind of device; FSDP2 and sequence parallelism make their own meshes, from
                 `model.fsdp_config.fsdp_size` and `ulysses_sequence_parallel_size`.
    """

    def __init__(
        self,
        config: Any,
        device_mesh: Any = None,
        ulysses_device_mesh: Any = None,
        tokenizer: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
    ) -> None:
        typed = typed_config(config, cls=SFTConfig)
        rank, world_size = (int(os.environ.get(name, value)) for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")))
        device = resolve_device(typed.trainer.device) if device_mesh is None else device_mesh.device_type
        if device == "cuda" and world_size > 1:
            device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}"
        join_process_group(rank, world_size, torch.device(device), TIMEOUT_S)
        torch.manual_seed(typed.trainer.seed)
        if tokenizer is None or train_dataset is None:
            raise ValueError("FSDPSFTTrainer needs a tokenizer and a train_dataset; see create_sft_dataset")
        super().__init__(typed, tokenizer, train_dataset, val_dataset, device)
        self.device_mesh, self.ulysses_device_mesh = device_mesh, ulysses_device_mesh

    def fit(self) -> int:
        self.load_model()
        try:
            self.start()
            return super().fit()
        finally:
            self.close()


def create_sft_dataset(data_paths: Any, data_config: Any, tokenizer: Any, max_samples: int = -1) -> Any:
    """Conversations or pairs, or the class of `data.custom_cls`."""
    files = [data_paths] if isinstance(data_paths, str) else list(data_paths)
    data = typed_section(data_config, "data", SFTConfig)
    return sft_dataset.create_sft_dataset(files, tokenizer, data, max_samples)


def run_sft(config: Any) -> int:
    """Train as the config says, which may have the keys of sft_trainer_engine.yaml, in this process or as one of torchrun's.

    Returns 0, or 130 if it was stopped.
    """
    return run_training(typed_config(config, cls=SFTConfig))
