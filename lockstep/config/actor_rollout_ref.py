"""`actor_rollout_ref.*`: the policy, its rollout engine and its frozen reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import II

from lockstep.config.algorithm import KLEstimator
from lockstep.config.bounds import (
    Bound,
    CountOrAll,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Temperature,
    UnitFloat,
)
from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.engines import ROLLOUT_ENGINES, SERVER_KINDS
from lockstep.config.megatron import McoreEngineConfig, RefMcoreEngineConfig
from lockstep.config.model import CheckpointConfig, Dtype, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.config.policy_loss import PolicyLossConfig
from lockstep.config.profiler import ProfilerConfig

_ACTOR = "actor_rollout_ref.actor"

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class RouterReplayConfig:
    """Which experts compute a token in training, for a mixture of experts (docs/moe.md)."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """disabled: those that the router chooses. R2: updates use the experts of the old-log-prob pass. R3: this pass and updates use
    the experts of the rollout. The reference and the critic are not affected."""


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = "fsdp"
    """Training engine: fsdp or fsdp2 (both mean FSDP2), megatron (docs/megatron.md), deepspeed (docs/deepspeed.md), or your own as
    path/to/file.py:Class (docs/extending.md)."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step (times `rollout.n` sequences)."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward/backward with `use_dynamic_bsz=false`, where null is the whole mini-batch."""
    use_dynamic_bsz: bool | None = None
    """Fill micro-batches by tokens (`ppo_max_token_len_per_gpu`) instead of sequences. null does so if
    `ppo_micro_batch_size_per_gpu` is not set, with as many tokens as the device's memory has room for (docs/plan.md)."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per micro-batch with `use_dynamic_bsz`."""
    ppo_epochs: PositiveInt = 1
    """Passes over a step's batch."""
    shuffle: bool = False
    """Shuffle the batch before it is split into mini-batches."""
    data_loader_seed: int = 42
    """Seed of `shuffle`."""
    clip_ratio: NonNegativeFloat = 0.2
    """PPO's clip distance; `clip_ratio_low` and `clip_ratio_high` follow it unless they are set."""
    clip_ratio_low: NonNegativeFloat = II(f"{_ACTOR}.clip_ratio")
    """Distance below 1 at which the ratio is clipped (0.2 clips at 0.8)."""
    clip_ratio_high: NonNegativeFloat = II(f"{_ACTOR}.clip_ratio")
    """Distance above 1 at which the ratio is clipped (0.28 clips at 1.28)."""
    clip_ratio_c: Annotated[float, Bound(lambda x: x > 1, "must be greater than 1")] = 3.0
    """Dual clip: upper bound of the ratio for negative advantages; dppo_tv and dppo_kl clip every ratio at it."""
    tau_pos: PositiveFloat = 1.0
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: PositiveFloat = 1.05
    """sapo: temperature of the gate for other advantages."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are aggregated to a scalar."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; null is the padded response length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Report the entropy even if `entropy_coeff` is 0."""
    old_log_prob_pass: Literal["auto", "always"] = "auto"
    """Compute the old log-probs in a separate forward pass. auto skips it if a step is a single update and nothing reads them
    before: the update's own log-probs are the old ones then."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities at each position (batch key `sum_pi_squared`) with the old log-probs; always on
    if the advantage estimator needs it."""
    use_kl_loss: bool = False
    """Add a KL term against the reference policy to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL term."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """KL estimator of the KL term; see `algorithm.kl_penalty`."""
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances the load of experts, computed per response and averaged over responses (docs/moe.md)."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: FSDPOptimizerConfig = field(default_factory=FSDPOptimizerConfig)
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that split each sequence (Ulysses)."""
    grad_clip: PositiveFloat = II(f"{_ACTOR}.optim.clip_grad")
    """Gradients are clipped to this norm."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters of validation."""

    do_sample: bool = False
    """False decodes greedily."""
    temperature: Temperature = 0.0
    """0 decodes greedily."""
    top_k: CountOrAll = -1
    """Sample from the k most likely tokens; -1 is all."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens whose total probability reaches p."""
    min_p: UnitFloat = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability; 0 is all."""
    n: PositiveInt = 1
    """Responses per validation prompt."""


@dataclass(frozen=True)
class CheckpointEngineConfig:
    """How weights are sent to a rollout that runs in separate processes."""

    backend: Literal["auto", "naive", "nccl"] = "auto"
    """naive uses Ray's object store, nccl broadcasts in a process group (gloo on CPU); auto is nccl on GPUs and naive on CPU."""
    update_weights_bucket_megabytes: PositiveInt = 2048
    """Size of one bucket of weights."""


