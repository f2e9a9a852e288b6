"""`lockstep generate` and `lockstep eval`: the numbers of a training run's validation, resumable, with clear errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep import cli
from lockstep.trainer import generated_rows, main_eval, main_generation, main_ppo
from lockstep.trainer.generated_rows import GeneratedRows
from tests.tiny import write_rows

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(ord(c) % 7 for c in solution_str) % 3
    return {"score": number / 10, "acc": number == 0, "pred": str(number)}
"""


@pytest.fixture
def command(tiny_run_files: Path, tmp_path: Path) -> list[str]:
    """Arguments of a small generation to `tmp_path/out.parquet`."""
    return [
        f"model.path={tiny_run_files}/model",
        f"data.path={tiny_run_files}/val.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        "data.n_samples=2",
        "data.batch_size=3",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


SAMPLING = {
    "greedy": ["do_sample=false"],
    "sampled": ["do_sample=true", "temperature=0.8", "top_p=0.9"],
}


@pytest.mark.parametrize(("kind", "n"), [("greedy", 1), ("sampled", 2)])
def test_generate_and_eval_give_the_numbers_of_the_last_validation(
    kind: str, n: int, overrides: list[str], tiny_run_files: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    scored_by = [f"custom_reward_function.path={tmp_path}/reward.py"]
    sampling = [f"rollout.val_kwargs.{setting}" for setting in (*SAMPLING[kind], f"n={n}")]
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=false"]
    run = ["algorithm=grpo", *overrides, *scored_by, *sampling, *steps, "rollout.n=2", "data.val_batch_size=3"]
    assert main_ppo.main(run) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    trained = {name: value for name, value in last.items() if name.startswith(("val-core/", "val-aux/"))}
    assert f"val-core/openai/gsm8k/acc/{'mean@1' if n == 1 else 'maj@2/mean'}" in trained

    generate = [
        f"model.path={tmp_path}/run/global_step_2/actor/huggingface",
        f"data.path={tiny_run_files}/val.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        f"data.n_samples={n}",
        "data.batch_size=2",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        "rollout.top_k=-1",
        "rollout.top_p=1.0",
        *(f"rollout.{setting}" for setting in SAMPLING[kind]),
    ]
    assert main_generation.main(generate) == 0
    scores = [f"data.path={tmp_path}/out.parquet", f"data.output_path={tmp_path}/metrics.json"]
    assert main_eval.main([*scores, *scored_by]) == 0
    evaluated = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert {name: evaluated[name] for name in trained} == trained
