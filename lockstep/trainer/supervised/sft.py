"""Supervised fine-tuning: cross-entropy on the assistant's tokens of conversations or pairs."""

from tensordict import TensorDict
from torch import Tensor

from lockstep.data.sft_dataset import create_sft_dataset
from lockstep.engines.train.train_engine import LossFn
from lockstep.trainer.supervised.batches import collate
from lockstep.trainer.supervised.trainer import SupervisedTrainer


class SFTTrainer(SupervisedTrainer):
    name = "SFT"
    unit = "loss_tokens"
    create_dataset = staticmethod(create_sft_dataset)
    collate = staticmethod(collate)

    def loss_fn(self, count: int) -> LossFn:
        """Mean cross-entropy over the trained tokens."""

        def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            loss = -(outputs["log_probs"] * rows["response_mask"]).sum() / count
            return loss, {"train/loss": loss}

        return loss_fn
