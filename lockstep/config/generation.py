"""The configuration of generation (`lockstep generate`), and the same as the configuration of a validation."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from lockstep.config.actor_rollout_ref import (
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointEngineConfig,
    RolloutConfig,
    SamplingConfig,
)
from lockstep.config.bounds import CountOrAll, NonNegativeInt, PositiveFraction, PositiveInt
from lockstep.config.data import DataConfig, ImageDataConfig, Truncation
from lockstep.config.environment import RootConfig
from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.trainer import RayInitConfig, TrainerConfig


@dataclass(frozen=True)
class GenerationTrainerConfig:
    nnodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: PositiveInt = 1
    """Workers per machine: GPUs, or processes on CPU. Each holds the whole model and answers its share of a batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses GPUs if there are any."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """Where workers run: local is this process, ray are processes of a Ray cluster; auto is local for one worker."""


@dataclass(frozen=True)
class GenerationDataConfig(ImageDataConfig):
    path: list[str] = field(default_factory=list)
    """Prompts: a parquet, jsonl or json file, a folder of them, a dataset of the Hub (`org/name[@revision][:config][:split]`), a
    URL, or a list of these (docs/models_and_data_by_name.md)."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or chat messages."""
    n_samples: PositiveInt = 5
    """Responses per prompt."""
    output_path: str = ""
    """Parquet or jsonl file to write: the rows with the columns `responses`, `response_lengths` and `finish_reasons`. Until it
    is complete, finished batches are in the folder `{output_path}.parts`."""
    batch_size: PositiveInt = 128
    """Prompts per batch (times `n_samples` sequences); an interrupted run loses at most one batch."""
    max_samples: CountOrAll = -1
    """Use the first this many rows; -1 for all."""
    max_prompt_length: PositiveInt = 1536
    """Maximum prompt length in tokens. If not set and the model is a run of RL, the run's."""
    max_response_length: PositiveInt = 512
    """Maximum response length in tokens. If not set and the model is a run of RL, the run's."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than `max_prompt_length`; the output does not have them."""
    truncation: Truncation = "error"
    """What to do with a prompt that is too long."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking`."""


def _fixed(default: Any) -> Any:
    """A field of the rollout that is no setting of generation."""
    return field(default=default, metadata={"internal": True})


@dataclass(frozen=True)
class GenerationRolloutConfig(RolloutConfig):
    """How responses are sampled; the defaults of sampling are verl's."""

    name: str = "embedded"
    """Rollout engine: embedded, hf (transformers' generate), vllm, or server, sglang and tgi (running servers, see
    `server`)."""
    top_k: CountOrAll = 50
    """Sample from the k most likely tokens; -1 is all."""
    top_p: PositiveFraction = 0.7
    """Sample from the smallest set of tokens whose total probability reaches p."""
    seed: NonNegativeInt = 1
    """Sampling seed; each sample's random stream depends only on it, the row and the number of the sample."""
    dtype: Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "auto"] = "auto"
    """Dtype of the model; auto is bfloat16 on GPUs and float32 on CPU."""
    free_cache_engine: bool = False
    """Free the KV cache after each batch."""
    mode: Literal["sync", "async"] = _fixed("async")
    load_format: str = _fixed("auto")
    n: int = _fixed(1)
    prompt_length: int = _fixed(0)
    response_length: int = _fixed(0)
    calculate_log_probs: bool = _fixed(False)
    log_prob_micro_batch_size_per_gpu: int | None = _fixed(None)
    log_prob_use_dynamic_bsz: bool = _fixed(False)
    log_prob_max_token_len_per_gpu: int = _fixed(16384)
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig, metadata={"internal": True})
    checkpoint_engine: CheckpointEngineConfig = field(
        default_factory=CheckpointEngineConfig, metadata={"internal": True}
    )


@dataclass(frozen=True)
class GenerationConfig(RootConfig):
    trainer: GenerationTrainerConfig = field(default_factory=GenerationTrainerConfig)
    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    model: HFModelConfig = field(default_factory=HFModelConfig)
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


def as_validation(config: GenerationConfig) -> PPOConfig:
    """The training configuration whose validation generates the same responses; its folder is that of the finished batches."""
    trainer, data, rollout = config.trainer, config.data, config.rollout
    sampling = SamplingConfig(
        do_sample=rollout.do_sample,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        n=data.n_samples,
    )
    policy = ActorRolloutRefConfig(
        model=config.model,
        actor=ActorConfig(fsdp_config=FSDPEngineConfig(dtype=rollout.dtype)),
        rollout=replace(
            rollout,
            val_kwargs=sampling,
            prompt_length=data.max_prompt_length,
            response_length=data.max_response_length,
        ),
    )
    return PPOConfig(
        data=DataConfig(
            val_files=data.path,
            val_max_samples=data.max_samples,
            val_batch_size=data.batch_size,
            prompt_key=data.prompt_key,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            filter_overlong_prompts=data.filter_overlong_prompts,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            **{image.name: getattr(data, image.name) for image in fields(ImageDataConfig)},
        ),
        actor_rollout_ref=policy,
        trainer=TrainerConfig(
            nnodes=trainer.nnodes,
            n_gpus_per_node=trainer.n_gpus_per_node,
            device=trainer.device,
            controller=trainer.controller,
            val_only=True,
            default_local_dir=parts_folder(config),
        ),
        ray_init=config.ray_init,
    )


def with_own_keys(message: str) -> str:
    """An error about `as_validation`, with the keys of generation."""
    return message.replace("actor_rollout_ref.", "")


def parts_folder(config: GenerationConfig) -> str:
    """The folder of finished batches."""
    return f"{config.data.output_path}.parts"
