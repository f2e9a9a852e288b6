"""Memory of a sharded load: what each rank holds while it loads a model folder, beyond the shard that it keeps.

    python benchmarks/load_model.py --shape 0.5b --ranks 4
    python benchmarks/load_model.py --shape 32b --ranks 8 --dry-run

The first writes a folder of random bfloat16 weights and loads it with float32 masters on that many processes, in two ways:

    by shards   the model is built without memory, sharded, and each rank reads its own rows from the folder
    whole       every rank loads the whole model, then shards it

The peak is of host memory, sampled every 2 ms (`lockstep.utils.host.HostPeak`), or of device memory with `--device cuda`.

The dry run shards the shape on the meta device as each rank in turn, and prints the bytes that the rank would keep.
"""

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, shape_config
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.demo.model import make_tokenizer
from lockstep.engines.train import sharding
from lockstep.models.export import save_policy
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.loading import load_causal_lm, meta_model, open_causal_lm
from lockstep.models.token_models import PolicyModel
from lockstep.utils.distributed import join_process_group, leave_process_group
from lockstep.utils.host import HostPeak

WAYS = ("by shards", "whole")
GB = 1e9


def random_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            yield name, torch.ones(parameter.shape, dtype=parameter.dtype)
        else:
            yield name, torch.empty(parameter.shape, dtype=parameter.dtype).uniform_(-0.03, 0.03, generator=generator)


def write_folder(shape: str, folder: Path) -> None:
    model = meta_model(AutoModelForCausalLM, shape_config(shape), torch.bfloat16)
    save_policy(model, random_weights(model), make_tokenizer(), folder)


def load(folder: Path, way: str, device: torch.device) -> dict[str, float]:
    """Load the folder as this rank; bytes and seconds."""
    config = HFModelConfig(path=str(folder))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with HostPeak() as host:
        if way == "whole":
            model, weights = load_causal_lm(config, "--shape", torch.float32, device), None
        else:
            model, weights = open_causal_lm(config, "--shape", torch.float32, device)
        policy = PolicyModel(model)
        sharding.shard(policy, FSDPEngineConfig(), device, torch.bfloat16)
        if weights is not None:
            weights.fill(policy.transformer, device)
    peak = host.num_bytes if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
    sizes = kept_bytes(policy)
    return {**sizes, "peak": peak, "excess": peak - sizes["shard"], "seconds": time.perf_counter() - start}


def kept_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of all parameters, and of this rank's shards."""
    parameters = list(model.parameters())
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return {"whole": sum(p.nbytes for p in parameters), "shard": sum(s.nbytes for s in shards)}


def serve(pipe: Connection, rank: int, size: int, port: int, device: str, folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    join_process_group(rank, size, own, timeout_s=600)
    pipe.send(load(folder, way, own))
    leave_process_group()


def load_on_ranks(folder: Path, way: str, size: int, device: str) -> list[dict[str, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.engines.train.sharding", "lockstep.models.loading"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, rank, size, port, device, folder, way), daemon=True)
        process.start()
        theirs.close()  # so that a rank that dies is seen
        pipes.append(ours)
        processes.append(process)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return results


def dry_run(shape: str, ranks: int, fsdp_size: int = -1) -> list[dict[str, int]]:
    """What each rank keeps of float32 masters; nothing is allocated or sent."""
    results = []
    for rank in range(ranks):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            model = meta_model(AutoModelForCausalLM, shape_config(shape), torch.float32)
            install_decoder_layers(model)
            policy = PolicyModel(model)
            cpu = torch.device("cpu")
            sharding.shard(policy, FSDPEngineConfig(fsdp_size=fsdp_size), cpu, torch.bfloat16)
            assert all(parameter.is_meta for parameter in policy.parameters())
            results.append(kept_bytes(policy))
        finally:
            leave_process_group()
    return results


def print_dry_run(shape: str, results: list[dict[str, int]]) -> None:
    whole = results[0]["whole"]
    table = Table("rank", "masters, bytes", "GB", "with gradients and AdamW, GB", "of the whole")
    table.title = f"{shape}: {whole // 4:,} parameters, {whole / GB:.1f} GB in float32, on {len(results)} ranks"
    for rank, sizes in enumerate(results):
        shard = sizes["shard"]
        table.add_row(str(rank), f"{shard:,}", f"{shard / GB:.2f}", f"{4 * shard / GB:.2f}", f"{shard / whole:.4f}")
    Console(width=100).print(table)


def print_loads(shape: str, results: dict[str, list[dict[str, float]]]) -> None:
    table = Table(
        "way", "rank", "whole, GB", "shard, GB", "peak, GB", "beyond the shard, GB", "of the whole", "seconds"
    )
    for way, rows in results.items():
        for rank, row in enumerate(rows):
            sizes = (f"{row[name] / GB:.3f}" for name in ("whole", "shard", "peak", "excess"))
            table.add_row(way, str(rank), *sizes, f"{row['excess'] / row['whole']:.2f}", f"{row['seconds']:.1f}")
    table.title = f"{shape} on {len(next(iter(results.values())))} ranks"
    Console(width=120).print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--dry-run", action="store_true", help="print the bytes per rank without loading anything")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(arguments)
    result: Any
    if args.dry_run:
        result = dry_run(args.shape, args.ranks)
        print_dry_run(args.shape, result)
    else:
        with tempfile.TemporaryDirectory() as name:
            write_folder(args.shape, Path(name))
            result = {way: load_on_ranks(Path(name), way, args.ranks, args.device) for way in args.ways}
        print_loads(args.shape, result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
