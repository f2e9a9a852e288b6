"""`trainer.*` and `ray_init.*`: the run itself."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = 30
    """Passes over the training rows."""
    total_training_steps: int | None = None
    """Stop after this many steps; null runs all epochs."""
    project_name: str = "lockstep_examples"
    """Project under which trackers file the run."""
    experiment_name: str = "gsm8k"
    """Name of the run."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, file, tensorboard, wandb, mlflow, swanlab, or `module:Class`. `metrics.jsonl` in `default_local_dir`
    is always written."""
    log_val_generations: int = 0
    """Validation answers that trackers show."""
    rollout_data_dir: str | None = None
    """Folder for every step's rollouts as `{step}.jsonl`."""
    validation_data_dir: str | None = None
    """Folder for every validation's answers as `{step}.jsonl`."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Workers per machine: GPUs, or processes on CPU."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """What the workers are: local is this process, ray are processes of a Ray cluster; auto is local for one worker."""
    placement: Literal["colocate", "hybrid", "split", "standalone"] = "colocate"
    """How roles share the workers: all of them everywhere; critic and reward model apart; the rollout apart too; each role by
    itself. `resource_pool_spec` says it in full instead."""
    max_restarts: int = 0
    """How often workers that died are started anew, to go on from the last checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes GPUs if there are any."""
    seed: int = 1
    """Seed of shuffling, sampling and initialisation."""
    balance_batch: bool = True
    """Give every rank about the same number of tokens."""
    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    test_freq: int = -1
    """Validate every so many steps, and after the last one; -1 never."""
    save_freq: int = -1
    """Save every so many steps, and after the last one; -1 after the last one alone, 0 never."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto goes on from the newest checkpoint in `default_local_dir`."""
    resume_from_path: str | None = None
    """The `global_step_N` folder that resume_mode=resume_path goes on from."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """The run's folder: checkpoints, metrics.jsonl, the config."""
    max_actor_ckpt_to_keep: int | None = None
    """Keep this many of the newest checkpoints; null keeps all."""
    max_critic_ckpt_to_keep: int | None = II("trainer.max_actor_ckpt_to_keep")
    """As `max_actor_ckpt_to_keep`; follows it. A checkpoint holds both models, so the larger of the two counts."""


@dataclass(frozen=True)
class RayInitConfig:
    address: str | None = None
    """Cluster to join (`auto`, `host:port`); null joins the one in RAY_ADDRESS, or starts one on this machine."""
    num_cpus: int | None = None
    """CPUs that a Ray started by the run may use."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Environment of the workers as Ray takes it, such as `env_vars` or `working_dir`."""
    timeline_json_file: str | None = None
    """File for Ray's timeline."""
