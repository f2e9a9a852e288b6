"""A training job on Ray.

    driver (this process)                          runner: an actor on the same machine        workers: actors anywhere
    joins or starts Ray ─► console, surroundings ─► TaskRunner.run ─► trainer ────────────────► models
    Ctrl-C ──────────────► stop ──────────────────► after the step
                           exit code ◄─────────────

The runner writes to the driver's console itself and sees its working directory, modules and environment, so that a job looks
the same as one in a single process. The driver only waits, and takes everything down at the end.
"""

import logging
import os
import sys
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lockstep.config.placement import machines_of, num_workers, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.interrupt import Interrupt

if TYPE_CHECKING:
    from lockstep.single_controller.ray_backend.console import DriverConsole
    from lockstep.single_controller.ray_backend.reservation import Started
    from lockstep.single_controller.ray_backend.surroundings import Surroundings
    from lockstep.trainer.ppo.task_runner import TaskRunner

logger = logging.getLogger(__name__)

STOP, TRAINING = b"s", b"t"
"""Messages: to the runner, that it should stop after the step; to the driver, that there is a step to wait for."""

WORKERS = ("lockstep.workers.actor_rollout_ref", "lockstep.workers.critic")
"""What worker processes import while they wait for their roles."""

SHOW_CURSOR = "\x1b[?25h"
"""A runner that was ended in the middle may have left the terminal without one."""

MOST_PER_CORE = 8
"""CPU workers on a core of this machine, beyond which more are taken for a mistake."""

LOOK_S = 0.2
"""How often the driver looks whether the run has ended or the user wants it to."""


def run_on_ray(config: PPOConfig, task_runner_class: "type[TaskRunner] | None" = None) -> int:
    """Join or start a cluster and run the job there; returns its exit code."""
    from lockstep.single_controller.ray_backend.cluster import connect, disconnect

    setup, joined = config.ray_init, False
    try:
        joined = connect(
            num_cpus=setup.num_cpus,
            address=setup.address,
            min_cpus=num_workers(config),
            runtime_env=setup.runtime_env,
        )
        if joined and not (setup.address or os.environ.get("RAY_ADDRESS")):
            _check_this_machine(config)
        _check_machines(config)
        return _run(config, task_runner_class)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        disconnect(setup.timeline_json_file, leave=joined)  # not a cluster that the program had joined before


def _check_this_machine(config: PPOConfig) -> None:
    """ValueError where a cluster of this machine alone is not what the user can have meant."""
    pools, cores = config.resource_pool_spec.values(), os.cpu_count() or 1
    machines = max((len(pool) for pool in pools), default=config.trainer.nnodes)
    if machines > 1:
        raise ValueError(
            f"{'resource_pool_spec' if pools else 'trainer.nnodes'} asks for {machines} machines, and no cluster is joined: set "
            "ray_init.address (or RAY_ADDRESS) to one that `ray start` made, or ask for one machine"
        )
    if num_workers(config) > MOST_PER_CORE * cores and not _on_gpus(config) and config.ray_init.num_cpus is None:
        raise ValueError(
            f"trainer.n_gpus_per_node asks for {num_workers(config)} workers, and this machine has no GPU and {cores} cores; ask "
            f"for fewer, or set ray_init.num_cpus={num_workers(config)} if it is meant"
        )


def _check_machines(config: PPOConfig) -> None:
    """ValueError where the cluster is too small for all workers together."""
    from lockstep.single_controller.ray_backend.cluster import require_machines
    from lockstep.single_controller.ray_backend.reservation import bundle_of

    if config.trainer.device == "auto" and not _on_gpus(config):
        logger.info("the cluster has no GPU: %d workers train on CPU", num_workers(config))
    bundle = bundle_of(_on_gpus(config))
    asked = [{name: amount * count for name, amount in bundle.items()} for count in machines_of(config)]
    require_machines("", asked)


def _on_gpus(config: PPOConfig) -> bool:
    from lockstep.single_controller.ray_backend.cluster import has_gpus

    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_gpus())


