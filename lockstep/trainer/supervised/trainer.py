"""The loop of SFT, reward models and DPO: each rank runs it, and meets the others in the engine's collectives.

    batch of all ranks ─► this rank's rows ─► forward, loss, backward ─► optimizer step ─► schedule step

The loss is a mean over the whole batch (its trained tokens, or its pairs), so neither packing nor micro-batches nor the number of
ranks changes it. Every rank reads the same rows in the same order and takes its share of each batch. Rank 0 owns the run's folder.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from tensordict import TensorDict
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lockstep.config.batch_sizes import fitted_to_rows
from lockstep.config.derived_defaults import PROGRAMS
from lockstep.config.micro_batches import SUPERVISED
from lockstep.config.sft import SupervisedConfig
from lockstep.config.train_engines import engine_settings, ranks_per_sequence
from lockstep.data.loader import create_dataloader
from lockstep.engines.train import EngineModel, LossFn, MicroBatching, create_train_engine
from lockstep.engines.train.audit import UpdateAudit
from lockstep.engines.train.token_engine import TokenEngine
from lockstep.models.loading import resolve_dtype
from lockstep.trainer.run.interrupt import Interrupt
from lockstep.trainer.run.memory_check import with_chosen_sizes
from lockstep.trainer.run.observer import StepObserver
from lockstep.trainer.run.run_config import warn_if_epochs_end_first, warn_if_on_cpu
from lockstep.trainer.run.smaller_micro_batches import SmallerMicroBatches
from lockstep.trainer.run.step_profiler import StepProfiler
from lockstep.trainer.run.training_run import LOADER_STATE, TRAINER_STATE, TrainingRun, num_training_steps
from lockstep.trainer.supervised.batches import share_of, share_of_pairs
from lockstep.utils.audit import AuditError, Audits
from lockstep.utils.checkpoint_folder import checkpoint_folder
from lockstep.utils.device import memory_peaks
from lockstep.utils.distributed import (
    current_rank,
    current_world_size,
    least_of_ranks,
    on_first_rank,
    wait_for_all_ranks,
)
from lockstep.utils.metrics import reduced_over_ranks
from lockstep.utils.out_of_memory import is_out_of_memory
from lockstep.utils.progress import phase
from lockstep.utils.state_file import load_state
from lockstep.utils.timing import marked_timer

logger = logging.getLogger(__name__)


class SupervisedTrainer(ABC):
    """Trains a model, by default a causal language model, on a fixed dataset. A subclass gives the dataset and the loss."""

    name: str
    unit: str
    """What the loss is a mean of: tokens, pairs."""
    sequences_per_row = 1
    """Sequences that a row of the dataset has; they stay in one micro-batch."""
    kind: Literal["policy", "value"] = "policy"
    """What the model computes; see `EngineModel`."""
    forward_options: ClassVar[dict[str, object]] = {}
    """Options of the model's forward."""
    create_dataset: Callable[..., Dataset[Any]]
    """(files, tokenizer, `data` config, max_samples, use="train" or "val", processor of a model that reads images)"""
    collate: Callable[[Sequence[Any]], TensorDict]
    """Rows of the dataset -> sequences for the engine."""

    def __init__(
        self,
        config: SupervisedConfig,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset[Any],
        val_dataset: Any = None,
        device: str = "cpu",
    ) -> None:
        config = with_chosen_sizes(fitted_to_rows(config, len(cast(Sized, train_dataset))), torch.device(device).type)
        least = least_of_ranks(config.data.max_token_len_per_gpu)
        config = replace(config, data=replace(config.data, max_token_len_per_gpu=least))
        data, trainer = config.data, config.trainer
        self.config, self.tokenizer, self.device = config, tokenizer, torch.device(device)
        self.val_dataset = val_dataset
        self.loader = create_dataloader(
            train_dataset,
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=trainer.seed if data.seed is None else data.seed,
            collate_fn=self.collate,
        )
        self.total_training_steps = num_training_steps(config, len(self.loader))
        group, num_rows = self.sequences_per_row, data.micro_batch_size_per_gpu
        keys = SUPERVISED["update"]
        self.micro = MicroBatching(max_tokens=data.max_token_len_per_gpu, group_size=group, key=keys.tokens)
        if not data.use_dynamic_bsz:
            self.micro = MicroBatching(num_rows=num_rows and num_rows * group, group_size=group, key=keys.rows)
        self.smaller = SmallerMicroBatches(config)
        self.run = TrainingRun(config)
        self.audits = Audits(asdict(trainer.audit))
        self.global_steps = 0
        self.epoch = 0
        self.num_tokens = 0
        """Tokens of all steps so far."""
        self.loader_state: dict[str, Any] = {}
        """State of the data loader after the last complete step."""
        self.observer = StepObserver()
        role = PROGRAMS[type(config)]
        self.profiler = StepProfiler(
            config, {role: config.profiler}, self.total_training_steps, device, role=role, rank=current_rank()
        )

    @property
    def is_first_rank(self) -> bool:
        return current_rank() == 0

    @abstractmethod
    def loss_fn(self, count: int) -> LossFn:
        """The loss as a mean over the `count` units of all ranks; its metrics are means too."""

    def prepare(self) -> None:  # noqa: B027 - optional
        """Compute what the starting model is needed for, before a checkpoint is loaded."""

    def load_model(self) -> None:
        model, optim = self.config.model, self.config.optim
        if optim.total_training_steps < 1:
            optim = replace(optim, total_training_steps=self.total_training_steps)
        spec = EngineModel(
            model,
            "model",
            self.kind,
            engine_settings(model),
            optim=optim,
            clip_grad=optim.clip_grad,
            sequence_parallel_size=ranks_per_sequence(model),
            max_length=self.config.data.max_length,
        )
        self.engine = create_train_engine(model.strategy, spec, self.device)
        self.engine.onload(optimizer=True)
        dtype = resolve_dtype(engine_settings(model).dtype, self.device)
        self.update_audit = UpdateAudit(self.engine, dtype, self.device, optim.clip_grad)

    def start(self) -> None:
        """Lock the run's folder, resume from its checkpoint and open the trackers."""
        run = self.run
        found = on_first_rank(run.claim)
        with self._out_of_memory_in("prepare"):
            self.prepare()
        metrics = self._load_checkpoint(*found) if found else {}
        self.loader_state = deepcopy(self.loader.state_dict())
        on_first_rank(lambda: run.open(self.global_steps, self.total_training_steps, metrics))
        run.push(self.profiler.start(run.folder if self.is_first_rank else None, self.global_steps))
        self._log_summary()
        self.observer.started(self)

    def close(self) -> None:
        """Finish the trackers and release the run's folder."""
        self.run.close()

    def fit(self) -> int:
        """Train to the last step. Returns 0, or 130 if the user stopped the run."""
        with self.run, Interrupt() as interrupt:
            return self._loop(interrupt)

    def _loop(self, interrupt: Interrupt) -> int:
        run, last_step = self.run, self.total_training_steps
        batches = self._batches()
        while self.global_steps < last_step:
            self.global_steps += 1
            timing: dict[str, float] = {}
            with self.profiler.step(self.global_steps), marked_timer("step", timing):
                with phase("read a batch"):
                    batch = next(batches)
                self.observer.updating(self, batch)
                with phase("update"), self._out_of_memory_in("train_batch"):
                    metrics = self.train_batch(batch)
                self.observer.updated(self, batch)
                self.loader_state = deepcopy(self.loader.state_dict())
            metrics |= self._step_metrics(metrics["train/global_tokens"], timing["step"])
            metrics |= self.audits.log(warn=current_rank() == 0)  # all ranks find the same
            if self.val_dataset is not None and run.must_test(self.global_steps, last_step):
                with marked_timer("testing", timing), phase("validation"), self._out_of_memory_in("validate"):
                    metrics |= self.validate()
                metrics["timing_s/testing"] = timing["testing"]
            metrics |= self._out_of_memory_metrics()
            stopping = not least_of_ranks(int(not interrupt.requested)) and self.global_steps < last_step
            if stopping or run.must_save(self.global_steps, last_step):
                with marked_timer("save_checkpoint", timing):
                    self._save_checkpoint(metrics)
                metrics["timing_s/save_checkpoint"] = timing["save_checkpoint"]
            if self.is_first_rank:
                run.log(metrics, self.global_steps)
            if stopping:
                return run.stopped(self.global_steps, by="the user")
        return run.done(self.global_steps)

    def _batches(self) -> Iterator[TensorDict]:
        """Batches, epoch after epoch."""
        while True:
            self.epoch = self.loader.epoch
            for batch in self.loader:
                if (problem := self.loader.ledger.take_problem()) is not None:
                    self.audits.found("data_order", problem)
                yield batch

    def train_batch(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step on a batch of all ranks."""
        rows, count = self.share(batch)
        if not count:
            raise AuditError(
                f"step {self.global_steps}: no token of the batch is trained; does data.truncation or data.max_length="
                f"{self.config.data.max_length} cut the assistant's turns off?"
            )
        audit, loss_fn = self.update_audit, self.loss_fn(count)
        audit.begin(self.audits.levels, num_steps=1)
        audit.check_split(rows, loss_fn, self.micro, **self.forward_options)
        metrics: dict[str, Any] = dict(self.engine.forward_backward(rows, loss_fn, self.micro, **self.forward_options))
        audit.check_loss(metrics, "train/loss")
        metrics["train/grad_norm"] = audit.optimizer_step(expects_gradient=metrics["train/loss"] != 0)
        metrics["train/lr"] = self.engine.learning_rate
        self.engine.schedule_step()
        self.audits.add(audit.end())
        num_tokens = int(batch["attention_mask"].sum())
        self.num_tokens += num_tokens
        return metrics | {"train/global_tokens": num_tokens, f"train/{self.unit}": count}

    def validate(self) -> dict[str, float]:
        """The metrics of `loss_fn` over all validation rows."""
        data, size = self.val_dataset, self.config.data.train_batch_size
        sums: dict[str, float] = {}
        total = 0
        for start in range(0, len(data), size):
            rows, count = self.share(self.collate([data[i] for i in range(start, min(start + size, len(data)))]))
            outputs = self.engine.forward(rows, self.micro, **self.forward_options)
            _, metrics = self.loss_fn(1)(outputs, rows)
            total += count
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        names = [f"val/{name.removeprefix('train/')}" for name in sums]
        return dict(zip(names, (value / max(total, 1) for value in self.engine.global_sum(*sums.values()))))

    def share(self, batch: TensorDict) -> tuple[TensorDict, int]:
        """This rank's sequences of the batch of all ranks, and the batch's number of `unit`s."""
        take = share_of if self.sequences_per_row == 1 else share_of_pairs
        return take(batch, self.engine.dp_rank, self.engine.dp_size, balance=self.config.data.balance_dp_token)

    @contextmanager
    def _out_of_memory_in(self, method: str) -> Iterator[None]:
        """Name the method in an error, for the advice of `failures`."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                error.add_note(f"raised in rank {current_rank()} by {type(self).__name__}.{method}")
            raise

    def _out_of_memory_metrics(self) -> dict[str, float]:
        """What the engine had to lower."""
        if isinstance(self.engine, TokenEngine):
            self.smaller.note(self.engine.limits.take())
        return self.smaller.metrics()

    def _step_metrics(self, num_tokens: int, seconds: float) -> dict[str, Any]:
        return {
            "training/global_step": self.global_steps,
            "training/epoch": self.epoch,
            "train/total_tokens(B)": self.num_tokens / 1e9,
            "perf/throughput": num_tokens / (seconds * current_world_size()),
            "timing_s/step": seconds,
            **reduced_over_ranks(memory_peaks(self.device).metrics()),
        }

    def _load_checkpoint(self, step: int, folder: Path) -> dict[str, Any]:
        """Returns the metrics of the checkpoint's step."""
        self.engine.load(checkpoint_folder(str(folder)), self.config.trainer.checkpoint.load_contents)
        self.update_audit.forget()
        self.loader.load_state_dict(load_state(folder / LOADER_STATE))
        state = load_state(folder / TRAINER_STATE)
        self.global_steps, self.num_tokens = step, state["num_tokens"]
        self.run.last_checkpoint = folder  # on every rank, for messages
        self.smaller.load(state)
        if isinstance(self.engine, TokenEngine):
            self.engine.limits.set(self.smaller.sizes)
        metrics: dict[str, Any] = state["metrics"]
        return metrics

    def _log_summary(self) -> None:
        config = self.config
        logger.info(
            "%s: %d %s per step, %d steps (%d per epoch) on %d x %s; %s",
            self.name,
            config.data.train_batch_size,
            "sequences" if self.sequences_per_row == 1 else "pairs",
            self.total_training_steps,
            len(self.loader),
            current_world_size(),
            self.device.type,
            config.model.path,
        )
        logger.info("output folder: %s", self.run.folder)
        warn_if_epochs_end_first(config, self.total_training_steps)
        warn_if_on_cpu(config, self.device.type, current_world_size())

    def _save_checkpoint(self, metrics: dict[str, Any]) -> None:
        """metrics: those of the step."""

        def write(staging: Path | None) -> None:
            folder = checkpoint_folder(on_first_rank(lambda: str(staging)))
            contents = self.config.trainer.checkpoint.save_contents
            self.engine.save(folder, contents)
            if "hf_model" in contents:
                self.engine.export(folder, self.tokenizer)
            wait_for_all_ranks()

        if not self.is_first_rank:  # which creates the folder and commits it
            write(None)
            return
        state = {"num_tokens": self.num_tokens, "metrics": metrics} | self.smaller.state()
        self.run.save(self.global_steps, write, self.loader_state, state)
