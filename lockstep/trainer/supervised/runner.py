"""Run SFT, a reward model's training or DPO from its config: process group, tokenizer, data, trainer."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack

import torch

from lockstep.config.derived_defaults import PROGRAMS
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.single_controller.futures import HangError
from lockstep.trainer.run.errors import RunError, raise_as_run_error
from lockstep.trainer.run.failures import cause_of, how_to_resume
from lockstep.trainer.run.hang_exit import EXIT_CODE
from lockstep.trainer.run.training_run import seed_everything
from lockstep.trainer.supervised.dpo import DPOTrainer
from lockstep.trainer.supervised.reward_model import RewardModelTrainer
from lockstep.trainer.supervised.sft import SFTTrainer
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from lockstep.utils import heartbeat
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


def run(config: SupervisedConfig, on_built: Callable[[SupervisedTrainer], None] = lambda trainer: None) -> int:
    """Train; returns 0, or 130 if the user stopped the run. A failure with a known cause is a RunError.

    on_built: called before the model is loaded.
    """
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    with ExitStack() as closing:
        try:
            with phase("read the data"):
                trainer = build(config, rank, world_size)
            config = trainer.config
            on_built(trainer)
            closing.callback(trainer.close)
            if on_first_rank(lambda: trainer.run.is_finished(trainer.total_training_steps)):
                return 0
            closing.push(trainer.run)
            link = on_first_rank(lambda: trainer.run.lock(trainer.total_training_steps))
            if rank:
                heartbeat.start(link, PROGRAMS[type(config)], rank)
            logger.info("loading the model")
            with phase("load the model"):
                trainer.load_model()
            with phase("start the run"):
                trainer.start()
        except ValueError as error:
            raise_as_run_error(error, str(error))
        except HangError as error:
            raise RunError(f"{error}; the run did not start", EXIT_CODE) from error
        except Exception as error:  # unexpected ones are raised again by `cause_of`
            raise RunError(cause_of(error, config)) from error
        try:
            return trainer.fit()
        except HangError as error:
            resume = how_to_resume(config, trainer.run.last_checkpoint)
            raise RunError(f"{error}; the run ended early{resume}", EXIT_CODE) from error
        except Exception as error:  # unexpected ones are raised again by `cause_of`
            cause, resume = cause_of(error, config), how_to_resume(config, trainer.run.last_checkpoint)
            raise RunError(f"{cause.rstrip('.')}; the run ended early{resume}") from error


def build(config: SupervisedConfig, rank: int, world_size: int) -> SupervisedTrainer:
    """The trainer of a run, before its model is loaded."""
    device = resolve_device(config.trainer.device)
    if device == "cuda" and world_size > 1:
        device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}"
    join_process_group(rank, world_size, torch.device(device), TIMEOUT_S)
    seed_everything(config.trainer.seed)
    model, data = config.model, config.data
    tokenizer = hf_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        key="model.tokenizer_path" if model.tokenizer_path else "model.path",
    )
    logger.info("tokenizing %s", ", ".join([*data.train_files, *data.val_files]))
    cls = TRAINERS[type(config)]
    processor = hf_processor(model.path, tokenizer, data, model.trust_remote_code, "model.path")
    train = cls.create_dataset(data.train_files, tokenizer, data, data.train_max_samples, processor=processor)
    validation = None
    if data.val_files and config.trainer.test_freq > 0:
        validation = cls.create_dataset(data.val_files, tokenizer, data, data.val_max_samples, "val", processor)
    return cls(config, tokenizer, train, validation, device)
