"""Overhead of the controller: a DataProto sent to a group of Ray workers and back, compared with plain Ray.

    python benchmarks/dispatch.py [--megabytes 64 --workers 4 --repeats 25 --json out.json]

    put_get         ray.put and ray.get of one numpy array of that size: one copy in warm memory
    there           the batch is split over the workers, each returns a number
    there_and_back  the batch is split over the workers, each returns its rows, and they are joined
    plain           the same in plain Ray: numpy views of the columns, split over as many actors, which return them; the
                    controller concatenates them

The four alternate; medians are reported. The ratio of there_and_back to plain is the overhead of Lockstep over Ray.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lockstep.protocol import DataProto
from lockstep.single_controller import Dispatch, Worker, register
from lockstep.single_controller.ray_backend import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, connect
from lockstep.single_controller.ray_backend.cluster import ray


class Echo(Worker):
    """Returns its rows, or a number."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return int(data.tensors["input_ids"][:, 0].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data


Columns = dict[str, np.ndarray]


class PlainEcho:
    """The same in plain Ray."""

    def echo(self, data: Columns) -> Columns:
        return data


def plain_round(actors: list[Any], shards: list[Columns]) -> Columns:
    parts = ray.get([actor.echo.remote(shard) for actor, shard in zip(actors, shards)])
    return {key: np.concatenate([part[key] for part in parts]) for key in shards[0]}


def make_batch(num_bytes: int) -> DataProto:
    """A typical batch of an update: five int64 and eight float32 columns of 512 tokens."""
    rows = num_bytes // (512 * (5 * 8 + 8 * 4))
    rows -= rows % 8
    columns = {f"float_{i}": torch.rand(rows, 512) for i in range(8)}
    columns |= {f"int_{i}": torch.randint(0, 50_000, (rows, 512)) for i in range(4)}
    columns["input_ids"] = torch.randint(0, 50_000, (rows, 512))
    return DataProto.from_dict(columns, {"uid": [f"prompt-{i // 8}" for i in range(rows)]}, {"temperature": 1.0})


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(megabytes: int, num_workers: int, repeats: int) -> dict[str, float]:
    """Median seconds by name, and their ratios."""
    data = make_batch(megabytes << 20)
    num_bytes = sum(column.numel() * column.element_size() for column in data.tensors.values())
    raw = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
    pool = RayResourcePool([num_workers], use_gpu=False, name_prefix="bench", max_colocate_count=2)
    plain = [ray.remote(PlainEcho).options(num_cpus=0).remote() for _ in range(num_workers)]
    shards = [{str(k): v.numpy() for k, v in part.tensors.items()} for part in data.chunk(num_workers)]
    with RayWorkerGroup(pool, RayClassWithInitArgs(Echo)) as group:
        sides: dict[str, Callable[[], object]] = {
            "put_get_s": lambda: ray.get(ray.put(raw)),
            "there_s": lambda: group.count(data),
            "there_and_back_s": lambda: group.echo(data),
            "plain_s": lambda: plain_round(plain, shards),
        }
        echoed = group.echo(data)
        assert all(torch.equal(column, echoed.tensors[key]) for key, column in data.tensors.items())
        del echoed
        times: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats + 3):
            for name, action in sides.items():
                spent = seconds(action)
                if repeat >= 3:  # the first rounds allocate memory
                    times[name].append(spent)
    result = {name: statistics.median(spent) for name, spent in times.items()}
    result["megabytes"] = num_bytes / 2**20
    result["there_to_put_get"] = result["there_s"] / result["put_get_s"]
    result["there_and_back_to_put_get"] = result["there_and_back_s"] / result["put_get_s"]
    result["there_and_back_to_plain"] = result["there_and_back_s"] / result["plain_s"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    connect(min_cpus=args.workers + 1, log_to_driver=False, logging_level="ERROR", object_store_memory=2 << 30)
    result = measure(args.megabytes, args.workers, args.repeats)
    table = Table(title=f"{result['megabytes']:.0f} MB through {args.workers} workers")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in result.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
