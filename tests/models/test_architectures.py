"""Every causal language model of the installed transformers at a tiny size: right within rounding, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.engines.rollout import GenerationRequest, RolloutEngine, SamplingParams
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from tests.models.architectures import (
    DOCS,
    EXAMPLES,
    MODEL_TYPES,
    NOT_CAUSAL,
    SKIPPED,
    TITLE,
    VARIANTS,
    VOCAB,
    Support,
    header,
    save_tiny_model,
    support,
    table_row,
)
from tests.tiny import random_batch

pytestmark = pytest.mark.first

SPLITS = (MicroBatching(num_rows=3), MicroBatching(num_rows=2))
"""Of the forward alone, and of forward and backward."""
PROMPT_LENGTHS = (5, 11, 2)
REGENERATE = "run python -m tests.models.architectures"


QUICK_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "phi3",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "mamba",
    "bart",
    "cpmant",
)
"""Some of each way to train, in `make test`; the others are slow."""


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=[] if model_type in QUICK_TYPES else pytest.mark.slow)
        for model_type in MODEL_TYPES
        if model_type not in SKIPPED
    ],
)
def test_a_type_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    found = check(model_type, tmp_path)
    if is_documented():
        assert table_row(model_type, found) in DOCS.read_text().splitlines(), REGENERATE


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_right(variant: str, tmp_path: Path) -> None:
    model_type, changes = VARIANTS[variant]
    assert check(model_type, tmp_path, **changes).rollout != "none"


@pytest.mark.parametrize("model_type", NOT_CAUSAL)
def test_encoders_are_refused(model_type: str, tmp_path: Path) -> None:
    save_tiny_model(model_type, tmp_path, is_decoder=False)
    message = support(tmp_path).refusals["training"]
    assert "is not a causal language model: what it computes for a token changes with later tokens" in message


def test_youtu_differs_from_transformers_by_rounding_alone(tmp_path: Path) -> None:
    """With large weights log-probs reach -70, where float32 rounds by 1e-4: transformers is as far from float64 as we are."""
    naive = save_tiny_model("youtu", tmp_path, initializer_range=1.0, embedding_initializer_range=2.0)
    batch = make_batch()
    ours = support(tmp_path).engines["padded"].forward(batch, SPLITS[0])["log_probs"] * batch["response_mask"]
    with torch.no_grad():
        theirs, exact = naive_log_probs(naive, batch), naive_log_probs(naive.double(), batch)
    assert exact.min() < -30
    assert (ours - exact).abs().max() <= 5 * (theirs - exact).abs().max() + 1e-6


def check(model_type: str, folder: Path, **changes: Any) -> Support:
    """The numbers of all engines that serve the tiny model; the others must name it when they refuse it."""
    naive = save_tiny_model(model_type, folder, **changes)
    found = support(folder)
    for path, message in found.refusals.items():
        named = any(name in message for name in (model_type, type(naive).__name__))
        assert named, f"the refusal of {path} names no model: {message}"
    if found.training != "refused":
        check_training(found, naive)
    if found.rollout_engine is not None:
        check_greedy(found.rollout_engine, naive)
    return found


def test_the_table_lists_every_type() -> None:
    assert DOCS.read_text().startswith("# Models")
    if not is_documented():
        pytest.skip(f"docs/models.md is about another transformers than {transformers.__version__}")
    _, title, written = DOCS.read_text().partition(TITLE)
    written = title + written
    assert written.startswith(header()), REGENERATE
    listed = [line.split("|")[1].strip() for line in written.removeprefix(header()).splitlines()]
    assert listed == sorted(MODEL_TYPES), REGENERATE
    assert set(SKIPPED) | set(EXAMPLES) <= set(MODEL_TYPES)
    for model_type in SKIPPED:
        assert table_row(model_type, None) in written.splitlines(), REGENERATE


def is_documented() -> bool:
    """Whether docs/models.md is about the installed transformers."""
    return f"transformers {transformers.__version__}," in DOCS.read_text()


def make_batch() -> TensorDict:
    """Rows of 17, 4 and 19 tokens; the first and the third have the same prompt."""
    batch = random_batch(3, prompt=12, response=8, vocab=VOCAB, seed=393)
    num_prompt = batch["prompts"].shape[1]
    for name in ("input_ids", "attention_mask"):
        batch[name][2, :num_prompt] = batch[name][0, :num_prompt]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return batch


def row_log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """log p (L, V) of what follows each token of one row (L,), by transformers' own forward."""
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def naive_log_probs(model: PreTrainedModel, batch: TensorDict) -> Tensor:
    """(B, R) of response tokens, row by row; 0 where response_mask is 0."""
    rows = []
    for row in batch:
        present = row["attention_mask"].bool()
        ids, width = row["input_ids"][present], row["responses"].shape[0]
        columns = row["response_mask"].nonzero().flatten()
        places = int(present[:-width].sum()) + columns
        found = row_log_probs(model, ids)[places - 1, ids[places]]
        rows.append(torch.zeros(width).index_put((columns,), found))
    return torch.stack(rows)


def weighted_sum(log_probs: Tensor, batch: TensorDict) -> Tensor:
    return (log_probs * batch["advantages"] * batch["response_mask"]).sum()


def check_training(found: Support, naive: PreTrainedModel) -> None:
    batch = make_batch()
    expected = naive_log_probs(naive, batch)
    weighted_sum(expected, batch).backward()
    for layout in ("checkpointed", "packed", "padded"):
        if engine := found.engines.get(layout):
            got = engine.forward(batch, SPLITS[0])["log_probs"] * batch["response_mask"]
            error = float((got - expected.detach()).abs().max())
            assert error <= 1e-4, f"{layout}: log-probs are off by {error:.2g}"
            check_gradients(engine, naive, batch, layout)
        if engine and layout == "checkpointed":  # the engines share their modules
            engine.model.transformer.gradient_checkpointing_disable()


def check_gradients(engine: FsdpEngine, naive: PreTrainedModel, batch: TensorDict, layout: str) -> None:
    """Of each parameter: within 1e-3 of its norm, or 1e-5 of the norm of all."""
    engine.model.zero_grad()
    engine.forward_backward(batch, lambda out, rows: (weighted_sum(out["log_probs"], rows), {}), SPLITS[1])
    ours = {engine.model.hf_name(name): parameter for name, parameter in engine.model.named_parameters()}
    theirs = dict(naive.named_parameters())
    assert set(ours) == set(theirs)
    expected = {name: gradient_of(parameter) for name, parameter in theirs.items()}
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = float((gradient_of(ours[name]) - gradient).norm())
        bound = float(1e-3 * gradient.norm() + 1e-5 * norm)
        assert error <= bound, f"{layout}: gradient of {name} is off by {error:.2g}, allowed {bound:.2g}"


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@torch.no_grad()
def check_greedy(engine: RolloutEngine, naive: PreTrainedModel) -> None:
    """Each token is the likeliest one after the tokens before it, with its log-prob."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    completions = engine.generate([GenerationRequest(prompt, sampling) for prompt in prompts])
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 8
        expected = row_log_probs(naive, torch.tensor(prompt + completion.token_ids))[len(prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.log_probs), chosen, atol=1e-3, rtol=0)
        torch.testing.assert_close(chosen, expected.amax(-1), atol=1e-3, rtol=0)
