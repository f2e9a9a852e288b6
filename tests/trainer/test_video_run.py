"""Runs on rows with videos: GRPO, supervised training and generation, and what is refused before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoModelForImageTextToText

from lockstep import cli
from tests.data.test_videos import FILES, video_file
from tests.tiny import save_tiny_model
from tests.tiny_vision import needs_torchvision, save_tiny_vision_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, train.parquet: rows with a video as frames, with an image and a video, with text alone."""
    folder = tmp_path_factory.mktemp("videos")
    save_tiny_vision_model(folder / "model", max_position_embeddings=4096)
    frames = [{"bytes": file} for file in FILES]
    rows: list[dict[str, Any]] = [
        {"prompt": "<video>Find x.", "videos": [frames], "images": []},
        {"prompt": "<video>Find x.", "videos": [frames[::-1]], "images": []},
        {"prompt": "<image>and <video>?", "videos": [frames[:3]], "images": frames[:1]},
        {"prompt": "Find x.", "videos": [], "images": []},
    ]
    for i, row in enumerate(rows):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        row |= {"data_source": "hiyouga/geometry3k", "reward_model": {"style": "rule", "ground_truth": str(i)}}
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pairs = [row | {"prompt": row["prompt"][0]["content"], "response": "x is 3"} for row in rows]
    pd.DataFrame(pairs).to_parquet(folder / "sft.parquet")
    return folder


def grpo(files: Path, run: Path, *more: str, model: Path | None = None) -> list[str]:
    return [
        "grpo",
        f"model={model or files / 'model'}",
        f"data={files}/train.parquet",
        "batch_size=4",
        "n=2",
        "steps=1",
        "max_prompt_length=200",
        "max_response_length=4",
        f"run_dir={run}",
        "trainer.device=cpu",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.vllm
@needs_torchvision
@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_grpo(files: Path, tmp_path: Path, engine: str) -> None:
    """The log-probs of the rollout are those of training; the tower learns; the dump shows the frames."""
    more = [
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        f"data.val_files={files}/train.parquet",
    ]
    assert cli.main(grpo(files, tmp_path / "run", *more)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "actor/pg_loss" in line]
    assert step["training/rollout_probs_diff_max"] < 1e-4
    assert list((tmp_path / "rollouts").rglob("*.jpeg"))
    trained = next((tmp_path / "run").rglob("huggingface"))
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
        for folder in (files / "model", trained)
    )
    assert all((before[name] - after[name]).abs().max() > 0 for name in before if "visual" in name)


@pytest.mark.slow
@pytest.mark.vllm
@needs_torchvision
def test_sft_then_generate_from_a_file(files: Path, tmp_path: Path) -> None:
    sft = [f"model={files}/model", f"data={files}/sft.parquet", "data.prompt_key=prompt", "data.response_key=response"]
    sft += ["batch_size=4", "steps=1", f"run_dir={tmp_path}/sft", "trainer.device=cpu"]
    assert cli.main(["sft", *sft]) == 0
    video = video_file(tmp_path / "a.mp4", 30, 10)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "<video>?", "videos": [video.name], "answer": "1"}) + "\n"
    )
    generate = [f"model.path={tmp_path}/sft/global_step_1/huggingface", f"data.path={tmp_path}/rows.jsonl"]
    generate += [
        f"data.output_path={tmp_path}/answers.parquet",
        "rollout.prompt_length=200",
        "rollout.response_length=4",
    ]
    assert cli.main(["generate", *generate, "trainer.device=cpu"]) == 0
    assert len(pd.read_parquet(tmp_path / "answers.parquet")) == 1


def refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str, model: Path | None = None
) -> str:
    assert cli.main(grpo(files, tmp_path / "run", *more, model=model)) != 0
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["actor_rollout_ref.rollout.name=server", "actor_rollout_ref.rollout.server.urls=[http://127.0.0.1:9]"],
            "server",
        ),
        (
            ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.server.urls=[http://127.0.0.1:9]"],
            "sglang",
        ),
    ],
)
def test_engines_without_videos_are_refused(
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("lockstep.utils.vision.find_spec", lambda name: object())
    error = refused(files, tmp_path, capsys, *settings)
    assert "data.train_files" in error and "row 0 has 'videos'" in error
    assert f"actor_rollout_ref.rollout.name={message} takes no videos; set embedded or hf" in error


def test_a_run_without_torchvision_is_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.utils.vision.find_spec", lambda name: None)
    error = refused(files, tmp_path, capsys)
    assert "row 0 has 'videos', but videos are prepared with torchvision, which is not installed" in error


def test_models_without_videos_are_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_vision_model(tmp_path / "llava", "llava")
    error = refused(files, tmp_path, capsys, model=tmp_path / "llava")
    assert "row 0 has 'videos', but models of type llava read no videos here" in error
    save_tiny_model(tmp_path / "text")
    error = refused(files, tmp_path, capsys, model=tmp_path / "text")
    assert "row 0 has 'videos': only text is supported" in error


@pytest.mark.slow
@pytest.mark.vllm
@needs_torchvision
def test_agents_are_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tool.py").write_text("def now() -> str:\n    'The time.'\n    return 'noon'\n")
    tool = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path}/tool.py"
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    error = refused(files, tmp_path, capsys, loop, tool)
    assert "row 0 has videos, which agents do not read" in error
