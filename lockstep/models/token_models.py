"""The two kinds of model that an engine trains: a policy (log-probs of tokens) and a scalar model (one number a token).

Each is a module whose forward takes `ForwardRows` and does everything that needs its parameters, so that sharding wraps it whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.models.attention import no_mask
from lockstep.models.loading import logits_fn
from lockstep.models.log_probs import token_log_probs
from lockstep.models.packing import ForwardRows


class TokenModel(nn.Module):
    """What both kinds have in common: a transformers model inside, and parameters that it would name otherwise."""

    hf_config: PretrainedConfig

    def hf_name(self, name: str) -> str:
        """The name by which a Hugging Face folder knows the parameter `name` of this module."""
        raise NotImplementedError


class PolicyModel(TokenModel):
    """A causal language model that gives each response token's log-prob and, if asked for, more about its distribution."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.hf_config = model.config

    def hf_name(self, name: str) -> str:
        return name.removeprefix("model.")

    def forward(self, rows: ForwardRows, **options: Any) -> dict[str, Tensor]:
        """options: those of `token_log_probs`."""
        hidden = _hidden_states(self.model.get_decoder(), rows)
        flat = token_log_probs(hidden.index_select(0, rows.predicts), rows.targets, logits_fn(self.model), **options)
        return {name: rows.spread(values) for name, values in flat.items()}


class ScalarModel(TokenModel):
    """A transformer body with a linear head to one number: the value before each response token, or the sequence's score.

    score: named as transformers names it, so that a saved folder opens as a sequence classifier.
    """

    def __init__(self, body: PreTrainedModel, score: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.score = score
        self.hf_config = body.config

    def hf_name(self, name: str) -> str:
        return f"{self.body.base_model_prefix}.{name.removeprefix('body.')}" if name.startswith("body.") else name

    def forward(self, rows: ForwardRows, at_end: bool = False) -> dict[str, Tensor]:
        hidden = _hidden_states(self.body, rows)
        if at_end:
            return {"score": rows.spread_last(self._numbers(hidden[rows.last]))}
        return {"values": rows.spread(self._numbers(hidden.index_select(0, rows.predicts)))}

    def _numbers(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N) in float32: rounded to half precision, a value near 1 would stand on a grid of 1/128."""
        head = self.score
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias).squeeze(-1)


def _hidden_states(body: nn.Module, rows: ForwardRows) -> Tensor:
    out = body(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        attention_mask=no_mask(rows.input_ids.device),
        use_cache=False,
        lockstep_context=rows.context,
    )
    hidden: Tensor = out.last_hidden_state
    return torch.flatten(hidden, 0, 1)
