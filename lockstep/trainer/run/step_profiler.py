"""The timeline of every step, and the profiles of those in `trainer.profile_steps`, on the controller and its workers.

with profiler.step(3):      if step 3 is to be profiled, all processes record, and write to profile/step_3/
    ...                     its spans are appended to timeline.jsonl
save_checkpoint             what follows is appended as part of step 3 when step 4 begins or the run ends
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from lockstep.config.ppo import PPOConfig
from lockstep.config.profiler import GlobalProfilerConfig, ProfilerConfig, Tool
from lockstep.config.roles import sections_of
from lockstep.config.sft import SupervisedConfig
from lockstep.observability.profiler import ProfileRequest, start_profile, stop_profile
from lockstep.observability.timeline import Steps, TimelineFile, write_chrome_trace
from lockstep.utils.progress import phase
from lockstep.utils.spans import Span, set_track, take_spans

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
"""Role of a process that drives worker groups."""

MAX_NAMES = 3
"""Files that are named when a profile has been written; of more, the number."""

HOW_TO_OPEN: dict[Tool, str] = {
    "torch": "open the .json.gz files at https://ui.perfetto.dev or chrome://tracing",
    "torch_memory": "open the .pickle files at https://pytorch.org/memory_viz",
    "nsys": "nsys writes its reports when the processes end, with Ray to the folder nsys next to it; open them with nsys-ui",
}


class StepProfiler:
    """Profiles a process that runs a training loop: a controller with `groups` of workers, or one of several ranks.

    roles:      which ranks of each role are profiled.
    num_steps:  of the run.
    role, rank: of this process.
    """

    def __init__(
        self,
        config: PPOConfig | SupervisedConfig,
        roles: Mapping[str, ProfilerConfig],
        num_steps: int,
        device: str,
        role: str = CONTROLLER,
        rank: int = 0,
    ) -> None:
        self._config = config.global_profiler
        self._steps = frozenset(config.trainer.profile_steps)
        self._tool: Tool = self._config.tool or "torch"
        self._roles, self._role, self._rank = roles, role, rank
        self._groups: Sequence[Any] = ()
        self._timeline: TimelineFile | None = None
        self._step = 0
        self._profiled: Steps = {}
        """Steps of the running profile, with their spans."""
        self._folder: Path | None = None
        """Where the running profile is written."""
        self._check(num_steps, device)

    def _check(self, num_steps: int, device: str) -> None:
        """ValueError if a step does not exist or the tool cannot record on this device."""
        beyond = sorted(step for step in self._steps if step > num_steps)
        if beyond and num_steps:  # 0 with trainer.val_only
            raise ValueError(f"trainer.profile_steps={beyond}: the run has {num_steps} steps; set some of those")
        if self._steps and self._tool != "torch" and not device.startswith("cuda"):
            raise ValueError(
                f"global_profiler.tool={self._tool}: needs a CUDA device, but the run is on {device}; set "
                "global_profiler.tool=torch (with global_profiler.global_tool_config.torch.contents=[cpu,memory] for memory)"
            )

    def start(self, run_dir: Path | None, step: int, groups: Sequence[Any] = ()) -> "StepProfiler":
        """Begin after `step`. run_dir: where the timeline is written; None writes none. groups: each worker process in one."""
        self._groups, self._step = groups, step
        set_track(self._role, self._rank)
        self._take_spans()  # of loading
        self._timeline = None if run_dir is None else TimelineFile(run_dir, step)
        return self

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Write what followed the last step; after an error without the workers, which may be dead."""
        if kind is not None:
            self._groups = ()
        self._append_rest()
        self._stop_profile()
        set_track(CONTROLLER, 0)
        if self._timeline is not None:
            self._timeline.close()
            self._timeline = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The block is a step."""
        self._append_rest()
        self._step = step
        if step in self._steps and self._folder is None:
            self._start_profile(step)
        yield
        spans = self._take_spans()
        self._append(spans)
        if self._folder is not None:
            self._profiled[step] = spans
        if not (self._config.profile_continuous_steps and step + 1 in self._steps):
            self._stop_profile()

    def _append_rest(self) -> None:
        """What followed the last step, such as saving; workers are not asked if nothing did."""
        if own := take_spans():
            self._append([*own, *self._take_spans()])

    def _append(self, spans: list[Span]) -> None:
        if self._timeline is not None:
            self._timeline.append(self._step, spans)

    def _take_spans(self) -> list[Span]:
        of_workers = (span for group in self._groups for spans in group.take_spans() for span in spans)
        return [*take_spans(), *of_workers]

    def _start_profile(self, step: int) -> None:
        last = step
        while self._config.profile_continuous_steps and last + 1 in self._steps:
            last += 1
        folder = profile_folder(self._config) / (f"step_{step}" if last == step else f"steps_{step}-{last}")
        tools = self._config.global_tool_config
        is_discrete = {"torch": tools.torch.discrete, "nsys": tools.nsys.discrete}
        request = ProfileRequest(
            self._tool,
            tools,
            str(folder),
            {role: _ranks(section) for role, section in self._roles.items()},
            discrete=self._role == CONTROLLER and is_discrete.get(self._tool, False),
        )
        for group in self._groups:
            group.start_profile(request)
        if self._role == CONTROLLER or request.selects(self._role, self._rank):
            process = self._role if self._role == CONTROLLER else f"{self._role}_rank{self._rank}"
            start_profile(request, process)  # no-op if its worker runs here
        self._folder = folder

    def _stop_profile(self) -> None:
        folder, self._folder = self._folder, None
        profiled, self._profiled = self._profiled, {}
        if folder is None:
            return
        with phase("write the profile"):
            files = [file for group in self._groups for of_rank in group.stop_profile() for file in of_rank]
            files += stop_profile()
            if self._timeline is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
            write_chrome_trace(profiled, folder / "timeline.json")
        names = [Path(file).name for file in files]
        shown = ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} files"
        logger.info(
            "profiled %s: %s in %s; %s",
            folder.name.replace("_", " "),
            shown or "timeline.json",
            folder,
            HOW_TO_OPEN[self._tool],
        )


def _ranks(config: ProfilerConfig) -> list[int] | None:
    """None is all."""
    if not config.enable:
        return []
    return None if config.all_ranks else config.ranks or [0]


def profile_folder(config: GlobalProfilerConfig) -> Path:
    return Path(config.save_path).expanduser().absolute()


def profiled_roles(config: PPOConfig, roles: Iterable[str]) -> dict[str, ProfilerConfig]:
    """The `profiler` section of each role; actor and rollout have one."""
    return {role: attrgetter(f"{sections_of(role).role}.profiler")(config) for role in roles}


def nsys_environment(config: PPOConfig, of: Literal["controller", "worker"]) -> dict[str, Any]:
    """Options of Ray actors that run under `nsys profile`, with the folder of their reports; empty if nsys is not asked for."""
    if not config.trainer.profile_steps or config.global_profiler.tool != "nsys":
        return {}
    nsys = config.global_profiler.global_tool_config.nsys
    folder = profile_folder(config.global_profiler) / "nsys"
    folder.mkdir(parents=True, exist_ok=True)
    options = nsys.controller_nsight_options if of == "controller" else nsys.worker_nsight_options
    if of == "worker" and options.get("capture-range-end") is None:
        options = options | {"capture-range-end": "repeat"}
    given = {name: nsys_value(value) for name, value in options.items() if value is not None}
    return {"runtime_env": {"nsight": given | {"o": f"{folder}/controller" if of == "controller" else str(folder)}}}


def nsys_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
