"""A training job on Ray.

    driver (this process)                          runner: an actor on the same machine        workers: actors anywhere
    joins or starts Ray ─► console, environment ──► TaskRunner.run ─► trainer ────────────────► models
    Ctrl-C ──────────────► stop ──────────────────► after the step
    on_step ◄───────────── metrics.jsonl ◄──────────
                           exit code ◄─────────────

The runner writes directly to the driver's console and has its working directory, modules and environment, so that a job behaves
like one in a single process. The driver only waits, and shuts everything down at the end.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.config.placement import machines_of, needed_models, num_workers, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.observability.console import LogHandler
from lockstep.observability.jsonl import METRICS_FILE, read_metrics
from lockstep.observability.status_file import read_status
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.hang_exit import EXIT_CODE
from lockstep.trainer.run.interrupt import Interrupt, OnStep, stop_on_sigterm
from lockstep.trainer.run.step_profiler import nsys_environment, profile_folder
from lockstep.utils.imports import without_collections
from lockstep.utils.progress import ProgressLog, phase

if TYPE_CHECKING:
    from lockstep.single_controller.environment import ProcessEnvironment
    from lockstep.single_controller.ray_backend.console import DriverConsole
    from lockstep.single_controller.ray_backend.reservation import StartedProcesses

logger = logging.getLogger(__name__)

STOP = {b"s": "the user", b"c": "a callback"}
"""Messages that tell the runner to stop after the step, and who requested it."""
PREEMPT = b"p"
"""Message: SIGTERM has come, with `trainer.preemption_grace_s`."""
TRAINING, STEP = b"t", b"m"
"""Messages: TRAINING tells the driver that training has started, STEP that metrics.jsonl has a new line."""

ENDED = {b"d": 0, b"u": 130, b"h": EXIT_CODE}
"""Message at the end of training -> exit code. Shutting down the workers comes after it, and needs Ray. With EXIT_CODE the runner
was stuck and ends at once; its status.json says why."""

WORKERS = ("lockstep.workers.actor_rollout_ref", "lockstep.workers.critic")
"""Modules that worker processes import before their roles are assigned."""

SHOW_CURSOR = "\x1b[?25h"
"""A killed runner may have left the cursor hidden."""

RESUME = "the run ended early; with trainer.resume_mode=auto the same command resumes from its last checkpoint"

MAX_WORKERS_PER_CORE = 8
"""More CPU workers per core than this are considered a mistake."""

POLL_S = 0.2
"""How often the driver checks for the end of the run and for stop requests."""

PROBE_INTERVAL_S = 2.0
LOST_HEAD_S, LOST_HEAD_AFTER_END_S = 45.0, 5.0
"""How long Ray's head process (GCS) may not answer, during the run and after it; after 60 s Ray ends the program."""


class JobRunner(Protocol):
    """What runs in the controller process; see `TaskRunner` for the attributes."""

    started: dict[str, Any]
    on_end: Callable[[int], None]
    on_step: OnStep | None

    def run(self, config: PPOConfig, interrupt: Interrupt | None = None) -> int: ...


def run_on_ray(
    config: PPOConfig, task_runner_class: "Callable[[], JobRunner] | None" = None, on_step: OnStep | None = None
) -> int:
    """Join or start a cluster and run the job there; see `run_ppo`. `on_step` runs while the next step does."""
    from lockstep.single_controller.ray_backend.cluster import disconnect

    setup, joined = config.ray_init, False
    has_address = bool(setup.address or os.environ.get("RAY_ADDRESS"))
    try:
        if not has_address and not _is_connected():
            _check_one_machine(config)
        with ProgressLog(), phase("connect to Ray"):
            joined = _connect(config)
        with stop_on_sigterm():  # Ray has replaced the handler
            if joined and not has_address:
                _check_this_machine(config)
            _check_machines(config)
            logger.info("starting the controller process and %d workers", num_workers(config))
            return _run(config, task_runner_class, on_step)
    except ValueError as error:
        raise RunError(str(error), exit_code=2) from error
    except OSError as error:  # of Ray's start
        raise RunError(str(error)) from error
    finally:
        disconnect(_timeline_file(config), leave=joined)  # stay connected if the program had joined before


def _timeline_file(config: PPOConfig) -> str | None:
    """Where Ray's timeline is written; a profiled run has one with its profiles."""
    if config.ray_init.timeline_json_file or not config.trainer.profile_steps:
        return config.ray_init.timeline_json_file
    return str(profile_folder(config.global_profiler) / "ray_timeline.json")


def _connect(config: PPOConfig) -> bool:
    """Join or start a cluster; False if the program had joined before. OSError if Ray cannot be started."""
    from lockstep.single_controller.ray_backend.cluster import connect

    setup = config.ray_init
    try:
        return connect(
            num_cpus=setup.num_cpus,
            address=setup.address,
            min_cpus=num_workers(config),
            runtime_env=setup.runtime_env,
        )
    except (SystemExit, KeyboardInterrupt):  # Ray's handler of SIGTERM exits, or calls ours
        signal.alarm(0)  # and sets an alarm that aborts the process after 3 s
        raise KeyboardInterrupt from None
    except ValueError:
        raise
    except Exception as error:  # Ray's start raises plain exceptions too
        reason = " ".join(str(error).split())
        raise OSError(
            f"Ray could not be started on this machine ({reason}); its logs are in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray. "
            "Set ray_init.address to join a running cluster instead"
        ) from error


