"""When a planted hang begins, and how; imported by the processes of the run.

The folder of the case is in $HANG_FOLDER: plant.json says what hangs, planted.json who has begun to.
"""

import asyncio
import functools
import json
import os
import subprocess
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FOLDER = "HANG_FOLDER"
FOREVER_S = 3600.0

How = Literal["loop", "sleep", "lock", "pipe", "child", "http", "await"]


@dataclass(frozen=True)
class Plant:
    """
    where:   name of the place that hangs; places are given by the callers of `is_now`.
    step:    training step in which it begins, from 1.
    rank:    of the process, if the place is in several.
    seconds: how long it takes.
    url:     what `http` asks.
    """

    where: str
    how: How = "sleep"
    step: int = 2
    rank: int = 0
    seconds: float = FOREVER_S
    url: str = ""

    def write(self, folder: Path) -> None:
        (folder / "plant.json").write_text(json.dumps(asdict(self)))


def folder() -> Path:
    return Path(os.environ[FOLDER])


@functools.cache
def plant() -> Plant:
    return Plant(**json.loads((folder() / "plant.json").read_text()))


def num_steps(folder: Path) -> int:
    """Training steps that are complete."""
    try:
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def begin(folder: Path, pid: int) -> bool:
    """Note that process `pid` begins to hang; False if another one has before."""
    try:
        with open(folder / "planted.json", "x") as file:
            json.dump({"pid": pid, "time": time.time()}, file)
    except FileExistsError:
        return False
    return True


def is_now(where: str, rank: int = 0) -> bool:
    """Whether the caller has to hang: once per case, in the first call that comes in the plant's step."""
    own = plant()
    if own.where != where or own.rank != rank or (folder() / "planted.json").exists():
        return False
    return num_steps(folder()) >= own.step - 1 and begin(folder(), os.getpid())


def note_pid(name: str) -> None:
    """For the test, which may stop this process."""
    path = folder() / f"{name}.pid"
    temporary = path.with_name(f"{name}.{os.getpid()}")
    temporary.write_text(str(os.getpid()))
    temporary.replace(path)


def hang_here() -> None:
    own = plant()
    end = time.monotonic() + own.seconds
    if own.how == "loop":
        while time.monotonic() < end:
            pass
    elif own.how == "sleep":
        time.sleep(own.seconds)
    elif own.how == "lock":
        lock = threading.Lock()
        with lock:
            lock.acquire(timeout=own.seconds)
    elif own.how == "pipe":
        _, full = os.pipe()
        os.write(full, bytes(1 << 20))
    elif own.how == "child":
        subprocess.run(["sleep", str(own.seconds)], input=bytes(1 << 20), check=False)
    elif own.how == "http":
        urllib.request.urlopen(own.url).read()
    else:
        raise ValueError(f"{own.how} is for coroutines")


async def hang_there() -> None:
    """For coroutines: `await` lets the event loop go on, all others block it."""
    if plant().how == "await":
        await asyncio.sleep(plant().seconds)
    else:
        hang_here()
