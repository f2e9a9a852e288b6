"""The two kinds of model that an engine trains: a policy (log-probs of tokens) and a scalar model (one number per token).

Each is a module whose forward takes `ForwardRows` and does everything that needs its parameters, so that sharding wraps it whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.kernels.exact import exact_mode
from lockstep.models.attention import no_mask
from lockstep.models.decoder import decoder_of
from lockstep.models.log_probs import token_log_probs, vocabulary_head
from lockstep.models.packing import ForwardRows
from lockstep.models.router_replay import RouterOutputs, RouteUse, Routing, balance_loss
from lockstep.models.vision import embed_images, image_features, own_inputs, with_tower_in_graph


class TokenModel(nn.Module):
    """A transformers model with a head. Parameter names differ from those of a Hugging Face folder by a prefix."""

    hf_config: PretrainedConfig

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformers model inside."""
        raise NotImplementedError

    def hf_name(self, name: str) -> str:
        """The name of the parameter `name` in a Hugging Face folder."""
        raise NotImplementedError


class PolicyModel(TokenModel):
    """A causal language model: log-probs of response tokens and, if asked for, statistics of their distributions.

    routing: access to its routers, for the options of `forward` that read or replace what they choose.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.hf_config = model.config
        self.routing: Routing | None = None

    @property
    def transformer(self) -> PreTrainedModel:
        return self.model

    def hf_name(self, name: str) -> str:
        return name.removeprefix("model.")

    def forward(
        self,
        rows: ForwardRows,
        *,
        routes: RouteUse | None = None,
        router_loss: bool = False,
        exact: bool = False,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Results (B, R) of `token_log_probs`, whose options are `options`.

        exact:  whether the log-probs of a row must not depend on other rows (`kernels/exact.py`).

        routes: record adds `routed_experts` (B, S, L, K), the experts of each row's tokens by position. replay computes with those
                of the batch; replay and compare add `route_mismatch` (B, R), the share of routers that would choose others.
        router_loss: adds `router_aux_loss` (B,) and `router_load` (B, L, E), see `balance_loss`.
        """
        if self.routing is None:
            assert routes is None and not router_loss, "the model was opened without access to its routers"
            with exact_mode(exact):
                return self._log_probs(rows, **options)
        if routes is None and not router_loss:
            self.routing.reset()
            return self._log_probs(rows, **options)
        given = rows.routes if routes in ("replay", "compare") else None
        self.routing.begin(given, replay=routes == "replay", logits=router_loss)
        out = self._log_probs(rows, **options)
        return out | _router_results(rows, self.routing.end(), routes, router_loss, self.routing.dtype)

    def _log_probs(self, rows: ForwardRows, **options: Any) -> dict[str, Tensor]:
        if rows.context is None:  # the model's own forward and head
            logits = _own_outputs(self.model, rows, "logits")
            flat = token_log_probs(logits[rows.predicts], rows.targets, torch.Tensor.float, **options)
        else:
            hidden = _hidden_states(self.model, rows)
            predicting = hidden.index_select(0, rows.predicts)
            flat = token_log_probs(predicting, rows.targets, vocabulary_head(self.model), **options)
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

    @property
    def transformer(self) -> PreTrainedModel:
        return self.body

    def hf_name(self, name: str) -> str:
        return f"{self.body.base_model_prefix}.{name.removeprefix('body.')}" if name.startswith("body.") else name

    def forward(self, rows: ForwardRows, *, at_end: bool = False) -> dict[str, Tensor]:
        hidden = _hidden_states(self.body, rows)
        if at_end:
            return {"score": rows.spread_last(self._numbers(hidden[rows.last]))}
        return {"values": rows.spread(self._numbers(hidden.index_select(0, rows.predicts)))}

    def _numbers(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N) in float32: in bf16 a value near 1 would be quantised to 1/128."""
        head = self.score
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias).squeeze(-1)


def _router_results(
    rows: ForwardRows, outputs: RouterOutputs, routes: RouteUse | None, router_loss: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    results = {}
    if routes == "record":
        results["routed_experts"] = rows.by_position(outputs.routes()).to(dtype)
    if outputs.differs:
        results["route_mismatch"] = rows.spread(outputs.mismatch().index_select(0, rows.predicts))
    if router_loss:
        loss, load = balance_loss(outputs, rows.predicts, rows.row, rows.shape[0], rows.whole)
        results |= {"router_aux_loss": loss, "router_load": load}
    return results


def _own_outputs(model: Any, rows: ForwardRows, name: str) -> Tensor:
    """(T, …) an output of the model's own forward."""
    outputs = []
    for ids, images, num_prompt_tokens in rows.own_batches():
        inputs = {} if images is None else own_inputs(model, ids, images, num_prompt_tokens)
        outputs.append(getattr(model(input_ids=ids, use_cache=False, **inputs), name).flatten(0, 1))
    found = torch.cat(outputs)
    return found if rows.images is None else with_tower_in_graph(model, found)


def _hidden_states(model: Any, rows: ForwardRows) -> Tensor:
    """(T, H) of packed tokens, or (B * L, H) of padded rows."""
    if rows.context is None:  # the model's own forward
        return _own_outputs(model, rows, "last_hidden_state")
    inputs: dict[str, Any] = {"input_ids": rows.input_ids}
    if rows.images is not None:
        features = None
        if rows.images:
            assert rows.features is not None
            features = image_features(model, rows.images).take(rows.features)
        inputs = embed_images(model, rows.input_ids, features, rows.placeholders)
        inputs["inputs_embeds"] = with_tower_in_graph(model, inputs["inputs_embeds"])
    out = decoder_of(model)(
        **inputs,
        position_ids=rows.position_ids,
        attention_mask=no_mask(rows.input_ids.device),
        use_cache=False,
        lockstep_context=rows.context,
    )
    hidden: Tensor = out.last_hidden_state
    return torch.flatten(hidden, 0, 1)
