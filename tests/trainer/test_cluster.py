"""Training jobs on Ray: console, Ctrl-C, dead workers and machines, cleanup."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.observability.timeline import read_steps
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run.checkpoint import verify
from lockstep.trainer.run.ray_runner import _check_one_machine, _check_this_machine

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

pytestmark = pytest.mark.first

MARK = "LOCKSTEP_TEST_MARK"
"""Environment variable that marks every process of a test."""

LIMIT_S = 180.0

ENDLESS = ["trainer.total_epochs=500"]


def environment(mark: str) -> dict[str, str]:
    """Only loopback, without the user's Ray settings; one thread per process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    soon = {"RAY_health_check_period_ms": "500"}  # a machine that does not answer five times is dead
    return inherited | quiet | soon | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", MARK: mark}


def processes(mark: str) -> dict[int, str]:
    """Process id to command line of the marked processes."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return {pid: line for pid, line in found.items() if line and pid != os.getpid()}


def until(is_true: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    end = time.monotonic() + limit_s
    while not (value := is_true()):
        assert time.monotonic() < end, f"waited {limit_s} s for {what}"
        time.sleep(0.05)
    return value


class Run:
    """`lockstep ppo` in a separate process, with its output in files."""

    def __init__(self, folder: Path, overrides: list[str], mark: str, **variables: str) -> None:
        self.folder = folder
        self.paths = [folder / "stdout.txt", folder / "stderr.txt"]
        with open(self.paths[0], "w") as out, open(self.paths[1], "w") as err:
            command = [sys.executable, "-m", "lockstep.trainer.main_ppo", *overrides]
            env = environment(mark) | {"PYTHONPATH": os.getcwd()} | variables
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, env=env)

    @property
    def stdout(self) -> str:
        return self.paths[0].read_text()

    @property
    def stderr(self) -> str:
        return self.paths[1].read_text()

    def after_step(self, step: int) -> None:
        """Wait until the step's line is printed."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.stdout + self.stderr
            return f"step {step}/" in self.stdout

        until(is_there, f"step {step}")

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()


