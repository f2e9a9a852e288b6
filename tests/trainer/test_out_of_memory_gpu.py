"""Real out of memory on a GPU: a run whose micro-batches are far too large ends like one with the right size."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from lockstep.engines.train.train_engine import MicroBatching
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run.smaller_micro_batches import STATE
from lockstep.trainer.run.training_run import TRAINER_STATE
from lockstep.utils.state_file import load_state
from tests.engines.train import cases
from tests.engines.train.cases import Case
from tests.metrics import metrics_of
from tests.tiny import random_batch, save_tiny_model, tiny_config, tiny_tokenizer, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GB = 10**9
KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""Of Qwen2.5-0.5B, with a smaller vocabulary."""
LEFT_GB = 28
"""For a run of it: about 7 for weights, gradients and optimizer, and 0.9 MB of activations per token."""


@contextmanager
def memory_left(num_bytes: int) -> Iterator[None]:
    """Others hold the rest of the GPU's memory."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = [torch.empty(max(0, free - num_bytes), dtype=torch.uint8, device="cuda")]
    try:
        yield
    finally:
        held.clear()
        gc.collect()
        torch.cuda.empty_cache()


def save_model(folder: Path, **shape: Any) -> Path:
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_config(**shape)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def grpo(files: Path, run: Path, device: str, response: int, *extra: str) -> tuple[list[dict[str, Any]], Any]:
    """The metrics and the weights of two steps of 16 prompts with 8 samples each, in one update."""
    overrides = [
        f"data.train_files={files}/train.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        f"data.max_response_length={response}",
        f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={files}/reward.py",
        "reward_model.timeout_s=null",
        "trainer.total_training_steps=2",
        "trainer.total_epochs=2",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        "trainer.check_memory=false",
        f"trainer.device={device}",
        f"trainer.default_local_dir={run}",
        *extra,
    ]
    assert main(overrides) == 0
    weights = load_file(next((run / "global_step_2" / "actor").rglob("model.safetensors")))
    return metrics_of(run), weights


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Mean over all parameters."""
    total = sum(float((weights[name].double() - other.double()).abs().sum()) for name, other in others.items())
    return total / sum(other.numel() for other in others.values())


def write_files(folder: Path, shape: dict[str, Any]) -> Path:
    save_model(folder / "model", **shape)
    write_rows(folder / "train.parquet", 32)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
    )
    return folder


def check_run(files: Path, tmp_path: Path, device: str, response: int) -> None:
    """Equal bit for bit if two runs with the right size are, otherwise as close as they are."""
    with memory_left(LEFT_GB * GB):
        rows, weights = grpo(files, tmp_path / "given", device, response, f"{KEY}=1000000")
    retries = rows[-1]["perf/out_of_memory_retries"]
    assert retries > 0 and rows[0]["perf/out_of_memory_retries"] == retries
    size = load_state(tmp_path / "given" / "global_step_2" / TRAINER_STATE)[STATE]["sizes"][KEY]["size"]
    with memory_left(2 * LEFT_GB * GB):  # the first run leaves something behind
        small = [grpo(files, tmp_path / f"small{i}", device, response, f"{KEY}={size}") for i in range(2)]
    noise, found = distance(small[0][1], small[1][1]), distance(weights, small[0][1])
    print(f"{retries:.0f} retries; {size} tokens; mean difference {found:.3g}, of two equal runs {noise:.3g}")
    assert all("perf/out_of_memory_retries" not in row for run, _ in small for row in run)
    assert rows[0]["critic/score/mean"] == small[0][0][0]["critic/score/mean"]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert rows[0][name] == pytest.approx(small[0][0][0][name], rel=1e-3, abs=1e-5), name
    assert found <= 2 * noise


def test_grpo_ends_with_the_weights_of_the_right_size(tmp_path: Path) -> None:
    files = write_files(tmp_path, SHAPE)
    check_run(files, tmp_path, "cuda", 512)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_passes_of_an_engine(compute: torch.dtype, checkpointing: bool, tmp_path: Path) -> None:
    """A forward without and one with gradients, of 2 GB each and more, with 1.5 GB left."""
    folder = save_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    case = Case(device="cuda", compute=compute, checkpointing=checkpointing)
    batch = random_batch(4096, prompt=64, response=190)

    def passes(micro: MicroBatching, left: int | None) -> tuple[Any, ...]:
        engine = cases.build_engine(folder, case)

        def loss_fn(outputs: dict[str, torch.Tensor], rows: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = (outputs["log_probs"] * rows["response_mask"]).mean(1).sum() / len(batch)
            return loss, {"loss": loss}

        free, _ = torch.cuda.mem_get_info()
        with memory_left(free if left is None else left):
            log_probs = engine.forward(batch, micro, temperature=1.0)["log_probs"].numpy()
            loss = engine.forward_backward(batch, loss_fn, micro, temperature=1.0)["loss"]
            lowered = engine.limits.take()
            norm = engine.optimizer_step()
        return log_probs, loss, norm, lowered, engine.limits.sizes

    log_probs, loss, norm, lowered, sizes = passes(MicroBatching(max_tokens=10**6, key=KEY), 3 * GB // 2)
    assert lowered and sizes[KEY] < 10**6
    expected = passes(MicroBatching(max_tokens=sizes[KEY], key=KEY), None)
    assert expected[3] == []
    tolerance = 1e-4 if compute == torch.float32 else 1e-2
    np.testing.assert_allclose(log_probs, expected[0], atol=20 * tolerance)
    assert loss == pytest.approx(expected[1], rel=tolerance) and norm == pytest.approx(expected[2], rel=10 * tolerance)
