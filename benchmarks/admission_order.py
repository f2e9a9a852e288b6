"""How long a rollout takes by the order in which waiting sequences start: first in, first out, or longest first.

    python benchmarks/admission_order.py [--prompts 128 --samples 8 --max-num-seqs 256 --max-tokens 4096]
                                         [--step-ms 1.0 --row-us 5.5 --prefill-us 3 --cache-tokens 0 --rounds 5]

Runs the embedded engine's scheduler without a model: each sequence has a length, a decode step costs `--step-ms` plus `--row-us`
per row, a prefill `--prefill-us` per token. The defaults are those of the 0.5B shape on an H200 (docs/performance.md). Lengths are
log-normal: `--spread` between prompts, `--noise` between the answers to one prompt, both standard deviations of the logarithm;
those above `--max-tokens` are cut. "history" expects the mean length of `--samples` earlier answers to the same prompt, "known" the
length itself, which is the best that an order by length can do. `--cache-tokens` limits the KV cache; 0 has room for all.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lockstep.engines.rollout.embedded.block_manager import BlockManager
from lockstep.engines.rollout.embedded.scheduler import Scheduler
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.protocol.generation import GenerationRequest, SamplingParams

BLOCK_SIZE = 16
PROMPT_LENGTH = 256
WINDOW = 8
STOP = 1
TOKEN = 0


@dataclass
class Workload:
    """Lengths of the answers, and those of earlier answers to the same prompts; (prompts, samples) each."""

    lengths: np.ndarray
    earlier: np.ndarray


@dataclass
class Costs:
    """Seconds of a decode step, of each row in it, and of a token in a prefill."""

    step_s: float
    row_s: float
    prefill_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--median", type=float, default=500.0)
    parser.add_argument("--spread", type=float, default=0.7)
    parser.add_argument("--noise", type=float, default=0.4)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--row-us", type=float, default=5.5)
    parser.add_argument("--prefill-us", type=float, default=3.0)
    parser.add_argument("--cache-tokens", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    costs = Costs(args.step_ms / 1e3, args.row_us / 1e6, args.prefill_us / 1e6)
    seconds: dict[str, list[float]] = {"first in": [], "history": [], "known": []}
    preempted: dict[str, list[int]] = {name: [] for name in seconds}
    for seed in range(args.rounds):
        load = workload(args, seed)
        expected: dict[str, Callable[[Sequence], float]] = {
            "first in": lambda s: 0.0,
            "history": lambda s, load=load: float(load.earlier[s.index // args.samples].mean()),
            "known": lambda s, load=load: float(load.lengths.flat[s.index]),
        }
        for name, expected_length in expected.items():
            took, count = simulate(load, expected_length, costs, args.max_num_seqs, args.max_tokens, args.cache_tokens)
            seconds[name].append(took)
            preempted[name].append(count)
    print(f"{args.prompts} x {args.samples} answers, {args.max_num_seqs} at once")
    print(f"lengths of the last round: mean {load.lengths.mean():.0f}, longest {load.lengths.max()}")
    for name, times in seconds.items():
        saved = 1 - np.mean(times) / np.mean(seconds["first in"])
        print(f"{name:9} {np.mean(times):7.2f} s  {saved:6.1%} saved  {np.mean(preempted[name]):6.0f} preempted")
    return 0


def workload(args: argparse.Namespace, seed: int) -> Workload:
    random = np.random.default_rng(seed)
    means = np.log(args.median) + args.spread * random.standard_normal((args.prompts, 1))
    logs = means[None] + args.noise * random.standard_normal((2, args.prompts, args.samples))
    lengths = np.exp(logs).round().astype(int).clip(2, args.max_tokens)
    return Workload(lengths[0], lengths[1])


def simulate(
    load: Workload,
    expected_length: Callable[[Sequence], float],
    costs: Costs,
    max_num_seqs: int,
    max_tokens: int,
    cache_tokens: int = 0,
) -> tuple[float, int]:
    """Seconds until all answers are complete, and how often a sequence was preempted."""
    most = load.lengths.size * (PROMPT_LENGTH + max_tokens)
    blocks = BlockManager((cache_tokens or most) // BLOCK_SIZE + 1, BLOCK_SIZE)
    scheduler = Scheduler(blocks, max_num_seqs, 16384, chunked=True, share_prompts=True)
    scheduler.expected_length = expected_length
    sampling = SamplingParams(max_tokens=max_tokens)
    samples = load.lengths.shape[1]
    sequences = []
    for index in range(load.lengths.size):
        prompt = [index // samples] * PROMPT_LENGTH
        sequences.append(Sequence(index, index, GenerationRequest(prompt, sampling), frozenset([STOP]), 0))
        scheduler.add(sequences[-1])
    seconds = 0.0
    while scheduler.has_unfinished:
        prefill = scheduler.schedule_prefill() if scheduler.prefill_is_due else None
        if prefill is not None and prefill.rows:
            seconds += costs.step_s + costs.prefill_s * sum(row.stop - row.start for row in prefill.rows)
            for sequence in [s for row in prefill.rows for s in row.samplers]:
                append(scheduler, sequence, 1, load)
            continue
        window = scheduler.schedule_decode(WINDOW)
        seconds += window.num_steps * (costs.step_s + costs.row_s * len(window.rows))
        for sequence, count in window.rows:
            sequence.num_unread -= count
            append(scheduler, sequence, count, load)
    return seconds, sum(s.num_preempted for s in sequences)


def append(scheduler: Scheduler, sequence: Sequence, count: int, load: Workload) -> None:
    left = int(load.lengths.flat[sequence.index]) - sequence.num_generated
    tokens = [TOKEN] * count if count < left else [TOKEN] * (left - 1) + [STOP]
    sequence.append(tokens, [0.0] * len(tokens))
    if sequence.stop_reason is not None:
        scheduler.finish(sequence)


if __name__ == "__main__":
    sys.exit(main())
