"""Generation and rewards of a step with `rollout.mode=sync` and `async`: a slow reward function is called while others generate.

"by prompt" is `async` with a reward that compares the samples of a prompt, and so waits for the last of them.

    python benchmarks/async_rollout.py --model DIR [--prompts 32 --samples 4 --new-tokens 128 --max-num-seqs 32]
                                       [--reward-ms 50 --stop-tokens 8 --rounds 5] [key=value ...]

The reward function sleeps for `--reward-ms` per sample in the worker processes of rewards; 0 shows what single requests cost. The
modes run in turn in one process, with the same prompts, and must return the same batch. Responses end at one of `--stop-tokens`
tokens, so that their lengths have a long tail. Further `key=value` arguments are overrides.
"""

import argparse
import statistics
import sys
import tempfile
import time
from copy import copy
from pathlib import Path

import pandas as pd
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.run.interrupt import Interrupt

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return float(len(solution_str) % 7)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--reward-ms", type=float, default=50.0)
    parser.add_argument("--stop-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TaskRunner().build(load_config(PPOConfig, [*settings(args, Path(folder)), *overrides]))
        trainer.init_workers()
        try:
            measure(trainer, args.rounds)
        finally:
            trainer.close()
    return 0


def settings(args: argparse.Namespace, folder: Path) -> list[str]:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}+{i % 7}="}],
            "reward_model": {"style": "rule", "ground_truth": str(i + i % 7)},
            "extra_info": {"index": i},
        }
        for i in range(args.prompts)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD.format(seconds=args.reward_ms / 1000))
    inline = [] if args.reward_ms else ["reward_model.timeout_s=null"]
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={args.prompts}",
        f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.model.path={args.model}",
        f"actor_rollout_ref.rollout.n={args.samples}",
        f"actor_rollout_ref.rollout.max_num_seqs={args.max_num_seqs}",
        "actor_rollout_ref.rollout.mode=async",
        f"actor_rollout_ref.rollout.stop_token_ids={list(range(3, 3 + args.stop_tokens))}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"custom_reward_function.path={folder}/reward.py",
        f"trainer.default_local_dir={folder}/run",
        "algorithm.adv_estimator=grpo",
        *inline,
    ]


def measure(trainer: object, rounds: int) -> None:
    own = trainer.sampling  # type: ignore[attr-defined]
    by_prompt = copy(own)
    by_prompt.sampler = copy(own.sampler)
    by_prompt.sampler.scores_samples = False
    modes = {
        "sync": Sampling(own.config, own.rollout_wg, own.rm_wg, own.reward_fn),
        "by prompt": by_prompt,
        "async": own,
    }
    prompts = next(trainer._prompts(Interrupt()))  # type: ignore[attr-defined]
    numbers: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        batches = {}
        for mode, sampling in modes.items():
            began = time.perf_counter()
            timing: dict[str, float] = {}
            batches[mode], metrics = sampling.collect(iter([prompts[:]]), step=1, timing=timing)
            took = time.perf_counter() - began
            if number:  # the first round starts the workers of rewards
                numbers[mode].append((took, timing["gen"], timing["reward"], metrics.get("perf/reward_hidden_s", 0.0)))
        for key in ("responses", "token_level_scores"):
            assert all(torch.equal(batches["sync"].tensors[key], batch.tensors[key]) for batch in batches.values()), key
    lengths = batches["sync"].tensors["response_mask"].sum(-1).float()
    print(f"{len(lengths)} responses of {lengths.mean():.0f} tokens, at most {lengths.max():.0f}")
    for mode, rows in numbers.items():
        total, gen, exposed, hidden = map(statistics.median, zip(*rows))
        print(
            f"{mode:9}  {total:.2f} s: generation {gen:.2f} s, then rewards {exposed:.2f} s; {hidden:.2f} s of rewards hidden"
        )


if __name__ == "__main__":
    sys.exit(main())
