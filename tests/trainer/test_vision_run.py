"""Every program on a tiny vision-language model and rows with images, from the command line."""

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from lockstep import cli
from lockstep.data.rows import write_rows
from lockstep.models.processor import load_processor
from lockstep.verl.trainer.main_ppo import main as verl_main_ppo
from tests.tiny_vision import save_tiny_vision_model, tiny_image

pytestmark = pytest.mark.slow

GEO3K = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 2048,
    "data.filter_overlong_prompts": True,
    "data.truncation": "error",
    "data.image_key": "images",
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 10,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.01,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 20,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache": True,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.enable_chunked_prefill": False,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 20,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "algorithm.use_kl_in_reward": False,
    "trainer.critic_warmup": 0,
    "trainer.nnodes": 1,
    "trainer.save_freq": 20,
    "trainer.test_freq": 5,
    "trainer.total_epochs": 15,
}
"""The settings of verl's example for Geometry3K with Qwen2.5-VL."""
ONE_CPU = {
    "actor_rollout_ref.rollout.name": "embedded",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.device": "cpu",
    "trainer.logger": "console",
    "data.train_batch_size": 4,
    "data.max_response_length": 6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "trainer.total_training_steps": 1,
}


def png(seed: int, width: int = 48) -> dict[str, bytes]:
    file = io.BytesIO()
    tiny_image(width, seed=seed).save(file, format="PNG")
    return {"bytes": file.getvalue()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, train.parquet (images of two sizes, one row with two, one without), sft.parquet"""
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision_model(folder / "model", max_position_embeddings=4096)
    rows = []
    for i in range(6):
        images = [png(i, 48 if i % 2 else 64)] * (2 if i == 3 else 0 if i == 4 else 1)
        rows.append(
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [{"role": "user", "content": "<image>" * len(images) + "Find x."}],
                "images": images,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"split": "train", "index": i},
            }
        )
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pairs = [{"prompt": row["prompt"][0]["content"], "images": row["images"], "response": "x is 3"} for row in rows]
    pd.DataFrame(pairs).to_parquet(folder / "sft.parquet")
    return folder


def overrides(settings: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def test_verl_geo3k_command(files: Path, tmp_path: Path) -> None:
    """Trains, validates and saves a checkpoint with its processor, which `export` takes."""
    paths = {
        "data.train_files": files / "train.parquet",
        "data.val_files": files / "train.parquet",
        "actor_rollout_ref.model.path": files / "model",
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.rollout_data_dir": tmp_path / "rollouts",
    }
    assert verl_main_ppo(overrides(GEO3K | paths | ONE_CPU | {"trainer.save_freq": 1})) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("actor/pg_loss" in line for line in lines)
    assert any(key.startswith("val-core/hiyouga/geometry3k") for line in lines for key in line)
    assert list((tmp_path / "rollouts").rglob("*.png"))

    trained = tmp_path / "run" / "global_step_1" / "actor" / "huggingface"
    assert load_processor(trained) is not None
    exported = tmp_path / "exported"
    assert cli.main(["export", str(tmp_path / "run" / "global_step_1"), "--out", str(exported)]) == 0
    assert load_processor(exported) is not None
    AutoModelForImageTextToText.from_pretrained(exported)


def test_sft_then_generate_and_eval(files: Path, tmp_path: Path) -> None:
    sft = [
        f"model={files}/model",
        f"data={files}/sft.parquet",
        "data.prompt_key=prompt",
        "data.response_key=response",
        "batch_size=3",
        "steps=2",
        "lr=1e-2",
        f"run_dir={tmp_path}/sft",
        "trainer.device=cpu",
    ]
    assert cli.main(["sft", *sft]) == 0
    model = tmp_path / "sft" / "global_step_2" / "huggingface"
    assert load_processor(model) is not None
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(f).named_parameters()) for f in (files / "model", model)
    )
    moved = [(before[name] - after[name]).abs().max() > 1e-4 for name in before if "visual" in name]
    assert all(moved)
    generate = [
        f"model.path={model}",
        f"data.path={files}/train.parquet",
        f"data.output_path={tmp_path}/answers.parquet",
        "data.n_samples=2",
        "rollout.prompt_length=200",
        "rollout.response_length=4",
        "trainer.device=cpu",
    ]
    assert cli.main(["generate", *generate]) == 0
    answers = pd.read_parquet(tmp_path / "answers.parquet")
    assert len(answers) == 6 and all(len(a) == 2 for a in answers["responses"])
    assert cli.main(["eval", f"data.path={tmp_path}/answers.parquet"]) == 0


def test_reward_model_of_pairs_with_images(files: Path, tmp_path: Path) -> None:
    """Its last validation equals transformers' body with the saved head, pair by pair."""
    images = [[tiny_image(48 if i % 2 else 64, seed=i)] * (i % 3) for i in range(6)]
    rows = [
        {"prompt": "<image>" * len(found) + "what?", "chosen": f"yes {i}", "rejected": "no", "images": found}
        for i, found in enumerate(images)
    ]
    write_rows(rows, tmp_path / "pairs.jsonl")
    folder = save_tiny_vision_model(tmp_path / "model")
    settings = {
        "model.path": folder,
        "data.train_files": tmp_path / "pairs.jsonl",
        "data.val_files": tmp_path / "pairs.jsonl",
        "data.train_batch_size": 3,
        "data.max_length": 128,
        "optim.lr": 1e-3,
        "trainer.test_freq": 2,
        "trainer.device": "cpu",
        "trainer.default_local_dir": tmp_path / "run",
    }
    assert cli.main(["rm", *overrides(settings)]) == 0
    trained = tmp_path / "run" / "global_step_2" / "huggingface"
    processor = load_processor(trained)
    model = AutoModelForImageTextToText.from_pretrained(trained).eval()
    head = load_file(trained / "model.safetensors")["score.weight"]

    def score(row: dict[str, Any], answer: str) -> torch.Tensor:
        content = [*({"type": "image"} for _ in row["images"]), {"type": "text", "text": "what?"}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        text += answer + processor.tokenizer.eos_token
        inputs = processor(text=[text], images=row["images"] or None, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            return head @ model.model(**inputs).last_hidden_state[0, -1]

    margins = torch.stack([score(row, row["chosen"]) - score(row, row["rejected"]) for row in rows])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    loss = next(line["val/loss"] for line in reversed(lines) if "val/loss" in line)
    assert loss == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), abs=1e-5)
    assert not torch.equal(
        model.model.visual.patch_embed.proj.weight,
        AutoModelForImageTextToText.from_pretrained(folder).model.visual.patch_embed.proj.weight,
    )
    grpo = ["batch_size=4", "n=2", "max_prompt_length=160", "max_response_length=6", "steps=1", "trainer.device=cpu"]
    paths = [f"model={folder}", f"data={files}/train.parquet", f"run_dir={tmp_path}/grpo"]
    judge = ["reward_model.enable=true", f"reward_model.model.path={tmp_path}/run"]
    assert cli.main(["grpo", *paths, *grpo, *judge]) == 0


def test_plan_counts_the_tower(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"model={files}/model", f"data={files}/train.parquet", "batch_size=4", "n=2", "--device", "A100-80G"]
    assert cli.main(["plan", "grpo", *settings]) == 0
    assert capsys.readouterr().out
