"""Run SFT, a reward model's training or DPO from its config: process group, tokenizer, data, trainer."""

import logging
import os
import random
from contextlib import ExitStack

import numpy as np
import torch

from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.observability.jsonl import METRICS_FILE, last_step
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.failures import cause_of, how_to_resume
from lockstep.trainer.run.run_config import check_same_experiment
from lockstep.trainer.supervised.dpo import DPOTrainer
from lockstep.trainer.supervised.reward_model import RewardModelTrainer
from lockstep.trainer.supervised.sft import SFTTrainer
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from lockstep.utils.device import resolve_device
from lockstep.utils.distributed import join_process_group, on_first_rank
from lockstep.utils.progress import phase

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800.0
"""How long a rank waits for the others in a collective; rank 0 writes the HF folder meanwhile."""
TRAINERS: dict[type, type[SupervisedTrainer]] = {
    SFTConfig: SFTTrainer,
    RMConfig: RewardModelTrainer,
    DPOConfig: DPOTrainer,
}


def run(config: SupervisedConfig) -> int:
    """Train; returns 0, or 130 if the user stopped the run. A failure with a known cause is a RunError."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    with ExitStack() as closing:
        try:
            with phase("read the data"):
                trainer = build(config, rank, world_size)
            config = trainer.config
            closing.callback(trainer.close)
            if (step := on_first_rank(lambda: _finished_at(trainer))) is not None:
                logger.info("nothing to do: the run is already at step %d of %d", step, trainer.total_training_steps)
                return 0
            logger.info("loading the model")
            with phase("load the model"):
                trainer.load_model()
            with phase("start the run"):
                trainer.start()
        except ValueError as error:
            if os.environ.get("LOCKSTEP_DEBUG"):
                raise
            raise RunError(f"{error} (LOCKSTEP_DEBUG=1 shows the traceback)", exit_code=2) from error
        except Exception as error:  # unexpected ones are raised again by `cause_of`
            raise RunError(cause_of(error, config)) from error
        try:
            return trainer.fit()
        except Exception as error:  # unexpected ones are raised again by `cause_of`
            cause, resume = cause_of(error, config), how_to_resume(config, trainer.last_checkpoint)
            raise RunError(f"{cause.rstrip('.')}; the run ended early{resume}") from error


def build(config: SupervisedConfig, rank: int, world_size: int) -> SupervisedTrainer:
    """The trainer of a run, before its model is loaded."""
    device = resolve_device(config.trainer.device)
    if device == "cuda" and world_size > 1:
        device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}"
    join_process_group(rank, world_size, torch.device(device), TIMEOUT_S)
    random.seed(config.trainer.seed)
    np.random.seed(config.trainer.seed % 2**32)
    torch.manual_seed(config.trainer.seed)
    model, data = config.model, config.data
    tokenizer = hf_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        key="model.tokenizer_path" if model.tokenizer_path else "model.path",
    )
    logger.info("tokenizing %s", ", ".join([*data.train_files, *data.val_files]))
    cls = TRAINERS[type(config)]
    train = cls.create_dataset(data.train_files, tokenizer, data, data.train_max_samples)
    validation = None
    if data.val_files and config.trainer.test_freq > 0:
        validation = cls.create_dataset(data.val_files, tokenizer, data, data.val_max_samples, use="val")
    return cls(config, tokenizer, train, validation, device)


def _finished_at(trainer: SupervisedTrainer) -> int | None:
    """The run's newest step if its last one is saved and tracked, so that no model needs to be loaded; else None."""
    config, total = trainer.config.trainer, trainer.total_training_steps
    if config.resume_mode != "auto" or not (trainer.run_dir / f"global_step_{total}").is_dir():
        return None
    check_same_experiment(trainer.run_dir, trainer.config)
    found = trainer.checkpoints.find("auto")
    tracked = last_step(trainer.run_dir / METRICS_FILE)
    return None if found is None or tracked is None or min(found[0], tracked) < total else found[0]
