"""Compare an engine's computation with transformers' own eager forward, when the engine loads a model.

a few random rows ─► our path (packed and padded rows, prefill and decode)              ─┐
                 └─► transformers' layers, eager attention and experts, row by row       ─┴─► the same log-probs, or refused
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.decoder_layer import reference_layers, use_reference_layers
from lockstep.models.known_models import of_language_model
from lockstep.models.split_weights import whole_weights
from lockstep.models.vision import own_inputs
from lockstep.protocol.images import IMAGES, ImageInputs
from lockstep.protocol.tokens import image_column

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Largest mean difference that counts as rounding, relative to the scale of the log-probs or values."""

PROMPT_LENGTH, RESPONSE_LENGTH = 4, 12

DEFINITE_HEADS = 8
"""Heads of an index of keys from which there are hardly ties: with random weights one of 2^heads keys has a score of 0 from all."""


@contextmanager
def transformers_forward(model: PreTrainedModel, attention: str = "eager", experts: str = "eager") -> Iterator[None]:
    """The model runs transformers' own layers, attention and experts inside; call it without an attention context.

    Collective if several ranks hold its weights together.
    """
    text: Any = model.config.get_text_config()
    before, experts_before = text._attn_implementation, model.get_experts_implementation()
    try:
        if before != attention:
            model.set_attn_implementation(of_language_model(model.config, attention))
        model.set_experts_implementation(experts)
        with reference_layers(model), whole_weights(model):
            yield
    finally:
        if before != attention:
            model.set_attn_implementation(of_language_model(model.config, before))
        model.set_experts_implementation(experts_before)


def use_transformers_forward(model: PreTrainedModel) -> None:
    """`transformers_forward` from now on, with the experts' implementation as it is."""
    model.set_attn_implementation(of_language_model(model.config, "eager"))
    use_reference_layers(model)


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
def reference_log_probs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], images: Sequence[ImageInputs | None] | None = None
) -> list[Tensor]:
    """log p (L - 1,) float32 of every token after the first of each row, one row at a time. images: of each row."""
    device = next(model.parameters()).device
    found = []
    with transformers_forward(model):
        for row, image in zip(rows, images or [None] * len(rows)):
            ids = torch.tensor([list(row)], device=device)
            inputs = {} if image is None else own_inputs(model, ids, image)
            logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1))
    return found


@torch.no_grad()
def check_causal(model: PreTrainedModel, row: Sequence[int]) -> None:
    """ValueError if log-probs of transformers' own forward depend on a later token. row: at least three tokens."""
    with_last, without = reference_log_probs(model, [row, row[:-1]])
    refuse_later_tokens(with_last[:-1], without, model, next(model.parameters()).dtype, _scale(without))


def refuse_later_tokens(one: Tensor, other: Tensor, model: nn.Module, dtype: torch.dtype, scale: float) -> None:
    """ValueError if outputs for the same tokens differ, one with tokens after them and the other without."""
    error = float((one - other).abs().mean())
    if not error <= BOUNDS[dtype] * scale:
        raise ValueError(
            f"{type(model).__name__} is not a causal language model: what it computes for a token changes with later tokens (by "
            f"{error:.2g}). A decoder is needed; of a BERT-like model that is one with is_decoder=true in its config.json"
            f"{_about_ties(model)}"
        )


def _about_ties(model: nn.Module) -> str:
    """The likely cause of a difference, of indexed attention with few heads in its scorer."""
    text: Any = getattr(model, "config", None)
    num_heads = getattr(text and text.get_text_config(), "index_n_heads", None)
    if num_heads is None or num_heads >= DEFINITE_HEADS:
        return ""
    return (
        f". Or its index of keys has no definite result: with index_n_heads={num_heads}, keys tie to which every head gives a "
        f"score of 0, and which of them are picked may change with the length of a row, in transformers too; set index_n_heads to "
        f"{DEFINITE_HEADS} or more"
    )


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
        scale = _scale(theirs)
    error = float((ours - theirs).abs().mean())
    if not error <= BOUNDS[dtype] * scale:
        worst = int((ours - theirs).abs().nan_to_num(float("inf")).argmax())
        raise ValueError(
            f"{path} computes {type(model).__name__} differently from transformers: {error:.2g} per token on average in "
            f"{str(dtype).removeprefix('torch.')} (worst: {ours[worst]:.4g} instead of {theirs[worst]:.4g}). {advice}"
            f"{_about_ties(model)}"
        )


def _scale(log_probs: Tensor) -> float:
    return max(1.0, float(log_probs.float().std())) if log_probs.numel() > 1 else 1.0


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


def check_causal_outputs(
    one: dict[str, Tensor], other: dict[str, Tensor], batch: TensorDict, *, model: nn.Module, dtype: torch.dtype
) -> None:
    """ValueError if outputs (B, R) before the last token of a row differ. other: of `without_last(batch)`."""
    before_end = batch["response_mask"][:, 1:].bool()
    for name, values in one.items():
        earlier, without = (outputs.float().cpu()[:, :-1][before_end] for outputs in (values, other[name]))
        scale = _scale(earlier) if name == "log_probs" else float(earlier.square().mean().sqrt())
        refuse_later_tokens(earlier, without, model, dtype, scale)


def without_last(batch: TensorDict) -> TensorDict:
    """The batch without the last token of every row that has several."""
    batch = batch.clone()
    num_kept = (batch["response_mask"].sum(1, keepdim=True) - 1).clamp_min(1)
    batch["response_mask"] *= torch.arange(RESPONSE_LENGTH) < num_kept
    batch["attention_mask"][:, -RESPONSE_LENGTH:] = batch["response_mask"]
    return batch


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


def with_images(batch: TensorDict, one: ImageInputs, other: ImageInputs) -> TensorDict:
    """The rows of `check_batch` with images before their prompts: `one` in the first two, none in the third."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ids = torch.where(ids == one.token_id, (ids + 1) % one.token_id, ids)
    images = [one, one, None, other]
    num_tokens = [0 if image is None else sum(image.num_tokens) for image in images]
    width = max(num_tokens)
    rows, masks = [], []
    for row, number in enumerate(num_tokens):
        start = int(mask[row].argmax())  # the prompt is padded on the left
        rows.append(
            torch.cat((torch.zeros(start + width - number), torch.full((number,), one.token_id), ids[row, start:]))
        )
        masks.append(torch.cat((torch.zeros(start + width - number), torch.ones(number), mask[row, start:])))
    ids, mask = torch.stack(rows).long(), torch.stack(masks).long()
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, -RESPONSE_LENGTH:],
            "response_mask": batch["response_mask"],
            IMAGES: image_column(images),
        },
        batch_size=batch.batch_size,
    )
