"""`actor_rollout_ref.*`: the policy that is trained, its rollout and its frozen reference."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from omegaconf import II

from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.config.model import CheckpointConfig, Dtype, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"


def _followed_correction() -> RolloutCorrectionConfig:
    """`algorithm.rollout_correction`, key by key."""
    return RolloutCorrectionConfig(**{f.name: II(f"{_CORRECTION}.{f.name}") for f in fields(RolloutCorrectionConfig)})


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Policy loss by registered name (vanilla, gspo, sapo, cispo, gpg, geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl, dro,
    bypass_mode), or outside code as `module:function` or `file.py:function`."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of the mini-batch's tokens whose gradient is dropped."""
    clip_cov_lb: float = 1.0
    """clip_cov: least covariance of a token that may be dropped."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of a token that may be dropped."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of the mini-batch's tokens, those of largest covariance, that pay a KL penalty."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of that penalty."""
    dro_beta: float = 0.1
    """dro: weight of the squared log-ratio."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=_followed_correction)


@dataclass(frozen=True)
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    """Training engine; both names mean FSDP2."""
    ppo_mini_batch_size: int = 256
    """Prompts in one optimizer step (times `rollout.n` sequences)."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward/backward; null takes the whole mini-batch."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens (`ppo_max_token_len_per_gpu`) instead of by sequences."""
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens in one micro-batch with `use_dynamic_bsz`."""
    ppo_epochs: int = 1
    """Passes over a step's batch."""
    shuffle: bool = False
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffling."""
    clip_ratio: float = 0.2
    """PPO's clip distance; `clip_ratio_low` and `clip_ratio_high` follow it unless they are set."""
    clip_ratio_low: float = II(f"{_ACTOR}.clip_ratio")
    """Distance below 1 at which the ratio is clipped (0.2 clips at 0.8)."""
    clip_ratio_high: float = II(f"{_ACTOR}.clip_ratio")
    """Distance above 1 at which the ratio is clipped (0.28 clips at 1.28)."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound on the ratio where the advantage is negative; dppo_tv and dppo_kl hold every ratio under it."""
    tau_pos: float = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """sapo: temperature of the gate elsewhere."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean,
    seq-mean-token-sum-norm."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; null takes the response width."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Report the entropy even where `entropy_coeff` is 0."""
    old_log_prob_pass: Literal["auto", "always"] = "auto"
    """Compute the old log-probs in a pass of their own. auto: leave it out where a step is one update and nothing before it reads
    them, since the update's own log-probs are the old ones then."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities at each position (batch key `sum_pi_squared`) with the old log-probs; on
    where the advantage estimator needs it."""
    use_kl_loss: bool = False
    """Add a KL term against the reference policy to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that term."""
    kl_loss_type: str = "low_var_kl"
    """KL estimator of that term: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: FSDPOptimizerConfig = field(default_factory=FSDPOptimizerConfig)
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    grad_clip: float = II(f"{_ACTOR}.optim.clip_grad")
    """Largest gradient norm."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rollout_n: int = II("actor_rollout_ref.rollout.n")
    """Samples per prompt; follows `rollout.n`."""
    global_batch_info: dict[str, Any] = field(default_factory=dict, metadata={"internal": True})
    """Set by the worker, not by users: dp_size, batch_num_tokens, global_batch_size, loss_scale_factor of the
    mini-batch."""


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling in validation."""

    do_sample: bool = False
    """False decodes greedily."""
    temperature: float = 0.0
    """0 decodes greedily."""
    top_k: int = -1
    """Sample from the k likeliest tokens; -1 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches p."""
    min_p: float = 0.0
    """Sample from the tokens with at least this share of the likeliest one's probability; 0 for all."""
    n: int = 1
    """Answers per validation prompt."""


