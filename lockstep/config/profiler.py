"""`global_profiler.*` and the `profiler` section of each role: how the steps of `trainer.profile_steps` are profiled."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.config.bounds import PositiveInt

Tool = Literal["torch", "nsys", "torch_memory"]


@dataclass(frozen=True)
class ProfilerConfig:
    """Which ranks are profiled in the steps of `trainer.profile_steps`."""

    enable: bool = True
    """Profile this role. Roles that share a process share its profile, which has all of them if it has one."""
    all_ranks: bool = False
    """Profile every rank."""
    ranks: list[int] = field(default_factory=list)
    """Profile these ranks; empty is rank 0. Not used with `all_ranks`."""


@dataclass(frozen=True)
class TorchToolConfig:
    contents: list[Literal["cpu", "cuda", "memory", "shapes", "stack"]] = field(default_factory=list)
    """What traces contain: host operations (cpu), kernels (cuda), allocations, input shapes, source lines. Without cpu and cuda:
    both, as far as the device has them."""
    discrete: bool = False
    """Write one trace per call of a worker (`generate_sequences`, `update_actor`, ...) instead of one per process."""


def _nsight_options() -> dict[str, Any]:
    return {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": True, "cuda-graph-trace": "graph"}


def _worker_nsight_options() -> dict[str, Any]:
    return _nsight_options() | {"capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}


@dataclass(frozen=True)
class NsysToolConfig:
    discrete: bool = False
    """Capture each call of a worker by itself instead of the whole step."""
    controller_nsight_options: dict[str, Any] = field(default_factory=_nsight_options)
    """Options of `nsys profile` for the controller process on Ray, over the default ones; those set to null are left out."""
    worker_nsight_options: dict[str, Any] = field(default_factory=_worker_nsight_options)
    """The same for the worker processes. A `capture-range-end` of null is `repeat`: one report per profiled step."""


@dataclass(frozen=True)
class TorchMemoryToolConfig:
    trace_alloc_max_entries: PositiveInt = 100000
    """Allocations and frees that a snapshot holds, the last ones."""
    context: Literal["state", "alloc", "all"] | None = "all"
    """Which of them have a stack trace: all, allocations only, or only those still alive; null is none."""
    stacks: Literal["all", "python"] = "all"
    """Stack frames: Python and C++, or Python only."""


@dataclass(frozen=True)
class ToolsConfig:
    nsys: NsysToolConfig = field(default_factory=NsysToolConfig)
    torch: TorchToolConfig = field(default_factory=TorchToolConfig)
    torch_memory: TorchMemoryToolConfig = field(default_factory=TorchMemoryToolConfig)


@dataclass(frozen=True)
class GlobalProfilerConfig:
    tool: Tool | None = None
    """torch: traces of torch.profiler; nsys: ranges for Nsight Systems; torch_memory: snapshots of CUDA memory. null is torch."""
    profile_continuous_steps: bool = False
    """Profile consecutive steps as one."""
    save_path: str = "${trainer.default_local_dir}/profile"
    """Folder of the profiles, in one folder per step."""
    global_tool_config: ToolsConfig = field(default_factory=ToolsConfig)
