"""The cycle of a rollout engine that holds its own copy of the weights in the trainer's process: time and memory per phase.

    python benchmarks/hybrid_cycle.py [--shape 0.5b --cycles 10 --requests 256 --prompt-tokens 256 --new-tokens 256]
                                      [--json out.json] [key=value ...]

    generate ─► sleep ─► train ─► wake weights ─► update ─► checksums ─► canary, which wakes the KV cache ─► …

The model has random weights (`--model DIR` uses a real one). Memory is that of the whole device at the end of each phase; it is
flat if the last cycle ends with as much as the second. Then weights are brought back without a training step, in both ways that
vLLM has: kept in host memory (sleep level 1), or dropped and sent again (level 2). Further arguments are those of `lockstep ppo`.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from grpo_step import make_model_in_subprocess
from rich.console import Console
from rich.table import Table
from shapes import SHAPES

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout.rollout_engine import rollout_dtype
from lockstep.models.loading import resolve_dtype
from lockstep.protocol import DataProto, object_array
from lockstep.single_controller import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.ppo.mini_batches import MiniBatches, lay_out
from lockstep.weight_sync import WeightSync, canary_bound
from lockstep.weight_sync.proof import canary_gap, check_fingerprints
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker


class Phases:
    """Seconds and GiB in use at the end of each phase, one entry per cycle."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.used: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.used[name].append((total - free) / 2**30)
        self.seconds[name].append(time.perf_counter() - start)