def _run(config: PPOConfig, task_runner_class: "type[TaskRunner] | None") -> int:
    from lockstep.single_controller.ray_backend.cluster import ray, this_machine
    from lockstep.single_controller.ray_backend.console import DriverConsole
    from lockstep.single_controller.ray_backend.surroundings import Surroundings

    console = DriverConsole()
    # without a share of the CPUs, so that the cluster need not be larger than its workers
    options = {"num_cpus": 0, "scheduling_strategy": this_machine(), "max_restarts": 0}
    runner: Any = (
        ray.remote(Runner).options(**options).remote(console.address, Surroundings.here(with_environment=True))
    )
    try:
        return _wait(runner.run.remote(config, task_runner_class, _log_format()), console)
    finally:
        ray.kill(runner)
        console.close()
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)


def _wait(exit_code: Any, console: "DriverConsole") -> int:
    """Wait for the runner, and tell it when the user wants to stop."""
    from lockstep.single_controller.ray_backend.cluster import ray

    interrupt, is_told = None, False
    with ExitStack() as noting:
        while True:
            if TRAINING in console.wait(LOOK_S) and interrupt is None:
                interrupt = noting.enter_context(Interrupt())
            if interrupt is not None and interrupt.requested and not is_told:
                console.send(STOP)
                is_told = True
            if not ray.wait([exit_code], timeout=LOOK_S if console.ended else 0)[0]:
                continue
            try:
                return int(ray.get(exit_code))
            except ray.exceptions.RayActorError as error:
                reason = " ".join(str(error).split()).split(" Some common causes include")[0]
                sys.stderr.write(f"error: the controller's process died. Ray says: {reason}\n")
                sys.stderr.write(
                    "the run has ended early; with trainer.resume_mode=auto the same command goes on from its last checkpoint\n"
                )
                return 1


def _log_format() -> tuple[int, logging.Formatter | None]:
    """Level and format of the log lines that reach the console."""
    root = logging.getLogger()
    on_console = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    return root.level, on_console[0].formatter if on_console else None


def _start_workers(config: PPOConfig) -> "dict[str, Started]":
    """The processes of every pool, which import while the controller does; called before it imports much itself."""
    from lockstep.single_controller.ray_backend.reservation import start_early

    models = ["rm"] if config.reward_model.enable else []
    if config.resource_pool_spec or config.trainer.placement != "colocate":  # the others change the pools too
        from lockstep.trainer.ppo.roles import needed_models

        models = needed_models(config)
    spec = pools_of(config, models).spec
    return {pool: start_early(pool, machines, _on_gpus(config), WORKERS) for pool, machines in spec.items()}


class Runner:
    """The actor: a TaskRunner with the console and the surroundings of the driver."""

    def __init__(self, console_address: str, surroundings: "Surroundings") -> None:
        from lockstep.single_controller.ray_backend.console import BorrowedConsole

        surroundings.adopt()
        self._console = BorrowedConsole(console_address, on_message=self._note)
        self._interrupt = ForwardedInterrupt(on_enter=lambda: self._console.send(TRAINING))

    def _note(self, message: bytes) -> None:
        self._interrupt.requested |= STOP in message

    def run(
        self,
        config: PPOConfig,
        task_runner_class: "type[TaskRunner] | None",
        log_format: tuple[int, logging.Formatter | None],
    ) -> int:
        """The exit code; what went wrong has been said on the console."""
        self._log_to_console(*log_format)
        try:
            started = {} if task_runner_class else _start_workers(config)
            from lockstep.trainer.ppo.task_runner import TaskRunner

            runner = (task_runner_class or TaskRunner)()
            runner.started = started
            return runner.run(config, self._interrupt)
        except Exception:  # noqa: BLE001 - the end of the program
            traceback.print_exc()
            return 1
        finally:
            self._console.close()

    def _log_to_console(self, level: int, formatter: logging.Formatter | None) -> None:
        root = logging.getLogger()
        root.handlers.clear()
        root.setLevel(level)
        if formatter is not None:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(formatter)
            root.addHandler(handler)


class ForwardedInterrupt(Interrupt):
    """A wish to stop that comes from the driver, which catches the signals. on_enter: called when there is something to stop."""

    def __init__(self, on_enter: Any) -> None:
        super().__init__()
        self._on_enter = on_enter

    def __enter__(self) -> "ForwardedInterrupt":
        self._on_enter()
        return self

    def __exit__(self, *exc: object) -> None:
        pass