@dataclass(frozen=True)
class ServerConfig:
    """Inference servers that are already running, for the engines server, sglang and tgi."""

    urls: list[str] = field(default_factory=list)
    """Base URLs, such as http://127.0.0.1:8000. Each worker uses its share of them; requests go to the server with the fewest
    outstanding tokens, those with equal prompts to the same one."""
    kind: Literal["auto", "vllm", "sglang", "openai", "tgi"] = "auto"
    """Protocol; auto asks the server whether it is vllm, sglang or openai. openai is `/v1/completions` with token ids and
    log-probs; tgi is Hugging Face's text-generation-inference. Both have no weight updates: see `reload_command`."""
    model: str | None = None
    """Name under which the server serves the model; null takes its only one."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; it must be set on every worker."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one attempt of a request, and of each step of a weight update."""
    connect_timeout_s: PositiveFloat = 10.0
    """Deadline of opening a connection."""
    max_retries: NonNegativeInt = 5
    """How often a request is sent again, to another server if there is one, before the run stops."""
    retry_backoff_s: PositiveFloat = 1.0
    """Pause after the first failure of a server; doubles with each further one, up to 30 seconds."""
    max_outstanding: PositiveInt = 256
    """Requests of one worker that a server has at once; the others wait."""
    weight_transfer: Literal["auto", "file", "tensor", "distributed"] = "auto"
    """How new weights reach the server. file: safetensors files in `weights_folder` (vllm); tensor: in the request (sglang);
    distributed: broadcast in a process group of worker and servers, NCCL or on CPU gloo. auto is file for vllm on this machine or
    with `weights_folder`, tensor for sglang on CPU, otherwise distributed."""
    weights_folder: str | None = None
    """Folder that workers and servers share, for weight_transfer=file and reload_command. null is this machine's memory (/dev/shm),
    for servers on the same machine; with reload_command it is `rollout_weights` in trainer.default_local_dir."""
    weights_owner: str | None = None
    """With reload_command, the run's name in the folders that it writes into `weights_folder`: it removes only those, and refuses
    those of other runs. null is trainer.default_local_dir; set its old path if the run was moved."""
    reload_command: str | None = None
    """Program that brings new weights to a server by a restart or a reload. After each update the weights are written as a Hugging
    Face folder, and the program runs once for each server: {folder}, {version} and {url} in its arguments are replaced. No shell
    interprets it, unless it is `bash -c '...'`. Slow: for servers that cannot take weights (docs/servers.md)."""
    reload_timeout_s: PositiveFloat = 600.0
    """Deadline of reload_command and of the server's first answer after it."""
    sleep: bool = False
    """Let the servers release their GPU memory between rollouts, because they share the trainer's GPUs. They must have been started
    with --enable-sleep-mode (vllm) or --enable-memory-saver (sglang)."""


@dataclass(frozen=True)
class MultiTurnConfig:
    """Conversations of several turns: tools and interactions (docs/agents.md)."""

    enable: bool = False
    """Requires that at least one row is served by a loop other than single_turn_agent; the rows' agent_name selects the loop."""
    max_assistant_turns: PositiveInt | None = None
    """Turns of the policy after which a conversation ends; null is no limit."""
    max_user_turns: PositiveInt | None = None
    """Turns of tools and users after which a conversation ends; null is no limit."""
    max_parallel_calls: PositiveInt = 1
    """Tool calls of one turn that are executed; further ones are ignored."""
    max_tool_response_length: PositiveInt = 256
    """Characters of a tool's response; longer ones are cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """What is kept of a longer response: its left part, its right part, or both ends without the middle."""
    tool_config_path: str | None = None
    """YAML file with tools (docs/tools.md)."""
    function_tool_path: str | None = None
    """Python functions as tools: a .py file (all of its public functions), or file.py:function or file.py:Class."""
    interaction_config_path: str | None = None
    """YAML file with interactions (docs/agents.md)."""
    tool_timeout_s: PositiveFloat = 30.0
    """Deadline of each call of a tool or an interaction, in seconds."""
    format: str = "hermes"
    """Format of the model's tool calls: a registered parser (docs/tools.md), or your own as file.py:Class."""
    use_inference_chat_template: bool = False
    """If the chat template changes earlier turns (it may drop their reasoning), true begins a new training sample with the
    changed history, and false keeps the history as it was sampled."""


@dataclass(frozen=True)
class ProgramConfig:
    """An outside program that holds the conversations of rows with agent_name=program_agent (docs/agents.md)."""

    command: list[str] = field(default_factory=list)
    """The program and its arguments; it talks to the policy at OPENAI_BASE_URL or ANTHROPIC_BASE_URL."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of a conversation, in seconds without those in which it waits for the policy; then the program is killed."""
    max_concurrent: PositiveInt = 64
    """Programs that run at once; further conversations wait."""
    force_sampling: bool = True
    """Sample as the rollout does even if a request asks for another temperature, top_p, ...; false samples as asked and does not
    train on such turns."""