def _is_connected() -> bool:
    """Whether the program has joined a cluster before."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _check_one_machine(config: PPOConfig) -> None:
    """ValueError if the config asks for more machines than this one; before Ray is started, which takes seconds."""
    pools = config.resource_pool_spec.values()
    machines = max((len(pool) for pool in pools), default=config.trainer.nnodes)
    if machines > 1:
        raise ValueError(
            f"{'resource_pool_spec' if pools else 'trainer.nnodes'} asks for {machines} machines, but there is no cluster: set "
            "ray_init.address (or RAY_ADDRESS) to one started with `ray start`, or use one machine"
        )


def _check_this_machine(config: PPOConfig) -> None:
    """ValueError if this machine is too small for all workers."""
    cores = os.cpu_count() or 1
    if num_workers(config) > MAX_WORKERS_PER_CORE * cores and not _on_gpus(config) and config.ray_init.num_cpus is None:
        raise ValueError(
            f"trainer.n_gpus_per_node asks for {num_workers(config)} workers, but this machine has no GPU and {cores} cores; use "
            f"fewer, or set ray_init.num_cpus={num_workers(config)} to run them anyway"
        )


def _check_machines(config: PPOConfig) -> None:
    """ValueError if the cluster is too small for all workers, or has no GPU for several workers that are not meant for CPU."""
    from lockstep.single_controller.ray_backend.cluster import require_machines
    from lockstep.single_controller.ray_backend.reservation import bundle_of

    if config.trainer.device == "auto" and num_workers(config) > 1 and not _on_gpus(config):
        key = "resource_pool_spec" if config.resource_pool_spec else "trainer.n_gpus_per_node"
        raise ValueError(
            f"{key} asks for {num_workers(config)} GPUs, but Ray sees none: make them visible (`lockstep doctor` shows what torch "
            f"sees), or set trainer.device=cpu to train in {num_workers(config)} CPU processes"
        )
    bundle = bundle_of(_on_gpus(config))
    bundles = [{name: amount * count for name, amount in bundle.items()} for count in machines_of(config)]
    require_machines("", bundles)


def _on_gpus(config: PPOConfig) -> bool:
    from lockstep.single_controller.ray_backend.cluster import has_gpus

    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_gpus())


def _run(config: PPOConfig, task_runner_class: "Callable[[], JobRunner] | None", on_step: OnStep | None) -> int:
    from lockstep.single_controller.environment import ProcessEnvironment
    from lockstep.single_controller.ray_backend.cluster import head_answers, ray, this_machine
    from lockstep.single_controller.ray_backend.console import DriverConsole

    console = DriverConsole()
    # reserve no CPU: the cluster needs only as many as there are workers
    options = {"num_cpus": 0, "scheduling_strategy": this_machine(), "max_restarts": 0}
    options |= nsys_environment(config, "controller")
    runner: Any = (
        ray.remote(Runner).options(**options).remote(console.address, ProcessEnvironment.capture(with_variables=True))
    )
    try:
        outcome = runner.run.remote(config, task_runner_class, _log_format())
        folder = Path(config.trainer.default_local_dir).expanduser()
        steps = on_step and _Steps(on_step, folder)
        return _wait(outcome, console, steps, config.trainer.preemption_grace_s, folder)
    finally:
        if head_answers():
            ray.kill(runner)
        console.close()
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)


class _Steps:
    """Calls `on_step` with the lines of the run's metrics.jsonl that this run writes."""

    def __init__(self, on_step: OnStep, run_dir: Path) -> None:
        self._on_step = on_step
        self._path = run_dir / METRICS_FILE
        self._begin = 0
        self._last = time.time()

    def read(self) -> bool:
        """Call it with the new lines; True if one of the calls returned True."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._begin:  # a restart has dropped lines
            self._begin = 0
        lines, self._begin = read_metrics(self._path, self._begin), size
        stop = False
        for line in lines:
            at, step = line.pop("time"), line.pop("step")
            if at > self._last:
                self._last = at
                stop |= bool(self._on_step(step, line))
        return stop


def _wait(
    outcome: Any,
    console: "DriverConsole",
    steps: _Steps | None = None,
    grace_s: float | None = None,
    folder: Path = Path(),
) -> int:
    """Wait for the runner's `outcome`, forward stop requests to it and its steps to the caller. folder: of the run."""
    from lockstep.single_controller.ray_backend.cluster import ray

    interrupt, stop_sent, preempt_sent, ended, head = None, False, False, None, _HeadWatch()
    with ExitStack() as stack:
        while True:
            received = console.wait(POLL_S)
            ended = next((code for message, code in ENDED.items() if message in received), ended)
            if TRAINING in received and interrupt is None:
                interrupt = stack.enter_context(Interrupt(grace_s))
            if STEP in received and steps is not None and steps.read() and not stop_sent:
                console.send(b"c")
                stop_sent = True
            if interrupt is not None and interrupt.is_preempted and not preempt_sent:  # even after another stop request
                console.send(PREEMPT)
                stop_sent = preempt_sent = True
            if interrupt is not None and interrupt.requested and not stop_sent:
                console.send(b"s")
                stop_sent = True
            if not ray.wait([outcome], timeout=POLL_S if console.ended else 0)[0]:
                silent_s = head.silent_s()
                if ended in (0, 130) and silent_s > LOST_HEAD_AFTER_END_S:
                    logger.warning("Ray's head process died after the end of the run")
                    return ended
                if silent_s > LOST_HEAD_S:
                    raise RunError(f"Ray's head process (GCS) does not answer; {RESUME}")
                continue
            try:
                result = ray.get(outcome)
            except ray.exceptions.RayError as error:
                if ended == EXIT_CODE:
                    raise RunError(str((read_status(folder) or {}).get("reason")), EXIT_CODE) from error
                reason = " ".join(str(error).split()).split(" Some common causes include")[0]
                raise RunError(f"the controller process died. Ray says: {reason.rstrip('.')}; {RESUME}") from error
            if steps is not None:
                steps.read()
            if isinstance(result, RunError):
                raise result
            return int(result)


