"""Samples per second of asynchronous training against synchronous, with responses of long-tailed generation times.

    python benchmarks/async_training.py [--steps 20 --prompts 16 --samples 2 --max-staleness 2] [--json out.json]

Trainer, rollout engine and data are real: a model of 0.13 million parameters learns to write even digits, on the CPU. The time that
a response takes is simulated: after its tokens are there, its slot stays busy for a time drawn from a log-normal distribution
(median `--median-s`, sigma 1, cut at 6 medians) by the request's seed, without using the CPU. A pause stops that clock. There are
as many slots as a batch has samples, in every mode: no mode gains from generating more at a time than the synchronous one. An
update that takes less than `--update-s` is filled up to that, so that the result does not depend on the machine.

What staleness costs in learning is measured by a longer run of `--learning-steps`, whose simulated times are a tenth: the samples
until the mean reward of five steps reaches `--reward`; 0 leaves it out. A busy machine needs larger `--median-s` and `--update-s`.

The exit code is 1 if a bar is missed: colocated 1.3, one_step_off 1.4, fully_async 1.8 times the synchronous samples per second,
with at most 10 % more samples.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.demo.model import make_model_folder
from lockstep.demo.task import split_problems, write_rows
from lockstep.protocol import DataProto
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.single_controller import WorkerGroup
from lockstep.trainer.ppo import async_sampling
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.rollout_client import RolloutClient

BARS = {"colocated": 1.3, "one_step_off": 1.4, "fully_async": 1.8}
MOST_SAMPLES = 1.1
LONGEST = 6.0
"""In medians: responses are cut at a maximum length."""
WINDOW = 5
"""Steps of the mean reward."""
WARM_UP = 3
"""Steps that are not timed."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character in "02468" for character in solution_str) / 8
"""


class SimulatedClient(RolloutClient):
    """A request is finished when its tokens are there and its slot has been busy for a simulated time."""

    median_s = 0.0
    num_slots = 1
    num_requests = 0

    def __init__(self, rollout_wg: WorkerGroup) -> None:
        super().__init__(rollout_wg)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def resume(self) -> None:
        await super().resume()
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._slots = asyncio.Semaphore(self.num_slots)
            self._is_running, self._is_paused = asyncio.Event(), asyncio.Event()
        self._is_paused.clear()
        self._is_running.set()

    async def pause(self) -> None:
        self._is_running.clear()
        self._is_paused.set()
        await super().pause()

    async def generate(self, request: GenerationRequest, *, key: str = "") -> Completion:
        completion = await super().generate(request, key=key)
        SimulatedClient.num_requests += 1
        left_s = self.median_s * min(LONGEST, random.Random(request.seed).lognormvariate(0.0, 1.0))
        async with self._slots:
            while left_s > 0:
                await self._is_running.wait()
                began = time.perf_counter()
                paused = asyncio.create_task(self._is_paused.wait())
                await asyncio.wait({paused}, timeout=left_s)
                paused.cancel()
                left_s -= time.perf_counter() - began
        return completion


class SimulatedUpdate:
    """The actor's update, which takes at least `seconds`."""

    seconds = 0.0

    @staticmethod
    def of(update: Callable[..., DataProto]) -> Callable[..., DataProto]:
        @wraps(update)
        def timed(self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
            began = time.perf_counter()
            output = update(self, data)
            time.sleep(max(0.0, began + SimulatedUpdate.seconds - time.perf_counter()))
            return output

        return timed


class Benchmark:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        make_model_folder(folder / "model", seed=1)
        write_rows(folder / "train.parquet", split_problems(1)[0], "train")
        (folder / "reward.py").write_text(REWARD)

    def run(self, name: str, steps: int, *settings: str) -> list[dict[str, Any]]:
        """The metrics of each step."""
        overrides = [
            f"actor_rollout_ref.model.path={self.folder}/model",
            f"data.train_files={self.folder}/train.parquet",
            f"custom_reward_function.path={self.folder}/reward.py",
            "algorithm.adv_estimator=grpo",
            f"data.train_batch_size={self.args.prompts}",
            f"actor_rollout_ref.rollout.n={self.args.samples}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.args.prompts}",
            f"actor_rollout_ref.actor.optim.lr={self.args.lr}",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            "trainer.device=cpu",
            "trainer.logger=[]",
            "trainer.save_freq=0",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={self.folder}/{name}",
        ]
        runner, SimulatedClient.num_requests = TaskRunner(), 0
        if (code := runner.run(load_config(PPOConfig, [*overrides, *settings]))) != 0:
            sys.exit(code)
        assert SimulatedClient.num_requests >= steps * self.args.prompts * self.args.samples, (
            "not all times were simulated"
        )
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def measure(self) -> dict[str, dict[str, float]]:
        """By mode: samples per second, samples until the reward is reached, and the shares of waiting."""
        split = ["trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2"]
        stale = f"trainer.max_staleness={self.args.max_staleness}"
        modes = {
            "synchronous": ["actor_rollout_ref.rollout.mode=async"],  # requests of one step, all of which it waits for
            "colocated": ["trainer.async_mode=colocated", stale],
            "one_step_off": ["trainer.async_mode=one_step_off", *split],
            "fully_async": ["trainer.async_mode=fully_async", *split, stale],
        }
        results: dict[str, dict[str, float]] = {}
        for mode, settings in modes.items():
            set_times(self.args.median_s, self.args.update_s)
            results[mode] = self._speed(self.run(mode, self.args.steps, *settings))
            results[mode]["speed"] = results[mode]["samples_per_s"] / results["synchronous"]["samples_per_s"]
            if self.args.learning_steps:
                set_times(self.args.median_s / 10, self.args.update_s / 10)
                results[mode] |= self._learning(self.run(f"{mode}_learning", self.args.learning_steps, *settings))
                results[mode]["samples_ratio"] = results[mode]["samples"] / results["synchronous"]["samples"]
        return results

    def _speed(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        rows = rows[WARM_UP:]
        seconds = sum(row["timing_s/step"] for row in rows)
        return {
            "samples_per_s": self.args.prompts * self.args.samples * len(rows) / seconds,
            "staleness": statistics.fmean(row.get("async/staleness/mean", 0.0) for row in rows),
            "trainer_waits": sum(row["timing_s/gen"] for row in rows) / seconds,
            "step_s": seconds / len(rows),
            "update_s": statistics.fmean(row["timing_s/update_actor"] for row in rows),
            "update_weights_s": statistics.fmean(row.get("timing_s/update_weights", 0.0) for row in rows),
        }

    def _learning(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        rewards = [row["critic/score/mean"] for row in rows]
        means = [statistics.fmean(rewards[i : i + WINDOW]) for i in range(len(rows) - WINDOW + 1)]
        steps = next((i + WINDOW for i, mean in enumerate(means) if mean >= self.args.reward), float("inf"))
        return {"samples": steps * self.args.prompts * self.args.samples, "last_reward": means[-1]}


def set_times(median_s: float, update_s: float) -> None:
    SimulatedClient.median_s, SimulatedUpdate.seconds = median_s, update_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-5)
    parser.add_argument("--reward", type=float, default=0.7)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--median-s", type=float, default=0.5)
    parser.add_argument("--update-s", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    SimulatedClient.num_slots = args.prompts * args.samples
    async_sampling.RolloutClient = SimulatedClient  # type: ignore[misc]
    ActorRolloutRefWorker.update_actor = SimulatedUpdate.of(ActorRolloutRefWorker.update_actor)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        results = Benchmark(Path(folder), args).measure()
    columns = ("samples_per_s", "speed", "staleness", "trainer_waits", "samples", "samples_ratio", "last_reward")
    table = Table("mode", *columns)
    for mode, result in results.items():
        table.add_row(mode, *(f"{result[name]:.3g}" if name in result else "" for name in columns))
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    missed = [mode for mode, bar in BARS.items() if results[mode]["speed"] < bar]
    missed += [f"learning of {mode}" for mode in BARS if not results[mode].get("samples_ratio", 1.0) <= MOST_SAMPLES]
    for name in missed:
        sys.stderr.write(f"bar missed: {name}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