@dataclass(frozen=True)
class AgentConfig:
    """Agent loops (docs/agents.md)."""

    default_agent_loop: str = "single_turn_agent"
    """Loop of rows without agent_name."""
    agent_loop_config_path: str | None = None
    """YAML file with your own loops: a list of entries with `name`, `_target_` (a class) and its options."""
    num_workers: NonNegativeInt = 0
    """Processes that hold the conversations; 0 holds them in the controller's process."""
    program: ProgramConfig = field(default_factory=ProgramConfig)


@dataclass(frozen=True)
class HistoryDraftsConfig:
    """embedded: speculative decoding with drafts from earlier answers to the same prompt (docs/speculation.md)."""

    enable: bool = False
    """Draft from the answers seen for a prompt, of this step and of earlier epochs, if measured times say that it pays. The sampled
    tokens are the same as without it."""
    max_draft_tokens: PositiveInt = 16
    """Most draft tokens of a sequence per decode step."""
    max_memory_mb: PositiveInt = 256
    """Host memory for a worker's answers and their search index, in MiB; the prompts that were used least recently are dropped
    first. Answers are saved with checkpoints."""

    def step_tokens(self, max_num_seqs: int, on_cuda: bool) -> int:
        """Most tokens of a step with drafts. On CUDA more tokens hardly take longer."""
        return max(max_num_seqs, 1024 if on_cuda else 64)


@dataclass(frozen=True)
class RolloutConfig:
    name: str = "embedded"
    """Rollout engine: embedded (decodes with the trainer's weights), hf (transformers' generate), vllm (holds a copy), or server,
    sglang and tgi (running servers, see `server`)."""
    mode: Literal["sync", "async"] = "sync"
    """async generates the samples of a step as independent requests and scores each one while others still generate,
    for slow rewards; sync generates all, then scores all. Both give the same batch. Default async with trainer.async_mode or
    over_sample_rate."""
    over_sample_rate: Annotated[float, Bound(lambda x: 0 <= x < 1, "must be at least 0 and below 1")] = 0.0
    """async: fraction of the prompts in generation that a step does not wait for. A step generates train_batch_size / (1 - rate)
    prompts and ends when train_batch_size of them are complete."""
    n: PositiveInt = 1
    """Samples per prompt."""
    do_sample: bool = True
    """False decodes greedily."""
    temperature: Temperature = 1.0
    """Divides the logits; log-probs are computed at this temperature too."""
    top_k: CountOrAll = -1
    """Sample from the k most likely tokens; -1 is all."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens whose total probability reaches p."""
    min_p: UnitFloat = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability; 0 is all."""
    ignore_eos: bool = False
    """Generate `response_length` tokens even after the end-of-sequence token."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, in addition to the model's end-of-sequence tokens."""
    seed: NonNegativeInt = II("trainer.seed")
    """Sampling seed; each sample's random stream depends only on it, the step and the sample."""
    prompt_length: PositiveInt = II("data.max_prompt_length")
    """Maximum prompt length in tokens."""
    response_length: PositiveInt = II("data.max_response_length")
    """Maximum response length in tokens."""
    dtype: Dtype = "auto"
    """Compute dtype of vllm, and of the weights sent to a server; auto is the actor's, which the other engines always use."""
    max_num_seqs: PositiveInt = 256
    """Maximum number of sequences that decode concurrently."""
    max_num_batched_tokens: PositiveInt = 16384
    """Tokens per prefill step."""
    max_model_len: PositiveInt | None = None
    """Maximum sequence length; null is prompt_length + response_length."""
    gpu_memory_utilization: PositiveFraction = 0.5
    """Fraction of the GPU's total memory that the engine may use for the rollout model's weights and the KV cache, as in vLLM; on
    CPU the fraction of the machine's memory for the KV cache."""
    kv_block_size: PositiveInt = 16
    """embedded: tokens per KV cache block."""
    enable_prefix_caching: bool = True
    """Prefill a prompt shared by several samples once."""
    enable_chunked_prefill: bool = True
    """Prefill a prompt longer than `max_num_batched_tokens` over several steps."""
    free_cache_engine: bool = True
    """Free the KV cache after each rollout, in vllm also the weights. Default false if trainer.placement gives the rollout its own
    GPUs."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    disable_log_stats: bool = True
    """vllm: false logs its statistics (throughput, use of the KV cache) every few seconds."""
    tensor_model_parallel_size: PositiveInt = 1
    """embedded and vllm: workers that hold each copy of the rollout model together, consecutive ones. 1 with the other engines."""
    n_gpus: PositiveInt | None = None
    """embedded and hf, in the actor's processes: how many of its workers generate, from the first on; the others only train.
    null is all."""
    load_format: str = "dummy"
    """vllm: how it loads the model when it starts. dummy loads nothing, because the actor's weights are sent before the first
    rollout; auto reads the model's folder, as dummy does for a model that reads images."""
    quantization: str | None = None
    """embedded: fp8 decodes with the decoder layers' weights in 8 bits, quantised from the trainer's at each rollout
    (docs/quantization.md); `algorithm.rollout_correction.rollout_is` is token by default then. vllm: quantise the weights when they
    are loaded, such as fp8."""
    kv_cache_dtype: str | None = None
    """embedded: fp8 keeps the KV cache in 8 bits (float8_e4m3fn), with or without `quantization`; twice as many tokens fit, and
    samples are corrected as with `quantization`. vllm: its argument of this name. null is the model's precision."""
    quantization_max_gap: PositiveFloat = 0.2
    """embedded with `quantization` or `kv_cache_dtype`: largest mean difference of a step between the log-probs of rollout and
    trainer that `trainer.audit.rollout_gap` allows."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of an engine, by its name: engine_kwargs.vllm overrides arguments of `vllm.LLM`."""
    enable_rollout_routing_replay: bool = False
    """Record the experts that compute each token (batch key `routed_experts`), for actor.router_replay.mode=R3, where it is the
    default; without R3 the difference to the trainer's is only reported (docs/moe.md)."""
    calculate_log_probs: bool = True
    """Return the log-prob of each sampled token (batch key `rollout_log_probs`)."""
    exact: bool = False
    """embedded: the log-prob of every sampled token is the trainer's, bit for bit, whatever else is in the batch (docs/exact.md).
    Then old log-probs are the rollout's, and the audit of their gap allows none."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward of the old-log-prob pass; see `actor.ppo_micro_batch_size_per_gpu`."""
    log_prob_use_dynamic_bsz: bool | None = II(f"{_ACTOR}.use_dynamic_bsz")
    """Fill these micro-batches by tokens; null as for the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt = II(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    """Tokens per micro-batch."""
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    history_drafts: HistoryDraftsConfig = field(default_factory=HistoryDraftsConfig)


def quantization_of(values: Mapping[str, Any], section: str = "") -> dict[str, str]:
    """The keys that make a rollout compute in fewer bits than the trainer, and their values; empty if it does not.

    values: a flat config whose section of the rollout is `section` (with its dot), or the section's own (`vars(rollout)`).
    """
    names = (f"{section}quantization", f"{section}kv_cache_dtype")
    return {name: values[name] for name in names if values.get(name) is not None}


def own_quantization(values: Mapping[str, Any], section: str = "") -> dict[str, str]:
    """The same of an engine that quantises what is the trainer's; empty of others, such as vLLM."""
    info = ROLLOUT_ENGINES.info(values.get(f"{section}name", RolloutConfig.name))
    return quantization_of(values, section) if info.quantizes else {}


