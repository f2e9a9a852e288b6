"""Folders of runs made without training."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

from lockstep.observability.jsonl import json_line
from lockstep.observability.rollout_log import dump_generations


def make_run(
    folder: Path,
    steps: int = 20,
    prompts: int = 4,
    n: int = 4,
    dump_every: int = 1,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run that learns: config, metrics, timeline, and dumps of training samples and of a validation."""
    folder.mkdir(parents=True)
    dumps = {"rollout_data_dir": str(folder / "rollouts"), "validation_data_dir": str(folder / "validation")}
    trainer = {"default_local_dir": str(folder), "total_training_steps": steps, "experiment_name": folder.name} | dumps
    config = {"trainer": trainer, "data": {"max_response_length": 64}, "actor_rollout_ref": {"rollout": {"n": n}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | (settings or {})))
    with open(folder / "metrics.jsonl", "wb") as metrics, open(folder / "timeline.jsonl", "wb") as timeline:
        for step in range(1, steps + 1):
            metrics.write(json_line({"step": step, "time": 1.7e9 + 10 * step} | step_metrics(step, steps)))
            timeline.write(timeline_line(step))
    for step in range(dump_every, steps + 1, dump_every):
        dump_step(folder / "rollouts", step, steps, prompts, n)
    dump_step(folder / "validation", steps, steps, prompts, 2)
    return folder


def step_metrics(step: int, steps: int) -> dict[str, float]:
    noise = random.Random(step)
    progress = step / steps
    return {
        "training/global_step": step,
        "critic/score/mean": 0.2 + 0.7 * progress + noise.gauss(0, 0.02),
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "actor/entropy": 2.0 * math.exp(-2 * progress),
        "actor/grad_norm": 0.5 + noise.random() / 10,
        "actor/pg_loss": noise.gauss(0, 0.01),
        "response_length/mean": 40 + 10 * progress,
        "response_length/clip_ratio": 0.01,
        "training/rollout_log_probs_gap": 1e-4,
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 5.0,
        "timing_s/step": 10.0,
        "perf/throughput": 1000.0 + noise.random(),
        "perf/total_num_tokens": 10_000,
    } | ({"val-core/math/reward/mean@2": 0.3 + 0.5 * progress} if step % 5 == 0 else {})


def timeline_line(step: int) -> bytes:
    spans = [["step", "controller", 0, 0, 10_000_000], ["gen", "controller", 0, 0, 4_000_000]]
    spans += [["update_actor", "controller", 0, 5_000_000, 5_000_000]]
    spans += [["generate_sequences", "actor_rollout", rank, 1000, 3_900_000] for rank in range(2)]
    line = {"step": step, "begin_us": (1_700_000_000 + 10 * step) * 1_000_000, "spans": spans}
    return json.dumps(line).encode() + b"\n"


def dump_step(folder: Path, step: int, steps: int, prompts: int, n: int) -> None:
    noise = random.Random(step)
    rows = [(prompt, sample) for prompt in range(prompts) for sample in range(n)]
    scores = [float(noise.random() < 0.2 + 0.7 * step / steps) for _ in rows]
    lengths = [noise.randint(5, 64) for _ in rows]
    dump_generations(
        [f"What is {prompt} + {prompt}?" for prompt, _ in rows],
        [
            f"It is {2 * prompt}." if score else f"Perhaps {noise.randint(0, 99)}?"
            for (prompt, _), score in zip(rows, scores)
        ],
        [str(2 * prompt) for prompt, _ in rows],
        scores,
        {
            "uid": [f"0:{step}-{prompt}" for prompt, _ in rows],
            "index": [prompt for prompt, _ in rows],
            "finish_reason": ["length" if length == 64 else "stop" for length in lengths],
            "length": lengths,
            "advantage": [score - 0.5 for score in scores],
        },
        {"acc": scores},
        folder,
        step,
    )
