"""Compare an engine's computation with transformers' own eager forward, when the engine loads a model.

a few random rows ─► our path (packed and padded rows, prefill and decode)  ─┐
                 └─► transformers' layers, eager attention, one row at a time ─┴─► the same log-probs, or the model is refused
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.decoder_layer import reference_layers

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Largest mean difference that counts as rounding, relative to the scale of the log-probs or values."""

PROMPT_LENGTH, RESPONSE_LENGTH = 4, 12


@contextmanager
def transformers_forward(model: PreTrainedModel, attention: str = "eager") -> Iterator[None]:
    """The model runs transformers' own layers and attention inside; call it without an attention context."""
    text: Any = model.config.get_text_config()
    before = text._attn_implementation
    if before != attention:
        model.set_attn_implementation(attention)
    try:
        with reference_layers(model):
            yield
    finally:
        if before != attention:
            model.set_attn_implementation(before)


@contextmanager
def refuse_errors(model: nn.Module) -> Iterator[None]:
    """Turn an error of the model's code into a refusal that names the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"{type(model).__name__} cannot be computed here: {type(error).__name__}: {error}") from error


@torch.no_grad()
def reference_log_probs(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """log p (L - 1,) float32 of every token after the first of each row, one row at a time."""
    device, found = next(model.parameters()).device, []
    with transformers_forward(model):
        for row in rows:
            ids = torch.tensor([list(row)], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1))
    return found


def check_log_probs(
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    model: nn.Module,
    path: str,
    advice: str,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
) -> None:
    """ValueError if they differ beyond rounding.

    path: what computed `got` ("the embedded rollout"); advice: what to set instead; dtype: of the computation, by default of the
    model's parameters; scale: of the numbers, by default the standard deviation of log-probs, at least 1.
    """
    ours, theirs = (torch.cat([t.detach().float().cpu() for t in found]) for found in (got, expected))
    dtype = dtype or next(model.parameters()).dtype
    if scale is None:
        scale = max(1.0, float(theirs.std())) if theirs.numel() > 1 else 1.0
    error = float((ours - theirs).abs().mean())
    if not error <= BOUNDS[dtype] * scale:
        worst = int((ours - theirs).abs().nan_to_num(float("inf")).argmax())
        raise ValueError(
            f"{path} computes {type(model).__name__} differently from transformers: {error:.2g} per token on average in "
            f"{str(dtype).removeprefix('torch.')} (worst: {ours[worst]:.4g} instead of {theirs[worst]:.4g}). {advice}"
        )


def check_outputs(
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    batch: TensorDict,
    *,
    model: nn.Module,
    path: str,
    dtype: torch.dtype,
) -> None:
    """`check_log_probs` of a training engine's outputs (B, R) for `check_batch`."""
    mask = batch["response_mask"].bool()
    advice = "docs/models.md lists the architectures that are served."
    for name, values in expected.items():
        ours, theirs = got[name].cpu()[mask], values.cpu()[mask]
        scale = None if name == "log_probs" else float(theirs.square().mean().sqrt())  # values may be small
        check_log_probs([ours], [theirs], model=model, path=path, advice=advice, dtype=dtype, scale=scale)


def check_batch(vocab_size: int) -> TensorDict:
    """Four rows of different lengths, the first two with the same prompt; random tokens from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (4, PROMPT_LENGTH + RESPONSE_LENGTH), generator=generator)
    ids[1, :PROMPT_LENGTH] = ids[0, :PROMPT_LENGTH]
    padding = torch.tensor([0, 0, 2, 3])[:, None]
    prompt_mask = torch.arange(PROMPT_LENGTH) >= padding
    response_mask = torch.arange(RESPONSE_LENGTH) < torch.tensor([7, 12, 1, 10])[:, None]
    mask = torch.cat((prompt_mask, response_mask), 1).long()
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT_LENGTH:],
            "response_mask": response_mask.long(),
        },
        batch_size=[len(ids)],
    )
