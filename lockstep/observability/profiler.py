"""The profile of one process: a tool records, and each span (`utils.spans`) is a range in what it records.

    start_profile(request, "actor_rollout+ref_rank0") ─► the tool begins; spans are marked
    stop_profile()                                    ─► its files, in the request's folder

torch         {process}.json.gz      a Chrome trace; with `discrete` one per call of a worker: {role}_rank{n}_{method}.json.gz
torch_memory  {process}.pickle       allocations and frees with their stack traces
nsys          none: the process runs under `nsys`, which captures between cudaProfilerStart and cudaProfilerStop
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.config.profiler import NsysToolConfig, Tool, ToolsConfig, TorchMemoryToolConfig, TorchToolConfig
from lockstep.utils.spans import Track, set_marker


@dataclass(frozen=True)
class ProfileRequest:
    """What the processes of a run record during one step or several.

    folder:   where files are written.
    ranks:    the ranks of each role that are profiled; None is all.
    discrete: record each call of a worker by itself.
    """

    tool: Tool
    options: ToolsConfig
    folder: str
    ranks: dict[str, list[int] | None]
    discrete: bool = False

    def selects(self, role: str, rank: int) -> bool:
        ranks = self.ranks.get(role, [])
        return ranks is None or rank in ranks


class Recorder(Protocol):
    """A tool in this process."""

    def begin(self) -> None: ...

    def end(self, stem: Path) -> list[Path]:
        """End the recording and write its files, named after `stem`; returns them."""

    def range(self, name: str) -> AbstractContextManager[Any] | None:
        """A named range in the recording."""


class TorchTrace:
    """torch.profiler."""

    def __init__(self, config: TorchToolConfig) -> None:
        self._contents = set(config.contents)

    def begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else Kineto prints a line at each begin and end
        asked = self._contents & {"cpu", "cuda"} or {"cpu", "cuda"}
        available = {"cpu": ProfilerActivity.CPU}
        if torch.cuda.is_available():
            available["cuda"] = ProfilerActivity.CUDA
        self._profile = profile(
            activities=[activity for name, activity in available.items() if name in asked],
            profile_memory="memory" in self._contents,
            record_shapes="shapes" in self._contents,
            with_stack="stack" in self._contents,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # a local rollout runs in its own thread
        )
        self._profile.start()

    def end(self, stem: Path) -> list[Path]:
        self._profile.stop()
        file = stem.with_name(f"{stem.name}.json.gz")
        self._profile.export_chrome_trace(str(file))
        return [file]

    def range(self, name: str) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(name)


class NsysRanges:
    """Capture ranges and NVTX ranges for the `nsys` that this process runs under."""

    def __init__(self, config: NsysToolConfig) -> None:
        pass

    def begin(self) -> None:
        import torch

        if torch.cuda.is_initialized():  # not in a controller without workers, which nsys captures as a whole
            torch.cuda.synchronize()
            torch.cuda.profiler.start()

    def end(self, stem: Path) -> list[Path]:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        return []

    def range(self, name: str) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.nvtx.range(name)


class MemoryHistory:
    """Snapshots of torch's CUDA allocator."""

    def __init__(self, config: TorchMemoryToolConfig) -> None:
        self._config = config

    def begin(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(
                context=self._config.context,
                stacks=self._config.stacks,
                max_entries=self._config.trace_alloc_max_entries,
                clear_history=True,
            )

    def end(self, stem: Path) -> list[Path]:
        import torch

        if not torch.cuda.is_initialized():
            return []
        file = stem.with_name(f"{stem.name}.pickle")
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
        return [file]

    def range(self, name: str) -> None:
        return None


def make_recorder(tool: Tool, options: ToolsConfig) -> Recorder:
    if tool == "torch":
        return TorchTrace(options.torch)
    return NsysRanges(options.nsys) if tool == "nsys" else MemoryHistory(options.torch_memory)


class Profile:
    """A tool at work in this process; a Marker of spans.

    process: the process in file names.
    """

    def __init__(self, request: ProfileRequest, process: str) -> None:
        self._request, self._process = request, process
        self._recorder = make_recorder(request.tool, request.options)
        self._files: list[Path] = []
        self._is_recording = False
        self._folder = Path(request.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not request.discrete:
            self._begin()

    def mark(self, name: str, track: Track, is_call: bool) -> AbstractContextManager[None] | None:
        role, rank = track
        if is_call and not self._is_recording and self._request.discrete and self._request.selects(role, rank):
            return self._call(name, f"{role}_rank{rank}_{name}")
        return self._recorder.range(f"{role}.{name}" if is_call else name) if self._is_recording else None

    @contextmanager
    def _call(self, name: str, stem: str) -> Iterator[None]:
        """Record one call of a worker."""
        self._begin()
        try:
            with self._recorder.range(name) or nullcontext():
                yield
        finally:
            self._end(stem)

    def _begin(self) -> None:
        self._recorder.begin()
        self._is_recording = True

    def _end(self, stem: str) -> None:
        self._is_recording = False
        number = 2
        earlier = {file.name.partition(".")[0] for file in self._files}
        unique = stem
        while unique in earlier:
            unique, number = f"{stem}_{number}", number + 1
        self._files += self._recorder.end(self._folder / unique)

    def stop(self) -> list[str]:
        """The files that were written."""
        if self._is_recording:
            self._end(self._process)
        return [str(file) for file in self._files]


_profile: Profile | None = None


def start_profile(request: ProfileRequest, process: str) -> None:
    """Profile this process; no-op if it is being profiled, as one that runs a worker and the controller is."""
    global _profile
    if _profile is None:
        _profile = Profile(request, process)
        set_marker(_profile)


def stop_profile() -> list[str]:
    """The files that were written; none if this process is not being profiled."""
    global _profile
    stopped, _profile = _profile, None
    set_marker(None)
    return stopped.stop() if stopped is not None else []
