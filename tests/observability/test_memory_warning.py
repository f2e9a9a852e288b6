"""The warning before the host's memory runs out."""

import os
from pathlib import Path

import pytest

from lockstep.observability.memory_warning import CHECK_S, NUM_SAMPLES, MemoryWarning
from lockstep.utils.host_memory import budgets, run_processes

GIB = 2**30


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, available_gib: float) -> None:
    write(
        root,
        "proc/meminfo",
        f"MemTotal: {100 << 20} kB\nMemAvailable: {int(available_gib * 2**20)} kB\nHugePages_Total: 0\n",
    )


def process(root: Path, pid: int, parent: int, own_gib: float, *command: str, comm: str = "python") -> None:
    write(root, f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in command))
    write(root, f"proc/{pid}/comm", f"{comm}\n")
    anon = int(own_gib * 2**20)
    write(
        root,
        f"proc/{pid}/status",
        f"Name: {comm}\nPPid: {parent}\nVmRSS: {2 * anon} kB\nRssAnon: {anon} kB\nRssShmem: 0 kB\n",
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    machine(tmp_path, 50)
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    (tmp_path / "sys/fs/cgroup/job/step").mkdir(parents=True)
    return tmp_path


def test_budgets_of_the_machine_and_its_cgroups(root: Path) -> None:
    assert [b.available / b.total for b in budgets(root)] == [0.5]
    write(root, "sys/fs/cgroup/job/step/memory.max", "max\n")
    write(root, "sys/fs/cgroup/job/memory.max", f"{10 * GIB}\n")  # of a parent
    write(root, "sys/fs/cgroup/job/memory.current", f"{9 * GIB}\n")
    write(
        root,
        "sys/fs/cgroup/job/memory.stat",
        f"anon {7 * GIB}\nfile {2 * GIB}\nshmem 0\ninactive_file {GIB}\nactive_file {GIB}\n",
    )
    _, cgroup = budgets(root)
    assert cgroup.name.endswith("sys/fs/cgroup/job")
    assert (cgroup.total, cgroup.available) == (10 * GIB, 3 * GIB)  # the page cache of files can be dropped
    write(root, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{8 * GIB}\n")  # the mount is the cgroup
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB}\ntotal_active_file 0\n")
    assert [(b.total, b.available) for b in budgets(root)][1:] == [(8 * GIB, GIB)]
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")  # no limit
    assert len(budgets(root)) == 1
    assert budgets(root / "nothing") == []


def test_the_warning_names_the_largest_processes_and_what_to_lower(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = os.getpid()
    process(root, pid, 1, 5, "python", "-m", "lockstep.trainer.main_ppo")
    process(root, 9001, pid, 40, "python", "-P", "-m", "lockstep.rewards.worker", str(pid), "7")
    process(root, 9002, pid, 3, "python", "-m", "lockstep.trainer.main_ppo", comm="pt_data_worker")
    process(root, 9003, 9001, 9, "python", "user_program.py")
    process(root, 9004, 1, 8, "ray::WorkerDict.update_actor")
    process(root, 9005, 1, 99, "java")  # of somebody else
    process(root, 9006, pid, 0.1, "python", "-P", "-m", "lockstep.single_controller.message_process", "5")
    warning = MemoryWarning(root)
    warning.check(0.0)
    assert not caplog.records
    machine(root, 6)
    for now in range(3):
        warning.check(float(now))
    (record,) = caplog.records  # once
    message = record.getMessage()
    assert "memory of this machine runs out: 6.0 GiB of 100.0 GiB are left" in message
    assert (
        "held by: reward worker (pid 9001) 40.0 GiB, process started by the run (pid 9003) 9.0 GiB, Ray worker "
        f"WorkerDict.update_actor (pid 9004) 8.0 GiB, trainer (pid {pid}) 5.0 GiB, data-loader process (pid 9002) 3.0 GiB"
        in message
    )
    assert "Lower reward_model.reward_kwargs.num_workers; " in message and "data.dataloader_num_workers" in message
    machine(root, 50)
    warning.check(10.0)
    machine(root, 5)
    warning.check(11.0)
    assert len(caplog.records) == 2  # it had recovered in between


def test_the_warning_comes_early_if_memory_falls_fast(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    slowly, fast = MemoryWarning(root), MemoryWarning(root)
    for number in range(2 * NUM_SAMPLES):
        machine(root, 29 - 0.1 * number)
        slowly.check(number * CHECK_S)
    assert not caplog.records
    for number in range(NUM_SAMPLES):
        machine(root, 29 - 2.5 * number)  # 0.5 GiB/s: empty in 28 s
        fast.check(number * CHECK_S)
    (record,) = caplog.records
    assert "14.0 GiB of 100.0 GiB are left" in record.getMessage()
    assert "no process of this run. Other programs" in record.getMessage()


def test_this_machine() -> None:
    assert os.getpid() in {p.pid for p in run_processes(os.getpid()) if p.own_bytes > 0}
    assert all(0 <= budget.available <= budget.total * 1.01 for budget in budgets())
