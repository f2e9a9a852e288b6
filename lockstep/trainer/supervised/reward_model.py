"""Reward models: a score per sequence, trained so that chosen answers score higher than rejected ones."""

from typing import ClassVar

from tensordict import TensorDict
from torch import Tensor

from lockstep.algorithms.preference import bradley_terry, centering
from lockstep.config.preference import RMConfig
from lockstep.data.preference_dataset import create_preference_dataset
from lockstep.engines.train.train_engine import LossFn
from lockstep.trainer.supervised.batches import collate_pairs, pairs
from lockstep.trainer.supervised.trainer import SupervisedTrainer


class RewardModelTrainer(SupervisedTrainer):
    """The folder that it saves is a sequence classifier with one label: `reward_model.model.path` of PPO.

    Training starts with the folder's head, if it has one with one label, else with a random one near zero.
    """

    config: RMConfig
    name = "reward model"
    unit = "pairs"
    sequences_per_row = 2
    kind = "value"
    forward_options: ClassVar[dict[str, object]] = {"at_end": True}
    create_dataset = staticmethod(create_preference_dataset)
    collate = staticmethod(collate_pairs)

    def loss_fn(self, count: int) -> LossFn:
        """Mean Bradley-Terry loss over the pairs."""
        coefficient = self.config.rm.center_rewards_coefficient

        def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            chosen, rejected = pairs(outputs["score"])
            is_data, _ = pairs(rows["is_data"])
            margin = pairs(rows["margin"])[0] if "margin" in rows.keys() else None  # noqa: SIM118

            def mean(values: Tensor) -> Tensor:
                return (values * is_data).sum() / count

            loss = mean(bradley_terry(chosen, rejected, margin) + coefficient * centering(chosen, rejected))
            return loss, {
                "train/loss": loss,
                "train/accuracy": mean((chosen > rejected).float()),
                "train/margin": mean(chosen - rejected),
                "train/score": mean((chosen + rejected) / 2),
            }

        return loss_fn