class Cycle:
    def __init__(self, config: PPOConfig, device: str, args: argparse.Namespace) -> None:
        self.args, self.phases = args, Phases(device)
        policy = config.actor_rollout_ref
        init = ClassWithInitArgs(ActorRolloutRefWorker, config=policy, role="actor_rollout", device=device)
        self.group: Any = LocalWorkerGroup(ResourcePool([1]), init)
        with self.phases.phase("start"):
            self.group.init_model()
        self.worker = self.group.workers[0]
        dtypes = (
            resolve_dtype(policy.actor.fsdp_config.dtype, self.worker.device),
            rollout_dtype(policy, self.worker.device),
        )
        self.bound = canary_bound(*dtypes)
        self.sync = WeightSync(self.group, self.group, "in_process", self.bound)
        self.gaps: list[float] = []
        self.worker_metrics: dict[str, float] = {}

    def update(self, version: int) -> None:
        """What `WeightSync.run` does, phase by phase."""
        worker, phase = self.worker, self.phases.phase
        with phase("wake weights"):
            worker.rollout._wake("weights")
        with phase("update"):
            worker.rollout.begin_update()
            for tensors in worker._buckets():
                worker.rollout.update_weights(iter(tensors))
            worker.rollout.finish_update(version)
        with phase("checksums"):
            check_fingerprints(worker._sent, [worker.rollout.fingerprints(list(worker._sent))], version)
        with phase("wake cache"):
            worker.rollout.wake()
        with phase("canary"):
            rows = worker.generate_canary()
            log_probs = worker.canary_log_probs(rows)
        self.gaps.append(canary_gap(rows.tensors["rollout_log_probs"], log_probs, rows.tensors["response_mask"]))

    def step(self, number: int) -> None:
        worker, phase = self.worker, self.phases.phase
        with phase("generate"):
            rows = self._generate(number)
        with phase("sleep"):
            worker.rollout.sleep()
        with phase("train"):
            metrics = self.group.update_actor(self._batch(rows)).get().meta_info["metrics"]
        self.worker_metrics = {name: values[0] for name, values in metrics.items()}
        self.update(number)

    def _generate(self, number: int) -> DataProto:
        sleep = self.worker.rollout.sleep
        self.worker.rollout.sleep = lambda: None  # timed separately
        try:
            return self.group.generate_sequences(self._prompts(number))
        finally:
            self.worker.rollout.sleep = sleep

    def _prompts(self, number: int) -> DataProto:
        rng, count = random.Random(number), self.args.requests
        words = range(3, 250)
        prompts = [rng.choices(words, k=self.args.prompt_tokens) for _ in range(count // 8)]
        return DataProto.from_dict(
            tensors={"sampling_seed": torch.arange(count) + number * count},
            non_tensors={"raw_prompt_ids": object_array([prompt for prompt in prompts for _ in range(8)])},
            meta_info={"validate": False, "greedy": False},
        )

    @staticmethod
    def _batch(rows: DataProto) -> DataProto:
        signs = torch.where(torch.arange(len(rows)) % 2 == 0, 1.0, -1.0)
        advantages = signs[:, None] * rows.tensors["response_mask"]
        batch = lay_out(
            rows.union(DataProto.from_dict(tensors={"advantages": advantages})),
            MiniBatches(len(rows)),
            1,
            balance=False,
        )
        batch.meta_info["rollout_gap"] = "report"
        return batch

    def without_training(self) -> dict[str, list[float]]:
        """Seconds of sleep and wake-up with the same weights, by level."""
        found: dict[str, list[float]] = defaultdict(list)
        rollout = self.worker.rollout
        for level in (1, 2) * 3:
            rollout.drops_weights = level == 2
            start = time.perf_counter()
            rollout.sleep()
            torch.cuda.synchronize()
            asleep = time.perf_counter()
            self.worker.restore_weights()
            rollout.wake()
            torch.cuda.synchronize()
            found[f"level {level}: sleep"].append(asleep - start)
            found[f"level {level}: wake"].append(time.perf_counter() - asleep)
        return found


def settings(args: argparse.Namespace, folder: Path, model: Path) -> list[str]:
    (folder / "none.jsonl").touch()
    return [
        "algorithm=grpo",
        f"data.train_files={folder}/none.jsonl",
        f"data.max_prompt_length={args.prompt_tokens}",
        f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.rollout.max_num_seqs={args.requests}",
        *args.overrides,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b" if on_gpu else "tiny")
    parser.add_argument("--model", type=Path, help="folder of a real model instead of --shape")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--requests", type=int, default=256, help="per cycle, 8 for each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or make_model_in_subprocess(folder / "model", args.shape)
        config = load_config(PPOConfig, settings(args, folder, model))
        cycle = Cycle(config, "cuda" if on_gpu else "cpu", args)
        console.print(f"started in {cycle.phases.seconds['start'][0]:.1f} s")
        cycle.update(0)
        for number in range(1, args.cycles + 1):
            cycle.step(number)
            seconds = {name: round(values[-1], 3) for name, values in cycle.phases.seconds.items()}
            console.print(f"cycle {number}: canary {cycle.gaps[-1]:.3g}", seconds)
        levels = cycle.without_training() if on_gpu else {}
    phases, gigabytes = cycle.phases, cycle.sync.num_bytes / 1e9
    table = Table("phase", "median s", "s per GB", "GiB used after cycle 2", f"after cycle {args.cycles}")
    for phase, seconds in phases.seconds.items():
        used = phases.used.get(phase, [])
        ends = [f"{used[i]:.2f}" if len(used) > 2 else "" for i in (1, -1)]
        median = statistics.median(seconds[1:] or seconds)
        table.add_row(phase, f"{median:.3f}", f"{median / gigabytes:.3f}", *ends)
    console.print(f"{gigabytes:.2f} GB of weights")
    console.print(table)
    console.print("sleep and wake without training:", {k: round(statistics.median(v), 3) for k, v in levels.items()})
    console.print(f"canary: largest gap {max(cycle.gaps):.3g}, bound {cycle.bound:g}")
    console.print("memory metrics:", {k: round(v, 2) for k, v in cycle.worker_metrics.items() if k.startswith("perf/")})
    if args.json:
        content = {
            "gb": gigabytes,
            "seconds": phases.seconds,
            "used_gib": phases.used,
            "gaps": cycle.gaps,
            "levels": levels,
        }
        args.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
