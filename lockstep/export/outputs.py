"""What a model computes for fixed texts, by our forward and by plain transformers, in float32 on the CPU."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lockstep.models.known_models import computes_packed
from lockstep.models.packing import Layout, forward_rows
from lockstep.models.token_models import PolicyModel, TokenModel

TEXTS = (
    "The committee approved the plan in 1987, although three of its members had voted against it.",
    "def area(r):\n    return 3.14159 * r ** 2\n\nprint(area(2.5))  # 19.634937...",
    "Natalia sold 48 clips in April and half as many in May: 48 + 24 = 72 clips altogether.",
    "模型先在监督数据上微调，再用强化学习训练。",
)
MAX_TOKENS = 64


def text_rows(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:MAX_TOKENS] for text in TEXTS]
    return [row for row in rows if len(row) > 1]


@torch.no_grad()
def own_outputs(model: TokenModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Log-probs (L - 1) of every token after the first of each row, or the score () of each row."""
    batch = _batch(rows)
    layout: Layout = "packed" if computes_packed(model.transformer) else "aligned"
    on_device = forward_rows(batch, torch.device("cpu"), layout)
    if not isinstance(model, PolicyModel):
        return list(model(on_device, at_end=True)["score"])
    log_probs = model(on_device)["log_probs"]
    return [found[: len(row) - 1] for found, row in zip(log_probs, rows)]


@torch.no_grad()
def plain_outputs(model: nn.Module, rows: Sequence[Sequence[int]], *, is_scalar: bool = False) -> list[Tensor]:
    """The same by the model's own forward, one row at a time."""
    found = []
    for row in rows:
        ids = torch.tensor([list(row)])
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        if is_scalar:
            found.append(logits.squeeze())
        else:
            found.append(logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1))
    return found


def _batch(rows: Sequence[Sequence[int]]) -> TensorDict:
    """Rows of a prompt of one token and a response of the others, padded on the right."""
    length = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(list(row))
        mask[number, : len(row)] = 1
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    tensors |= {"responses": ids[:, 1:], "response_mask": mask[:, 1:]}
    return TensorDict(tensors, batch_size=[len(rows)])