class _HeadWatch:
    """How long Ray's head process has not answered."""

    def __init__(self) -> None:
        self._answered = self._probed = time.monotonic()

    def silent_s(self) -> float:
        from lockstep.single_controller.ray_backend.cluster import head_answers

        now = time.monotonic()
        if now - self._probed >= PROBE_INTERVAL_S:
            self._probed = now
            if head_answers():
                self._answered = now
        return self._probed - self._answered


def _log_format() -> tuple[int, logging.Formatter | None]:
    """Level and format of the console's log lines."""
    root = logging.getLogger()
    on_console = [handler for handler in root.handlers if type(handler) in (logging.StreamHandler, LogHandler)]
    return root.level, on_console[0].formatter if on_console else None


def _start_workers(config: PPOConfig) -> "dict[str, StartedProcesses]":
    """Start the processes of every pool, so that their imports run in parallel with the controller's."""
    from lockstep.single_controller.ray_backend.reservation import start_early

    spec = pools_of(config, needed_models(config)).spec
    return {
        pool: start_early(pool, machines, _on_gpus(config), WORKERS, **nsys_environment(config, "worker"))
        for pool, machines in spec.items()
    }


class Runner:
    """The Ray actor: runs a TaskRunner with the driver's console and environment."""

    def __init__(self, console_address: str, environment: "ProcessEnvironment") -> None:
        from lockstep.single_controller.ray_backend.console import RemoteConsole

        environment.apply()
        self._console = RemoteConsole(console_address, on_message=self._on_message)
        self._interrupt = ForwardedInterrupt(on_enter=lambda: self._console.send(TRAINING))

    def _on_message(self, message: bytes) -> None:
        if PREEMPT in message:
            self._interrupt.preempt()
        for stop, by in STOP.items():
            if stop in message:
                self._interrupt.stop(by)

    def _on_end(self, exit_code: int) -> None:
        self._console.send(next(message for message, code in ENDED.items() if code == exit_code))

    def _on_step(self, step: int, metrics: dict[str, Any]) -> bool:
        self._console.send(STEP)
        return False

    def run(
        self,
        config: PPOConfig,
        task_runner_class: "Callable[[], JobRunner] | None",
        log_format: tuple[int, logging.Formatter | None],
    ) -> int | RunError:
        """The exit code, or the error; the traceback of an unexpected one has been printed to the console."""
        self._log_to_console(*log_format)
        try:
            started = {} if task_runner_class else _start_workers(config)
            logger.info("loading torch and transformers")
            with ProgressLog(), phase("load torch and transformers"), without_collections():
                from lockstep.trainer.ppo.task_runner import TaskRunner

            runner: JobRunner = (task_runner_class or TaskRunner)()
            runner.started = started
            runner.on_end = self._on_end
            runner.on_step = self._on_step
            self._interrupt.grace_s = config.trainer.preemption_grace_s
            return runner.run(config, self._interrupt)
        except RunError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the end of the program
            traceback.print_exc()
            return RunError(f"unexpected {type(error).__name__} in the controller; its traceback is above")
        finally:
            self._console.close()

    def _log_to_console(self, level: int, formatter: logging.Formatter | None) -> None:
        root = logging.getLogger()
        root.handlers.clear()
        root.setLevel(level)
        if formatter is not None:
            handler = LogHandler()
            handler.setFormatter(formatter)
            root.addHandler(handler)


class ForwardedInterrupt(Interrupt):
    """Stop requests forwarded by the driver, which receives the signals. on_enter: called when training starts."""

    def __init__(self, on_enter: Any) -> None:
        super().__init__()
        self._on_enter = on_enter

    def __enter__(self) -> "ForwardedInterrupt":
        self._on_enter()
        return self