@dataclass(frozen=True)
class CheckpointEngineConfig:
    """How weights reach a rollout that runs in processes of its own."""

    backend: Literal["auto", "naive", "nccl"] = "auto"
    """naive sends them through Ray's object store, nccl broadcasts them in a process group (gloo on CPU); auto is nccl on GPUs
    and naive on CPU."""
    update_weights_bucket_megabytes: int = 2048
    """Most that is on its way at once."""


@dataclass(frozen=True)
class RolloutConfig:
    name: str = "embedded"
    """Rollout engine: embedded (the trainer's own weights) or hf (transformers' generate)."""
    mode: Literal["sync", "async"] = "async"
    """How agents call the engine; a single-turn rollout is the same in both."""
    n: int = 1
    """Samples per prompt."""
    do_sample: bool = True
    """False decodes greedily."""
    temperature: float = 1.0
    """Divides the logits; log-probs are taken at this temperature too."""
    top_k: int = -1
    """Sample from the k likeliest tokens; -1 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches p."""
    min_p: float = 0.0
    """Sample from the tokens with at least this share of the likeliest one's probability; 0 for all."""
    ignore_eos: bool = False
    """Go on to `response_length` past the end-of-sequence token."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response beside the model's own end-of-sequence tokens."""
    seed: int = II("trainer.seed")
    """Seed of the sampling; each sample's stream depends on it, the step and the sample alone."""
    prompt_length: int = II("data.max_prompt_length")
    """Longest prompt in tokens."""
    response_length: int = II("data.max_response_length")
    """Longest response in tokens."""
    dtype: Dtype = "auto"
    """Type in which engines with weights of their own compute; embedded computes in the actor's."""
    max_num_seqs: int = 256
    """Sequences that decode at once."""
    max_num_batched_tokens: int = 16384
    """Tokens in one prefill step."""
    max_model_len: int | None = None
    """Longest sequence; null is prompt_length + response_length."""
    gpu_memory_utilization: float = 0.5
    """Share of the device's free memory that the KV cache may fill."""
    kv_block_size: int = 16
    """Embedded: tokens in one block of the KV cache."""
    enable_prefix_caching: bool = True
    """Compute a prompt that several samples share once."""
    enable_chunked_prefill: bool = True
    """Let a prompt longer than `max_num_batched_tokens` fill the cache over several steps."""
    free_cache_engine: bool = True
    """Give the KV cache's memory back after each rollout."""
    enforce_eager: bool = False
    """Do without CUDA graphs."""
    tensor_model_parallel_size: int = 1
    """Devices that share one copy of the rollout model (vllm, sglang)."""
    calculate_log_probs: bool = True
    """Return the log-prob of each sampled token (batch key `rollout_log_probs`)."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward of the old-log-prob pass; null takes all."""
    log_prob_use_dynamic_bsz: bool = II(f"{_ACTOR}.use_dynamic_bsz")
    """Fill those micro-batches by tokens."""
    log_prob_max_token_len_per_gpu: int = II(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    """Tokens in one such micro-batch."""
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)


@dataclass(frozen=True)
class RefConfig:
    enable: bool | None = None
    """False trains without a reference policy, so that a KL term is an error; otherwise it is loaded where one asks for
    it."""
    strategy: Literal["fsdp", "fsdp2"] = II(f"{_ACTOR}.strategy")
    """Engine of the forward pass."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward of the reference; null takes all."""
    log_prob_use_dynamic_bsz: bool = II(f"{_ACTOR}.use_dynamic_bsz")
    """Fill those micro-batches by tokens."""
    log_prob_max_token_len_per_gpu: int = II(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    """Tokens in one such micro-batch."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    ulysses_sequence_parallel_size: int = II(f"{_ACTOR}.ulysses_sequence_parallel_size")
    """Ranks that share one sequence."""


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    hybrid_engine: bool = True
    """Actor and rollout share devices; `trainer.placement` parts them."""
    nccl_timeout: int = 600
    """Seconds that a worker waits for the others in a collective operation."""
    model: HFModelConfig = field(default_factory=HFModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)
