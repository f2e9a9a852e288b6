"""`reward_model.*` and `custom_reward_function.*`: how responses are scored."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II

from lockstep.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt, Temperature
from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.megatron import FollowingMcoreEngineConfig
from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.config.profiler import ProfilerConfig

REWARD_MANAGERS = {"naive", "batch", "dapo", "functions", "prime", "rate_limited"}
"""Names that `reward_manager` allows; registering another one adds its name."""


@dataclass(frozen=True)
class RewardModelModelConfig(HFModelConfig):
    path: str = ""
    """A sequence classifier with one label, in the same forms as the actor's path."""
    input_tokenizer: str | None = None
    """The policy's tokenizer, if the reward model's tokens or chat template differ: conversations are then rendered and encoded
    again as the reward model expects them; null if they are the same."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


@dataclass(frozen=True)
class JudgeConfig:
    enable: bool = False
    """Score responses with a generative judge; not needed if `reward_model.ensemble` has one."""
    base_url: str | None = None
    """OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model there."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null sends none."""
    prompt_path: str | None = None
    """File with the prompt, a Jinja template; null is a general one. Variables: `prompt`, `response`, `answer`, `ground_truth`,
    `data_source`, `extra_info`, `low`, `high`."""
    score_range: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score that the judge may give; the reward is its place between them, from 0 to 1."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is asked for a JSON object; `none` only says so in the prompt."""
    answer_regex: str | None = None
    """For judges that do not write JSON: the last line of the answer must match this as a whole; its first group is the score."""
    temperature: Temperature = 0.0
    """Sampling temperature of the judge."""
    max_tokens: PositiveInt = 512
    """Longest answer."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one request; that of a row, retries included, is `reward_model.timeout_s`."""
    max_retries: NonNegativeInt = 5
    """How often a request is sent again after an error of the server, a timeout or an answer without a valid score."""
    retry_backoff_s: PositiveFloat = 1.0
    """Pause before the first retry; it doubles each time."""
    cache: bool = True
    """Do not send a request again that was answered before."""
    cache_path: str | None = None
    """SQLite file that keeps the answers for later runs; null keeps them in memory."""


@dataclass(frozen=True)
class RewardPartConfig:
    """One entry of `reward_model.ensemble`."""

    source: str = ""
    """`scorer` (by `data_source`), `judge`, `reward_model`, `turn_rewards` or `rollout_reward_scores` (of conversations), or a
    function as `file.py:function` or `pkg.module:function`."""
    weight: float = 1.0
    """Factor of the value in the score; 0 leaves the entry out."""
    clip: tuple[float, float] | None = None
    """Limits of the value."""
    normalize: Literal["group"] | None = None
    """`group`: subtract the mean and divide by the standard deviation of the prompt's samples, in training."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function or the scorers; keys of `reward_model.judge` that differ for this judge."""


@dataclass(frozen=True)
class SandboxFusionConfig:
    url: str | None = None
    """`http://host:port/run_code` of a SandboxFusion server that runs the programs of responses; null runs them in `sandbox`."""
    max_concurrent: PositiveInt = 64
    """Requests at once per process."""
    memory_limit_mb: int = 1024
    """Memory of a program."""


@dataclass(frozen=True)
class RewardFunctionConfig:
    reward_manager: str = "naive"
    """Reward manager: `naive`, `batch`, `dapo`, `prime`, `rate_limited`, or your own as `module:Class` or `file.py:Class`."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the reward manager, such as `overlong_buffer_cfg` or `num_workers`, the most worker processes (number of
    cores, at most 16; set 1 for a function that loads a model)."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "landlock", "none"] = "auto"
    """Isolation of programs and graders. `auto` is the strongest form that works; if none does, programs are refused and graders of
    mathematics run with limits only. `none` accepts that a judged program can read and write your files."""
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    timeout_s: PositiveFloat | None = 300.0
    """Timeout in seconds of one reward function call; on timeout the sample fails (score 0, counted), and three in a row stop the
    run. null has no timeout and calls the function in the trainer's process."""
    max_concurrent: PositiveInt | None = None
    """Calls of coroutine reward functions, and requests of judges, at once; null is 64."""
    max_rpm: PositiveInt | None = None
    """Such calls and requests per minute; null has no limit."""
    max_tpm: PositiveInt | None = None
    """Tokens of these per minute; null has no limit."""
    estimated_tokens_per_request: PositiveInt = 2000
    """Tokens that one call of a coroutine function counts for `max_tpm`; requests of judges are estimated by their length."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    ensemble: dict[str, Any] = field(default_factory=dict)
    """Several rewards, each under a name of your choice: `{correct: {source: scorer}, style: {source: judge, weight: 0.2}}`. The
    score is their weighted sum. Keys of an entry: `source`, `weight`, `clip`, `normalize`, `kwargs`; see docs/rewards.md."""


@dataclass(frozen=True)
class RewardModelConfig(RewardFunctionConfig):
    enable: bool = False
    """Score responses with a model (batch key `rm_scores`)."""
    enable_resource_pool: bool = False
    """Run the reward model in a separate pool of `nnodes` machines with `n_gpus_per_node` workers each."""
    n_gpus_per_node: PositiveInt = 8
    """Workers per machine, with `enable_resource_pool`."""
    nnodes: NonNegativeInt = 0
    """Machines, with `enable_resource_pool`."""
    nccl_timeout: PositiveInt = II("actor_rollout_ref.nccl_timeout")
    """Timeout of collective operations in seconds."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that split each sequence (Ulysses)."""
    strategy: str = "fsdp"
    """Engine of the forward pass, as in actor_rollout_ref.actor.strategy."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    megatron: FollowingMcoreEngineConfig = field(default_factory=FollowingMcoreEngineConfig)
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward; see `actor.ppo_micro_batch_size_per_gpu`."""
    use_dynamic_bsz: bool | None = II("critic.use_dynamic_bsz")
    """Fill micro-batches by tokens; null as for the actor."""
    forward_max_token_len_per_gpu: PositiveInt = II("critic.forward_max_token_len_per_gpu")
    """Tokens per micro-batch."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    path: str | None = None
    """The reward function as `file.py:function` or `pkg.module:function`, or the file (or `pkg://module`) and `name`; null
    selects a built-in scorer by `data_source`."""
    name: str = "compute_score"
    """Function name, if `path` has none."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call; with `path: null` those of the built-in scorers, such as `method: flexible` or
    `format_score` (gsm8k: 0.1 in training and 0 in validation unless set), and `scorer`, which selects one (`math_reward`,
    `module:function`) for all rows or per `data_source`."""
