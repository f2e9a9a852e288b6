"""Model, optimizer and FSDP engine: sections shared by actor, reference, critic and reward model."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II

from lockstep.config.bounds import (
    Betas,
    CountOrAll,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
)

Dtype = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "auto"]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


@dataclass(frozen=True)
class HFModelConfig:
    path: str = ""
    """Hugging Face causal language model: a local folder, `org/name[@revision]` of the Hub, a run or its `global_step_N` folder, or
    a URL (docs/models_and_data_by_name.md)."""
    tokenizer_path: str | None = None
    """Tokenizer, in the same forms; null is `path`."""
    trust_remote_code: bool = False
    """Allow the model to run code from its folder."""
    external_lib: str | None = None
    """Module or Python file to import first: it may register estimators, losses, scorers, trackers or model architectures."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's config.json."""
    custom_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, of the layers whose activations do not fit: less memory, more time."""
    use_remove_padding: bool = True
    """Pack sequences without padding; false computes on padded rows."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters on a frozen model (docs/lora.md); 0 trains all parameters."""
    lora_alpha: PositiveInt = 16
    """LoRA's scale is lora_alpha / lora_rank."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers with an adapter: a list of names such as [q_proj,v_proj], a regular expression of whole paths, or all-linear
    for all but the vocabulary head. Names and all-linear mean the language model; only a regular expression reaches a vision
    tower."""
    exclude_modules: str | list[str] | None = None
    """Layers without an adapter though `target_modules` selects them: a list of names or a regular expression."""
    load_in_4bit: bool = False
    """With `lora_rank`: hold the frozen linear layers in 4 bits (QLoRA: NF4 with double quantisation, by bitsandbytes)."""
    freeze_vision_tower: bool = False
    """Do not train the tower of a vision-language model. A projector outside of the tower (LLaVA, InternVL, SmolVLM, Gemma) is
    trained; the merger of Qwen's models is part of their tower."""
    lora_adapter_path: str | None = None
    """Folder of a peft adapter to continue from; its rank must be `lora_rank`, its alpha and layers are taken over."""


@dataclass(frozen=True)
class CriticModelConfig(HFModelConfig):
    path: str = II("actor_rollout_ref.model.path")
    """The critic's base model, in the same forms as the actor's; a value head is added, or loaded if the folder has one."""
    tokenizer_path: str | None = II("actor_rollout_ref.model.tokenizer_path")
    """Tokenizer; null is `path`."""
    trust_remote_code: bool = II("actor_rollout_ref.model.trust_remote_code")
    """Allow the model to run code from its folder."""
    external_lib: str | None = II("actor_rollout_ref.model.external_lib")
    """Module or Python file to import first."""
    fsdp_config: "FSDPEngineConfig" = field(default_factory=lambda: FSDPEngineConfig())


@dataclass(frozen=True)
class FSDPOptimizerConfig:
    optimizer: Literal["AdamW"] = "AdamW"
    """Optimizer class."""
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule after the warm-up."""
    lr_warmup_steps: int = -1
    """Warm-up in training steps; -1 uses `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: UnitFloat = 0.0
    """Warm-up as a fraction of all training steps."""
    total_training_steps: int = -1
    """Length of the schedule in training steps; -1 for the length of the run."""
    min_lr_ratio: UnitFloat = 0.0
    """Cosine and linear: final learning rate as a fraction of the peak."""
    min_lr: NonNegativeFloat = 0.0
    """Cosine and linear: final learning rate; the larger of it and `min_lr_ratio` counts."""
    num_cycles: float = 0.5
    """Cosine: number of periods; 0.5 decays once from the peak."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """AdamW's averaging coefficients."""
    clip_grad: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""


@dataclass(frozen=True)
class WrapPolicyConfig:
    min_num_params: int = 0
    """Has no effect: models are sharded layer by layer."""


@dataclass(frozen=True)
class TrainEngineConfig:
    """What the section of every training engine has."""

    param_offload: bool = False
    """Keep parameters in host memory between the phases that use them (no effect on CPU)."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory; each optimizer step streams it through the device (no effect on CPU)."""
    model_dtype: Dtype = "fp32"
    """Dtype of the master weights and of the optimizer's state: float32, or bfloat16 with stochastic rounding."""
    dtype: Dtype = "auto"
    """Dtype of the compute copy: auto is bfloat16 on CUDA and float32 on CPU; float16 uses dynamic loss scaling."""
    seed: NonNegativeInt = 42
    """Seed of new parameters (the value head) and of stochastic rounding."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute on the same rows; one such group is one data-parallel rank."""
        return 1

    @property
    def ranks_per_sequence(self) -> int:
        """Of these, the ranks that hold different tokens of a sequence."""
        return 1


@dataclass(frozen=True)
class FSDPEngineConfig(TrainEngineConfig):
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    offload_policy: bool = False
    """FSDP2's own CPU offload: parameters live in host memory and stream in layer by layer."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again for the backward pass."""
    fsdp_size: CountOrAll = -1
    """Ranks in one shard group; -1 for all."""
    forward_prefetch: bool = False
    """Gather the next layer's parameters while the current one computes."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that split each sequence (Ulysses)."""
    full_determinism: bool = False
    """Compute gradients with deterministic GPU kernels only, which are slower: an update that is repeated gives the same bits."""

    @property
    def ranks_per_row(self) -> int:
        return self.ulysses_sequence_parallel_size

    @property
    def ranks_per_sequence(self) -> int:
        return self.ulysses_sequence_parallel_size


@dataclass(frozen=True)
class CheckpointConfig:
    save_contents: list[CheckpointPart] = field(default_factory=lambda: ["model", "optimizer", "extra", "hf_model"])
    """Parts that a checkpoint contains; extra is the schedule and RNG state, hf_model a `from_pretrained` folder."""
    load_contents: list[CheckpointPart] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts that are loaded on resume."""
    async_save: bool = False
    """Must be false; `trainer.async_save` saves in the background."""
