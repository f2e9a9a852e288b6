"""The configuration of supervised fine-tuning (`lockstep sft`), and the part of it that preference training shares."""

from dataclasses import dataclass, field
from typing import Literal

from lockstep.config.audit import SupervisedAuditConfig
from lockstep.config.bounds import (
    Betas,
    CountOrAll,
    EveryOrNever,
    NonNegativeFloat,
    NonNegativeInt,
    NumSteps,
    PortNumber,
    PositiveInt,
    SaveFrequency,
    StepNumbers,
    UnitFloat,
)
from lockstep.config.data import CustomClassConfig, SequenceDataConfig, SFTDataConfig
from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.environment import RootConfig
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.config.profiler import GlobalProfilerConfig, ProfilerConfig
from lockstep.config.trainer import ResumeMode
from lockstep.config.watchdog import WatchdogConfig


@dataclass(frozen=True)
class MultiturnConfig:
    enable: bool | None = None
    """Whether rows are conversations rather than pairs; null looks for the column `data.messages_key` in the first row."""


@dataclass(frozen=True)
class SupervisedDataConfig(SequenceDataConfig):
    train_files: list[str] = field(default_factory=list)
    """Training rows: a parquet, jsonl or json file, a folder of them, a dataset of the Hub
    (`org/name[@revision][:config][:split]`), a URL, or a list of these (docs/models_and_data_by_name.md)."""
    val_files: list[str] = field(default_factory=list)
    """Validation rows, in the same forms; an empty list trains without validation."""
    train_max_samples: CountOrAll = -1
    """Use this many training rows, -1 for all: the first ones, or a random subset if `seed` is set and `shuffle` is on."""
    val_max_samples: CountOrAll = -1
    """Use this many validation rows; -1 for all."""
    train_batch_size: PositiveInt = 256
    """Sequences per optimizer step, over all ranks; pairs of them in preference training."""
    use_dynamic_bsz: bool | None = None
    """Fill micro-batches by tokens (`max_token_len_per_gpu`) instead of sequences. null does so if `micro_batch_size_per_gpu` is
    not set, with as many tokens as the device's memory has room for (docs/plan.md)."""
    max_token_len_per_gpu: PositiveInt = 8192
    """Tokens per micro-batch with `use_dynamic_bsz`."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences (pairs) per forward/backward with `use_dynamic_bsz=false`, where null is all of a rank's."""
    balance_dp_token: bool = True
    """Balance the number of tokens across ranks."""
    shuffle: bool = True
    """Shuffle the training rows every epoch."""
    seed: NonNegativeInt | None = None
    """Seed of `shuffle`; null is `trainer.seed`."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    pad_mode: Literal["right", "no_padding"] = field(default="no_padding", metadata={"internal": True})


@dataclass(frozen=True)
class SFTRunDataConfig(SupervisedDataConfig, SFTDataConfig):
    """Rows are conversations (`messages_key`), or pairs of a prompt and a response (`prompt_key`, `response_key`)."""

    prompt_key: str = "question"
    """Column of the prompt, for rows that are pairs."""
    response_key: str = "answer"
    """Column of the response, for rows that are pairs."""
    multiturn: MultiturnConfig = field(default_factory=MultiturnConfig)


@dataclass(frozen=True)
class SupervisedModelConfig(HFModelConfig):
    strategy: str = "fsdp"
    """Training engine: fsdp or fsdp2 (both mean FSDP2), megatron (docs/megatron.md), deepspeed (docs/deepspeed.md), or your own as
    path/to/file.py:Class (docs/extending.md)."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)


@dataclass(frozen=True)
class SupervisedOptimizerConfig(FSDPOptimizerConfig):
    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "cosine"
    """Schedule after the warm-up."""
    lr_warmup_steps_ratio: UnitFloat = 0.1
    """Warm-up as a fraction of all training steps."""
    betas: Betas = (0.9, 0.95)
    """AdamW's averaging coefficients."""


@dataclass(frozen=True)
class SupervisedTrainerConfig:
    total_epochs: PositiveInt = 4
    """Passes over the training rows."""
    total_training_steps: NumSteps | None = None
    """Stop after this many steps; null trains for all epochs."""
    project_name: str = "lockstep"
    """Project name in the trackers. If not set, the name of the data, such as `gsm8k`."""
    experiment_name: str = "run"
    """Name of the run. If not set, made of model, data and program, such as `qwen2.5-0.5b-instruct-gsm8k-sft`."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, file, tensorboard, wandb, mlflow, swanlab, or `module:Class`. `metrics.jsonl` in `default_local_dir`
    is always written."""
    dashboard: bool = False
    """Serve the run as a page (docs/dashboard.md) while it trains, to browsers on the controller's machine."""
    dashboard_port: PortNumber = 8420
    """Port of that page; the next free one is used if it is taken, and 0 uses any."""
    on_hang: Literal["warn", "stop"] = "warn"
    """When the run is stuck, after a report of all processes (docs/watchdog.md). warn: go on waiting; stop: end with code 3."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    audit: SupervisedAuditConfig = field(default_factory=SupervisedAuditConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Training device; auto uses GPUs if there are any."""
    seed: NonNegativeInt = 1
    """Seed of shuffling."""
    profile_steps: StepNumbers = field(default_factory=list)
    """Steps to profile (docs/profiling.md); `global_profiler.tool` says how."""
    test_freq: EveryOrNever = -1
    """Validate every this many steps and after the last one; -1 never validates."""
    save_freq: SaveFrequency = -1
    """Save every this many steps and after the last one; -1 saves only after the last one, 0 never."""
    async_save: bool = False
    """Go on training while a checkpoint is brought to disk: only writing its files stops the training; syncing, checksums and the
    final rename follow in the background, until the next save or the end of the run. A crash meanwhile loses that checkpoint, and
    no earlier one."""
    resume_mode: ResumeMode = "auto"
    """auto resumes from the newest checkpoint in `default_local_dir` or `default_hdfs_dir`, resume_path from `resume_from_path`."""
    resume_from_path: str | None = None
    """The `global_step_N` folder, or its URL, for resume_mode=resume_path."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Output folder of the run: checkpoints, metrics.jsonl, config.yaml."""
    default_hdfs_dir: str | None = None
    """URL that checkpoints are copied to in the background, and resumed from on a new machine: s3://, gs://, hdfs://, sftp://, file://
    and others (docs/remote_checkpoints.md). null copies nothing."""
    hdfs_wait_s: NonNegativeFloat = 600.0
    """How long the end of the run waits for the copy of its last checkpoint to `default_hdfs_dir`."""
    max_ckpt_to_keep: PositiveInt | None = None
    """Keep this many of the newest checkpoints; null keeps all."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    check_memory: bool = True
    """Before loading the model, log the plan of memory and time for this machine's GPU, and refuse a run that cannot fit."""


@dataclass(frozen=True)
class SupervisedConfig(RootConfig):
    """What the configurations of SFT, reward models and DPO have in common."""

    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)
    model: SupervisedModelConfig = field(default_factory=SupervisedModelConfig)
    optim: SupervisedOptimizerConfig = field(default_factory=SupervisedOptimizerConfig)
    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    data: SFTRunDataConfig = field(default_factory=SFTRunDataConfig)
