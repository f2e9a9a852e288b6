"""verl.utils.profiler.profile: profiles of a program's own worker class.

    class MyWorker(Worker, DistProfilerExtension):
        def __init__(self, config):
            Worker.__init__(self)
            DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank, config=ProfilerConfig(...), save_path=...))

        @DistProfiler.annotate(color="red", role="update")     a range of this name in the profile
        def update(self, data): ...

`group.start_profile()` and `group.stop_profile()` record all ranks that the config selects. Runs of Lockstep's trainer are profiled
by the keys `trainer.profile_steps` and `global_profiler`.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config.profiler import ProfilerConfig as ProfilerConfig, ToolsConfig
from lockstep.observability.profiler import Recorder, make_recorder
from lockstep.single_controller.dispatch import Dispatch, register


class DistProfiler:
    """The profile of one rank.

    config:      which ranks are recorded; None is no rank.
    tool:        torch (a Chrome trace), nsys (ranges; the process runs under nsys) or torch_memory (a snapshot of CUDA memory).
    tool_config: options of the tools; None is their defaults.
    save_path:   folder of the files, named after the rank.
    """

    _recording: "Recorder | None" = None
    """The recorder of this process."""

    def __init__(
        self,
        rank: int,
        config: Any = None,
        tool_config: Any = None,
        tool: str | None = None,
        save_path: str | None = None,
        **unused: Any,
    ) -> None:
        self.rank = rank
        self.tool: Any = tool or getattr(config, "tool", None) or "torch"
        self.save_path = save_path or getattr(config, "save_path", None) or "outputs/profile"
        ranks = list(getattr(config, "ranks", None) or [0])
        is_selected = bool(getattr(config, "all_ranks", False)) or rank in ranks
        self.is_enabled = config is not None and bool(getattr(config, "enable", False)) and is_selected
        self._options = tool_config if isinstance(tool_config, ToolsConfig) else ToolsConfig()

    def start(self, **unused: Any) -> None:
        """Record from here on; no-op if this rank is not selected or records already."""
        if self.is_enabled and DistProfiler._recording is None:
            DistProfiler._recording = make_recorder(self.tool, self._options)
            DistProfiler._recording.begin()

    def stop(self) -> list[str]:
        """End the recording; the files that were written."""
        recorder, DistProfiler._recording = DistProfiler._recording, None
        if recorder is None or not self.is_enabled:
            return []
        folder = Path(self.save_path)
        folder.mkdir(parents=True, exist_ok=True)
        return [str(file) for file in recorder.end(folder / f"rank{self.rank}")]

    @staticmethod
    def annotate(
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        role: str | None = None,
        **unused: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: calls are ranges in the profile, named `message`, else `role`, else as the function."""

        def mark(function: Callable[..., Any]) -> Callable[..., Any]:
            name = message or role or function.__name__

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                recorder = DistProfiler._recording
                span = None if recorder is None else recorder.range(name)
                if span is None:
                    return function(*args, **kwargs)
                with span:
                    return function(*args, **kwargs)

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                recorder = DistProfiler._recording
                span = None if recorder is None else recorder.range(name)
                if span is None:
                    return await function(*args, **kwargs)
                with span:
                    return await function(*args, **kwargs)

            return call_async if inspect.iscoroutinefunction(function) else call

        return mark


class DistProfilerExtension:
    """Gives a worker `start_profile` and `stop_profile`, which its group calls on all ranks."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> list[str]:
        """The files that this rank wrote."""
        return self.profiler.stop()
