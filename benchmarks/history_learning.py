"""A learning run of several epochs with drafts from history and one without: the same tokens, and the time of generation.

    python benchmarks/history_learning.py --model DIR --data train.parquet [--prompts 64 --batch 16 --samples 8 --epochs 3]
                                          [--new-tokens 1024] [--exact] [--out DIR] [--json out.json] [key=value ...]

Both runs train on the first `--prompts` rows with the same seed. The table has, per epoch, the seconds of generation of each run
(without the first step, in which kernels are compiled), the share of the draft tokens that were accepted, and the reward. "same"
is the share of responses with the same text in both runs: 1 with `--exact`; otherwise rounding may change a token, and every
update after it. Further `key=value` arguments are overrides of both runs.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch

from lockstep.trainer import main_ppo

DRAFTS = "actor_rollout_ref.rollout.history_drafts.enable"
Steps = list[dict[str, Any]]


def train(folder: Path, data: Path, drafts: bool, args: argparse.Namespace) -> Steps:
    """Metrics and responses (key `responses`) of every step."""
    overrides = [
        "algorithm=grpo",
        f"data.train_files={data}",
        "data.shuffle=false",
        f"data.train_batch_size={args.batch}",
        f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.model.path={args.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.batch}",
        f"actor_rollout_ref.rollout.n={args.samples}",
        f"actor_rollout_ref.rollout.max_num_seqs={args.batch * args.samples}",
        f"actor_rollout_ref.rollout.exact={args.exact}",
        f"{DRAFTS}={drafts}",
        f"trainer.device={args.device}",
        f"trainer.total_epochs={args.epochs}",
        "trainer.save_freq=0",
        "trainer.test_freq=-1",
        f"trainer.rollout_data_dir={folder}/rollouts",
        f"trainer.default_local_dir={folder}",
        *args.overrides,
    ]
    if main_ppo.main(overrides):
        raise SystemExit(f"the run with {DRAFTS}={drafts} failed")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, step in enumerate(steps, 1):
        with open(folder / "rollouts" / f"{number}.jsonl") as rows:
            step["responses"] = [json.loads(row)["output"] for row in rows]
    return steps


def of_epoch(plain: Steps, drafted: Steps, first: int = 0) -> dict[str, float]:
    """first: index of the first step whose seconds count; the other figures are of all steps."""
    acceptance = [step["perf/drafts/acceptance"] for step in drafted if "perf/drafts/acceptance" in step]
    pairs = [pair for a, b in zip(plain, drafted) for pair in zip(a["responses"], b["responses"], strict=True)]
    seconds = [sum(step["timing_s/gen"] for step in steps[first:]) for steps in (plain, drafted)]
    return {
        "plain_s": seconds[0],
        "drafts_s": seconds[1],
        "faster": seconds[0] / seconds[1],
        "acceptance": mean(acceptance) if acceptance else 0.0,
        "drafted_share": mean(step["perf/drafts/share"] for step in drafted),
        "mean_length": mean(step["response_length/mean"] for step in plain),
        "reward": mean(step["critic/score/mean"] for step in plain),
        "same": mean(a == b for a, b in pairs),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="a parquet file of prompts")
    parser.add_argument("--prompts", type=int, default=64, help="rows of it")
    parser.add_argument("--batch", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--exact", action="store_true", help="rollout.exact=true in both runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/history_learning"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out.absolute() / "train.parquet"
    pd.read_parquet(args.data).head(args.prompts).to_parquet(data)
    plain, drafted = (train(args.out.absolute() / name, data, name == "drafts", args) for name in ("plain", "drafts"))
    size = len(plain) // args.epochs
    epochs = [
        of_epoch(plain[i : i + size], drafted[i : i + size], first=int(i == 0 and size > 1))
        for i in range(0, len(plain), size)
    ]
    names = list(epochs[0])
    print("| epoch |" + "".join(f" {name} |" for name in names))
    print("|---|" + "---|" * len(names))
    for number, epoch in enumerate(epochs, 1):
        print(f"| {number} |" + "".join(f" {epoch[name]:.3g} |" for name in names))
    if args.json:
        args.json.write_text(json.dumps({"epochs": epochs}, indent=1))


if __name__ == "__main__":
    main()