def max_expected_gap(rollout: RolloutConfig) -> float | None:
    """The gap to the trainer's log-probs that is allowed to an engine that quantises what is the trainer's; None of others."""
    return rollout.quantization_max_gap if own_quantization(vars(rollout)) else None


def has_cut_log_probs(rollout: RolloutConfig) -> bool:
    """Whether the rollout's log-probs are of the distribution that top_p, top_k and min_p have cut, unlike the trainer's.

    vLLM computes those of the full distribution only without these filters or at temperature 1, TGI only without them.
    """
    is_filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    info = ROLLOUT_ENGINES.info(rollout.name)
    kind = SERVER_KINDS.get(rollout.server.kind) if info.is_remote else None
    cuts = (kind or info).cuts_log_probs
    is_cut = cuts == "always" or (cuts == "unless_temperature_1" and rollout.temperature != 1)
    return is_cut and rollout.do_sample and is_filtered


@dataclass(frozen=True)
class RefConfig:
    enable: bool | None = None
    """False forbids a reference policy, so that a KL term is an error; otherwise it is loaded if a KL term needs it."""
    strategy: str = II(f"{_ACTOR}.strategy")
    """Engine of the forward pass, as in actor_rollout_ref.actor.strategy."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward of the reference; see `actor.ppo_micro_batch_size_per_gpu`."""
    log_prob_use_dynamic_bsz: bool | None = II(f"{_ACTOR}.use_dynamic_bsz")
    """Fill these micro-batches by tokens; null as for the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt = II(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    """Tokens per micro-batch."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    megatron: RefMcoreEngineConfig = field(default_factory=RefMcoreEngineConfig)
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)
    ulysses_sequence_parallel_size: PositiveInt = II(f"{_ACTOR}.ulysses_sequence_parallel_size")
    """Ranks that split each sequence (Ulysses)."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    hybrid_engine: bool = True
    """Must be true; `trainer.placement` separates actor and rollout."""
    nccl_timeout: PositiveInt = 600
    """Timeout of collective operations in seconds."""
    model: HFModelConfig = field(default_factory=HFModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)