@pytest.fixture
def small_run(overrides: list[str]) -> list[str]:
    """With a checkpoint every second step."""
    more = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=2"]
    return [*overrides, "trainer.val_before_train=false", *more]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(run_dir: Path, other: Path, steps: int) -> None:
    ours, theirs = metrics_of(run_dir), metrics_of(other)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, steps + 1))
    for row, expected in zip(ours, theirs):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/entropy"):
            assert row[name] == pytest.approx(expected[name], abs=1e-5), (row["step"], name)
    model = Path(f"global_step_{steps}/actor/huggingface/model.safetensors")
    weights, expected_weights = load_file(run_dir / model), load_file(other / model)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_job_behaves_like_a_local_run(small_run: list[str], tmp_path: Path) -> None:
    """Relative paths, modules of the working directory, a plain console, a dead worker, Ctrl-C; no process is left."""
    mark = tmp_path.name
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    print('scored', flush=True)\n"
        "    return len(set(solution_str)) / 10\n"
    )
    ours = ["custom_reward_function.path=mine.py", "custom_reward_function.name=score", "trainer.n_gpus_per_node=2"]
    ours += ["trainer.default_local_dir=run", "ray_init.timeline_json_file=timeline.json", "trainer.max_restarts=1"]
    ours += ["trainer.profile_steps=[1]", "actor_rollout_ref.actor.profiler.ranks=[1]"]
    run = Run(tmp_path, [*small_run, *ENDLESS, *ours, "trainer.save_freq=1000"], mark)
    run.after_step(1)
    assert "INFO lockstep.trainer.ppo.run_summary: grpo: 4 prompts x 4 samples per step" in run.stderr
    os.kill(next(pid for pid, line in processes(mark).items() if line.startswith("ray::WorkerHost")), signal.SIGKILL)
    until(lambda: run.stdout.count("step 1/") == 2, "the restart to come to step 1 again")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.stderr
    until(lambda: not processes(mark), "the run's processes to be gone", 10)
    assert (
        "WARNING lockstep.trainer.run.restarts: the worker's process died: worker group 'actor_rollout'" in run.stderr
    )
    assert "\nerror: " not in run.stderr
    assert "restarting the workers from the start of the run (0 restarts left)" in run.stderr
    assert "press Ctrl-C again" in run.stderr and "stopped by the user after step" in run.stderr
    assert "scored" in run.stderr.splitlines()
    lines = run.stdout + run.stderr
    # messages of a worker that lost its peer are printed with its pid
    assert "Runner pid=" not in lines and "(raylet)" not in lines and "\x1b" not in run.stdout
    steps = [row["step"] for row in metrics_of(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert verify(tmp_path / "run" / f"global_step_{steps[-1]}").step == steps[-1]
    assert any(event["name"].endswith("call") for event in json.loads((tmp_path / "timeline.json").read_text()))
    profiled = sorted(path.name for path in (tmp_path / "run" / "profile" / "step_1").iterdir())
    assert profiled == ["actor_rollout_rank1.json.gz", "controller.json.gz", "timeline.json"]
    timeline = read_steps(tmp_path / "run")
    assert list(timeline) == steps
    for spans in timeline.values():
        (whole,) = [span for span in spans if span.name == "step"]
        names = ("generate_sequences", "update_actor")
        calls = [span for span in spans if span.role == "actor_rollout" and span.name in names]
        assert sorted(span.rank for span in calls) == [0, 0, 1, 1]
        assert all(whole.begin_us <= span.begin_us <= span.end_us <= whole.end_us for span in calls)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of three machines with one CPU each; the first is the driver's."""
    from ray.cluster_utils import Cluster

    mark = tmp_path_factory.mktemp("machines").name
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(mark).items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        small = {"num_cpus": 1, "object_store_memory": 128 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(**small)
        cluster.mark = mark
        yield cluster
        cluster.shutdown()
    until(lambda: not processes(mark), "the cluster's processes to end", 20)


def actors(cluster: Any) -> list[int]:
    """Process ids of the actors on the cluster."""
    return [pid for pid, line in processes(cluster.mark).items() if line.startswith(("ray::WorkerHost", "ray::Runner"))]


def kill_a_busy_machine(cluster: Any) -> None:
    """Kill a machine that has a worker but not the driver."""
    busy = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in actors(cluster)}
    nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}
    node = next(node for pid, node in nodes.items() if pid in busy and not node.is_head())
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_worker_error_is_reported_once(machines: Any, small_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "import torch.distributed as dist\n"
        "def loss(**kwargs):\n"
        "    if dist.get_rank() == 1:  # rank 0 then waits for it in a collective\n"
        "        raise RuntimeError('CUDA error: an illegal memory access')\n"
        "    return kwargs['log_prob'].sum(), {}\n"
    )
    faulty = ["actor_rollout_ref.actor.policy_loss.loss_mode=faulty:loss", "trainer.nnodes=2"]
    run = Run(tmp_path, [*small_run, *faulty], machines.mark, RAY_ADDRESS=machines.address)
    assert run.wait() == 1, run.stderr
    (report,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert f"CUDA error: an illegal memory access, raised by your code at {tmp_path}/faulty.py:4 in loss" in report
    assert "ended early, before its first checkpoint" in report and "Traceback" not in run.stderr
    saved = (tmp_path / "run" / "error.txt").read_text()
    assert "raised in worker group 'actor_rollout' by ActorRolloutRefWorker.update_actor on rank 1 of 2, node" in saved
    until(lambda: not actors(machines), "the actors to end; the cluster is not ours and stays", 20)

    started = time.monotonic()
    run = Run(tmp_path, [*small_run, "trainer.nnodes=4"], machines.mark, RAY_ADDRESS=machines.address)
    assert run.wait() == 2
    assert "the run needs 4 machines with 0 GPU and 1 CPU; the Ray cluster has 3 machines: " in run.stderr
    assert "Lower trainer.n_gpus_per_node or trainer.nnodes" in run.stderr and time.monotonic() - started < 10


@pytest.mark.slow
def test_dead_machines(machines: Any, small_run: list[str], tmp_path: Path) -> None:
    """One is replaced by the third, the next is not; the run then resumes in one process with the same result."""
    across = ["trainer.nnodes=2", "trainer.max_restarts=1", f"ray_init.address={machines.address}"]
    run = Run(tmp_path, [*small_run, *ENDLESS, *across], machines.mark)
    run.after_step(3)
    kill_a_busy_machine(machines)
    until(lambda: "resuming from" in run.stderr, "the restart")
    resumed = int(re.findall(r"resuming from .*/global_step_(\d+)", run.stderr)[0])
    assert resumed >= 2 and resumed % 2 == 0
    run.after_step(resumed + 3)
    kill_a_busy_machine(machines)
    assert run.wait() == 1, run.stderr
    (last,) = re.findall(
        rf"run the same command to resume from its last checkpoint, {tmp_path}/run/global_step_(\d+)", run.stderr
    )
    assert int(last) > resumed and verify(tmp_path / "run" / f"global_step_{last}").step == int(last)
    until(lambda: not actors(machines), "the actors to end", 20)

    steps = int(last) + 2
    for run_dir in (tmp_path / "run", tmp_path / "local"):
        end = [f"trainer.default_local_dir={run_dir}", f"trainer.total_training_steps={steps}"]
        assert main([*small_run, *ENDLESS, *end]) == 0
    assert_same_run(tmp_path / "run", tmp_path / "local", steps)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://10.0.0.1:10001", "Ray client is not supported.*ray job submit"),
        ("127.0.0.1:1", "no Ray cluster answers there .*Start one with `ray start --head`"),
    ],
)
def test_unreachable_address(address: str, message: str) -> None:
    """In a separate process, because a process that has joined a cluster stays with it."""
    call = f"from lockstep.single_controller.ray_backend import connect; connect(address={address!r})"
    result = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=60, check=False)
    assert re.search(f"ray_init.address={address}.*{message}", result.stderr)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["trainer.nnodes=3"], "trainer.nnodes asks for 3 machines, but there is no cluster: set ray_init.address"),
        (["resource_pool_spec={global_pool: [1, 1]}"], "resource_pool_spec asks for 2 machines"),
        (["trainer.n_gpus_per_node=100000"], "asks for 100000 workers, but this machine has no GPU and .* cores"),
    ],
)
def test_config_too_large_for_one_machine(asked: list[str], message: str, overrides: list[str]) -> None:
    config = load_config(PPOConfig, [*overrides, *asked])
    with pytest.raises(ValueError, match=message):
        _check_one_machine(config)
        _check_this_machine(config)


def test_many_workers_on_few_cores_with_num_cpus(overrides: list[str]) -> None:
    many = ["trainer.n_gpus_per_node=100000", "ray_init.num_cpus=100000"]
    _check_this_machine(load_config(PPOConfig, [*overrides, *many]))
