"""Supervised fine-tuning: cross-entropy on the assistant's tokens of conversations or pairs."""

import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.data.sft_dataset import create_sft_dataset
from lockstep.engines.train.base import LossFn
from lockstep.models.loading import open_causal_lm
from lockstep.models.token_models import PolicyModel
from lockstep.models.weight_source import WeightSource
from lockstep.trainer.supervised.batches import collate, share_of
from lockstep.trainer.supervised.trainer import SupervisedTrainer


class SFTTrainer(SupervisedTrainer):
    name = "SFT"
    unit = "loss_tokens"
    create_dataset = staticmethod(create_sft_dataset)
    collate = staticmethod(collate)

    def open_model(self, dtype: torch.dtype) -> tuple[PolicyModel, WeightSource]:
        config = self.config
        policy, weights = open_causal_lm(config.model, "model", dtype, self.device, config.data.max_length)
        return PolicyModel(policy), weights

    def share(self, batch: TensorDict) -> tuple[TensorDict, int]:
        balance = self.config.data.balance_dp_token
        return share_of(batch, self.engine.dp_rank, self.engine.dp_size, balance=balance)

    def loss_fn(self, count: int) -> LossFn:
        """Mean cross-entropy over the trained tokens."""

        def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            loss = -(outputs["log_probs"] * rows["response_mask"]).sum() / count
            return loss, {"train/loss": loss}

        return loss_fn
