"""`trainer.*` and `ray_init.*`: the training run."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II

from lockstep.config.audit import AuditConfig
from lockstep.config.bounds import (
    EveryOrNever,
    NonNegativeFloat,
    NonNegativeInt,
    NumSteps,
    PortNumber,
    PositiveFloat,
    PositiveInt,
    SaveFrequency,
    StepNumbers,
)
from lockstep.config.watchdog import OnHang, WatchdogConfig

LOGGERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab")
ResumeMode = Literal["auto", "disable", "resume_path"]


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: PositiveInt = 30
    """Passes over the training rows."""
    total_training_steps: NumSteps | None = None
    """Stop after this many steps; null trains for all epochs."""
    project_name: str = "lockstep"
    """Project name in the trackers. If not set, the name of the data, such as `gsm8k`."""
    experiment_name: str = "run"
    """Name of the run. If not set, made of model, data and algorithm, such as `qwen2.5-0.5b-instruct-gsm8k-grpo`."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, file, tensorboard, wandb, mlflow, swanlab, or `module:Class`. `metrics.jsonl` in `default_local_dir`
    is always written."""
    dashboard: bool = False
    """Serve the run as a page (docs/dashboard.md) while it trains, to browsers on the controller's machine."""
    dashboard_port: PortNumber = 8420
    """Port of that page; the next free one is used if it is taken, and 0 uses any."""
    log_val_generations: NonNegativeInt = 0
    """Number of validation responses sent to the trackers."""
    rollout_data_dir: str | None = None
    """Folder for the rollouts of each step, as `{step}.jsonl`."""
    validation_data_dir: str | None = None
    """Folder for the responses of each validation, as `{step}.jsonl`."""
    rollout_token_data: bool = False
    """Write `{step}.tokens.parquet` to these folders too: tokens of responses, with log-probs, advantages, masks, versions."""
    rollout_token_rows: PositiveInt = 256
    """Most responses of a step or a validation whose tokens are written, whole groups first: 7 to 22 bytes per token
    (docs/logging.md)."""
    nnodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: PositiveInt = 1
    """Workers per machine: GPUs, or processes on CPU."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """Where workers run: local is this process, ray are processes of a Ray cluster; auto is local for one worker."""
    placement: Literal["colocate", "hybrid", "split", "standalone"] = "colocate"
    """How roles share workers. colocate: all together; hybrid: critic and reward model separate; split: the rollout separate too;
    standalone: each role separate. `resource_pool_spec` overrides it."""
    async_mode: Literal["colocated", "one_step_off", "fully_async"] | None = None
    """Asynchronous training (docs/async_training.md). colocated: unfinished responses wait during the update and go on with the new
    weights; one_step_off: a separate rollout pool generates the next batch during the update; fully_async: it never stops. null
    generates and trains in turn."""
    max_staleness: NonNegativeInt = 1
    """Asynchronous training: updates that the policy may be ahead of the one that began a response; generation runs at most that
    many batches ahead. 0 trains exactly as without `async_mode`."""
    stale_samples: Literal["wait", "drop"] = "wait"
    """Asynchronous training: wait for a response that would become older than `max_staleness`, or drop it with its group."""
    profile_steps: StepNumbers = field(default_factory=list)
    """Steps to profile (docs/profiling.md); `global_profiler.tool` says how."""
    max_restarts: NonNegativeInt = 0
    """How often to restart dead workers from the last checkpoint, within the same command: 1, 5, 30, then 60 seconds after a
    failure if there is no new checkpoint in between, else 1 (docs/reliability.md)."""
    preemption_grace_s: PositiveFloat | None = None
    """Seconds from SIGTERM until the machine is taken away, as on Slurm, Kubernetes and spot machines: the run saves in time. If
    the rest of the step and a save take longer, by earlier durations, the step is discarded, unless its update has begun.
    null finishes the step, however long that takes (docs/reliability.md)."""
    on_hang: OnHang = "warn"
    """When the run is stuck, after a report of what all processes do (docs/watchdog.md). warn: go on waiting; stop: end with code
    3; restart: from the last checkpoint, as `max_restarts` allows."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Training device; auto uses GPUs if there are any."""
    check_memory: bool = True
    """Before loading models, log the plan of memory and time for this machine's GPU, and refuse a run that cannot fit."""
    seed: NonNegativeInt = 1
    """Seed of shuffling, sampling and initialisation."""
    balance_batch: bool = True
    """Balance the number of tokens across ranks."""
    critic_warmup: NonNegativeInt = 0
    """Number of initial steps that update only the critic."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop. Needs no training data, critic or reference."""
    test_freq: EveryOrNever = -1
    """Validate every this many steps and after the last one; -1 never validates."""
    save_freq: SaveFrequency = -1
    """Save every this many steps and after the last one; -1 saves only after the last one, 0 never."""
    async_save: bool = False
    """Go on training while a checkpoint is brought to disk: only writing its files stops the training; syncing, checksums and the
    final rename follow in the background, until the next save or the end of the run. A crash meanwhile loses that checkpoint, and
    no earlier one. No effect with `async_mode`."""
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
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Keep this many of the newest checkpoints; null keeps all."""
    max_critic_ckpt_to_keep: PositiveInt | None = II("trainer.max_actor_ckpt_to_keep")
    """Same for the critic. A checkpoint holds both models, so the larger of the two applies."""


@dataclass(frozen=True)
class RayInitConfig:
    address: str | None = None
    """Cluster to join (`auto`, `host:port`); null joins the one in RAY_ADDRESS or starts one on this machine."""
    num_cpus: PositiveInt | None = None
    """CPUs of a Ray cluster that the run starts."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Ray runtime environment of the workers, such as `env_vars` or `working_dir`."""
    timeline_json_file: str | None = None
    """Write Ray's timeline to this file."""
