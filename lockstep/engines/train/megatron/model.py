"""A pipeline stage of a model that an engine trains: tokens or hidden states in, hidden states or outputs (B, R) out.

    first stage: embedding ─► layers ─► … ─► layers ─► last stage: final norm ─► log-probs of response tokens, or one number each

Legend: T packed tokens, T' those of this rank with sequence parallelism, N response tokens, V' vocabulary entries of this rank.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from torch import Tensor, nn

from lockstep.engines.train.megatron.families import block_spec
from lockstep.engines.train.megatron.layers import PackedRows
from lockstep.engines.train.megatron.log_probs import vocabulary_parallel_log_probs
from lockstep.models.attention import PackedAttention
from lockstep.models.log_probs import VocabularyHead, token_log_probs
from lockstep.models.packing import ForwardRows, forward_rows

Kind = Literal["policy", "value", "reward"]


class TokenGPT(GPTModel):
    """rotary: the module of transformers that computes cos and sin of positions.

    vocab_size:  of the Hugging Face model; the weights here are padded to a multiple of the tensor-parallel ranks.
    padding_idx: the token whose embedding gets no gradient from where it is read, as in transformers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kind: Kind,
        vocab_size: int,
        rotary: nn.Module,
        *,
        tied: bool,
        padding_idx: int | None,
    ) -> None:
        ranks = config.tensor_model_parallel_size
        is_policy = kind == "policy"
        super().__init__(
            config,
            block_spec(config),
            vocab_size=-(-vocab_size // ranks) * ranks,
            max_sequence_length=0,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied and is_policy,
            position_embedding_type="none",
        )
        self.real_vocab_size = vocab_size
        self.padding_idx = padding_idx
        self.score: nn.Linear | None = None
        if self.post_process and not is_policy:
            device = next(self.parameters()).device
            del self.output_layer
            self.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)
        self._rotary = [rotary]  # not a submodule: its buffers belong to the transformers model

    def rows(self, batch: TensorDict, device: torch.device) -> ForwardRows:
        """The packed row; with sequence parallelism its length is a multiple of the ranks, by rows of one token."""
        rows = forward_rows(batch, device, "packed")
        missing = -rows.input_ids.shape[1] % self.config.tensor_model_parallel_size
        if not missing or not self.config.sequence_parallel:
            return rows
        context = rows.context
        assert isinstance(context, PackedAttention)
        prefixes = None if context.prefixes is None else [*context.prefixes, *[(0, 0)] * missing]
        values: dict[str, Any] = {**vars(rows)}
        values["input_ids"] = F.pad(rows.input_ids, (0, missing))
        values["position_ids"] = F.pad(rows.position_ids, (0, missing))
        values["context"] = PackedAttention([*context.lengths, *[1] * missing], device, prefixes)
        return ForwardRows(**values)

    def forward(self, rows: ForwardRows, **options: Any) -> Tensor | dict[str, Tensor]:
        """Hidden states (T', 1, H) for the next stage; on the last stage the outputs of a `TokenModel`."""
        stream = self._embedded(rows) if self.pre_process else None
        assert rows.context is not None
        like = torch.empty(0, dtype=self.config.params_dtype, device=rows.input_ids.device)
        cos, sin = self._rotary[0](like, rows.position_ids)
        hidden: Tensor = self.decoder(
            hidden_states=stream, attention_mask=None, packed_seq_params=PackedRows(rows.context, cos, sin)
        )
        if not self.post_process:
            return hidden
        if self.score is not None:
            return self._scalars(hidden, rows, **options)
        return self._log_probs(hidden, rows, **options)

    def _embedded(self, rows: ForwardRows) -> Tensor:
        """(T', 1, H)"""
        stream: Tensor = self.embedding(rows.input_ids, rows.position_ids)
        if self.padding_idx is None or not stream.requires_grad:
            return stream
        is_pad = rows.input_ids[0] == self.padding_idx
        if self.config.sequence_parallel:
            is_pad = is_pad.chunk(self.config.tensor_model_parallel_size)[ps.get_tensor_model_parallel_rank()]
        return torch.where(is_pad[:, None, None], stream.detach(), stream)

    def _log_probs(self, hidden: Tensor, rows: ForwardRows, **options: Any) -> dict[str, Tensor]:
        """options: those of `token_log_probs`."""
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        if self.config.tensor_model_parallel_size == 1:
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            head.weight = weight
            predicting = hidden[:, 0].index_select(0, rows.predicts)
            flat = token_log_probs(predicting, rows.targets, VocabularyHead(head), **options)
        else:
            whole = self._on_every_rank(hidden, gradient_is_partial=True)
            predicting = whole.index_select(0, rows.predicts)
            flat = vocabulary_parallel_log_probs(predicting, rows.targets, weight, self.real_vocab_size, **options)
        return {name: rows.spread(values) for name, values in flat.items()}

    def _scalars(self, hidden: Tensor, rows: ForwardRows, *, at_end: bool = False) -> dict[str, Tensor]:
        whole = self._on_every_rank(hidden, gradient_is_partial=False)
        numbers = self._numbers(whole[rows.last] if at_end else whole.index_select(0, rows.predicts))
        return {"score": rows.spread_last(numbers)} if at_end else {"values": rows.spread(numbers)}

    def _numbers(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N) in float32."""
        assert self.score is not None
        return F.linear(hidden.float(), self.score.weight.float()).squeeze(-1)

    def _on_every_rank(self, hidden: Tensor, *, gradient_is_partial: bool) -> Tensor:
        """(T', 1, H) -> (T, H). gradient_is_partial: each rank's gradient is that of its vocabulary entries, to be summed."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=gradient_is_partial)
        elif gradient_is_partial:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden[:, 0]
