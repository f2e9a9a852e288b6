"""Packed rows: a prompt that several rows have is computed once, and nothing changes by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from lockstep.config.model import HFModelConfig
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.attention import ATTENTION_NAME, PackedAttention
from lockstep.models.loading import load_causal_lm
from lockstep.models.packing import ForwardRows, Layout, forward_rows
from lockstep.models.token_models import PolicyModel
from tests.models.architectures import VOCAB, save_tiny_model, train_engine
from tests.tiny import random_batch, tiny_config

CPU = torch.device("cpu")


def grouped_batch() -> TensorDict:
    """Rows 0, 1, 2 and 5 have one prompt, 3, 4 and 7 another; row 5 has no response."""
    batch = random_batch(9)
    width = batch["prompts"].shape[1]
    for row, source in {1: 0, 2: 0, 5: 0, 4: 3, 7: 3}.items():
        for key in ("input_ids", "attention_mask"):
            batch[key][row, :width] = batch[key][source, :width]
    batch["attention_mask"][5, width:] = 0
    batch["response_mask"][5] = 0
    batch["prompts"] = batch["input_ids"][:, :width]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return batch


def packed_rows(batch: TensorDict) -> ForwardRows:
    return forward_rows(batch, CPU, layout="packed")


def test_a_shared_prompt_is_there_once() -> None:
    batch = grouped_batch()
    rows = packed_rows(batch)
    mask, width = batch["attention_mask"], batch["prompts"].shape[1]
    saved = 2 * mask[0, :width].sum() + 2 * mask[3, :width].sum()
    assert rows.input_ids.shape[1] == mask.sum() - saved
    assert isinstance(rows.context, PackedAttention) and rows.context.prefixes is not None
    assert [length > 0 for _, length in rows.context.prefixes] == [
        False,
        True,
        True,
        False,
        True,
        False,
        False,
        True,
        False,
    ]


def test_rows_with_prompts_of_their_own_are_whole() -> None:
    rows = packed_rows(random_batch(6))
    assert isinstance(rows.context, PackedAttention) and rows.context.prefixes is None


def test_the_same_prompt_with_other_padding_under_the_mask_is_shared() -> None:
    batch = grouped_batch()
    hidden = batch["attention_mask"][1] == 0
    batch["input_ids"][1][hidden] = 7
    assert packed_rows(batch).input_ids.shape == packed_rows(grouped_batch()).input_ids.shape


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("llama", {}),
        ("qwen3", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    ],
)
def test_log_probs_and_gradients_are_those_of_whole_rows(kind: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = tiny_config(kind, **changes)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME))
    batch, results = grouped_batch(), []
    layouts: tuple[Layout, ...] = ("packed", "padded")
    for layout in layouts:
        policy.zero_grad()
        log_probs = policy(forward_rows(batch, CPU, layout=layout))["log_probs"]
        log_probs.square().sum().backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        results.append((log_probs.detach(), torch.cat([g.flatten() for g in gradients])))
    (shared, shared_gradient), (whole, whole_gradient) = results
    torch.testing.assert_close(shared, whole, atol=2e-6, rtol=0)
    torch.testing.assert_close(shared_gradient, whole_gradient, atol=5e-5, rtol=1e-5)


def test_the_token_budget_of_aligned_rows_counts_their_padding(tmp_path: Path) -> None:
    """RoBERTa counts positions by itself. One row has 9 tokens, the others 2."""
    save_tiny_model("roberta", tmp_path)
    engine = train_engine(load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU), packed=True)
    batch = random_batch(8)
    batch["input_ids"] = batch["input_ids"] % (VOCAB - 3) + 3
    width = batch["prompts"].shape[1]
    batch["attention_mask"].zero_()
    batch["attention_mask"][:, width - 1 : width + 1] = 1
    batch["attention_mask"][3, width - 1 : width + 8] = 1
    batch["response_mask"] = batch["attention_mask"][:, width:]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    parts = engine._partitions(batch, MicroBatching(max_tokens=24))
    sizes = [forward_rows(batch[part], CPU, engine.layout).input_ids.numel() for part in parts]
    assert engine.layout == "aligned" and sizes == [14, 9]
    whole = engine.model(forward_rows(batch, CPU, engine.layout))["log_probs"]
    for part in parts:
        alone = engine.model(forward_rows(batch[part], CPU, engine.layout))["log_probs"]
        torch.testing.assert_close(alone, whole[part], atol=2e-6, rtol=0)


def test_aligned_rows_are_computed_by_the_models_own_forward_as_one_batch() -> None:
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(tiny_config("qwen3"), attn_implementation="eager"))
    batch, results = grouped_batch(), []
    layouts: tuple[Layout, ...] = ("aligned", "rows")
    for layout in layouts:
        policy.zero_grad()
        rows = forward_rows(batch, CPU, layout=layout)
        log_probs = policy(rows)["log_probs"]
        log_probs.square().sum().backward()
        results.append((log_probs.detach(), [p.grad for p in policy.parameters()], rows))
    (together, gradients, aligned), (alone, expected, _) = results
    assert aligned.input_ids.shape == (len(batch), batch["attention_mask"].sum(1).max())
    assert aligned.input_ids.flatten()[aligned.last].tolist() == [
        row["input_ids"][row["attention_mask"].bool()][-1].item() for row in batch
    ]
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)
    torch.testing.assert_close(gradients, expected, atol=5e-5, rtol=1e-5)
