"""Learning curves with rollouts in 8 bits and in the trainer's precision: the demo's sums, GRPO, on the CPU or a GPU.

    python benchmarks/fp8_learning.py [--seeds 1 2 3] [--steps 60] [--device cpu] [--out outputs/fp8_learning]

Per seed one model is warmed up, which all variants train from with the same problems and random numbers. The table has the mean
over the seeds (and the range) of the reward in thirds of the run, of the held-out accuracy at its end, and of the gap between the
log-probs of rollout and trainer. A run that is there already is not repeated.
"""

import argparse
import json
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import mean

from lockstep.demo.main_demo import as_overrides, training_overrides, warm_model
from lockstep.demo.tasks import SUMS
from lockstep.demo.warmup import warm_up_settings
from lockstep.trainer import fsdp_sft_trainer, main_ppo

VARIANTS = {
    "trainer's precision": [],
    "fp8, corrected (default)": ["actor_rollout_ref.rollout.quantization=fp8"],
    "fp8, not corrected": [
        "actor_rollout_ref.rollout.quantization=fp8",
        "algorithm.rollout_correction.rollout_is=null",
    ],
    "KV cache in fp8, corrected": ["actor_rollout_ref.rollout.kv_cache_dtype=fp8"],
    "fp8 and KV cache in fp8, corrected": [
        "actor_rollout_ref.rollout.quantization=fp8",
        "actor_rollout_ref.rollout.kv_cache_dtype=fp8",
    ],
}
REWARD, ACCURACY, GAP = "critic/score/mean", "val-core/", "training/rollout_log_probs_gap"


def warm_up(folder: Path, seed: int, device: str) -> Path:
    """The demo's model after its supervised steps."""
    model: Path = warm_model(folder, SUMS.recipe)
    if not model.exists():
        num_rows, _ = SUMS.write(folder, SUMS.recipe, seed)
        shutil.copyfile(str(SUMS.reward.__file__), folder / "reward.py")
        data = folder / "data" / "warmup.parquet"
        settings = warm_up_settings(folder / "model", data, num_rows, folder / "warmup", SUMS.recipe, seed, device)
        if fsdp_sft_trainer.main(as_overrides(settings | {"data.max_length": SUMS.max_length})):
            raise SystemExit("the warm-up failed")
    return model


def train(folder: Path, run: Path, model: Path, extra: list[str], args: argparse.Namespace, seed: int) -> list[dict]:
    """The metrics of every step."""
    file = run / "metrics.jsonl"
    overrides = training_overrides(folder, model, run, "grpo", args.steps, seed, args.device)
    if not file.exists() and main_ppo.main([*overrides, *extra]):
        raise SystemExit(f"training failed: {run}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def series(rows: list[dict], name: str) -> list[float]:
    """The metric whose name begins so, of the steps that have it."""
    found = ([value for key, value in row.items() if key.startswith(name)] for row in rows)
    return [values[0] for values in found if values]


def cells(runs: list[list[dict]]) -> list[str]:
    thirds = []
    for run in runs:
        rewards = series(run, REWARD)
        bounds = [len(rewards) * part // 3 for part in range(4)]
        thirds.append([mean(rewards[a:b]) for a, b in pairwise(bounds)])
    columns = [*zip(*thirds), [series(run, ACCURACY)[-1] for run in runs]]
    gaps = [mean(series(run, GAP)) for run in runs], [max(series(run, GAP)) for run in runs]
    spread = [f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})" for values in columns]
    return [*spread, f"{mean(gaps[0]):.4f}", f"{max(gaps[1]):.4f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/fp8_learning"))
    args = parser.parse_args()
    runs: dict[str, list[list[dict]]] = {name: [] for name in VARIANTS}
    for seed in args.seeds:
        folder = (args.out / f"seed{seed}").absolute()
        model = warm_up(folder, seed, args.device)
        for number, (name, extra) in enumerate(VARIANTS.items()):
            runs[name].append(train(folder, folder / f"run{number}", model, extra, args, seed))
    print("| rollout | reward, first third | second | last | held-out accuracy | mean gap | largest |")
    print("|---|---|---|---|---|---|---|")
    for name, found in runs.items():
        print(f"| {name} | {' | '.join(cells(found))} |")


if __name__ == "__main__":
    main()
