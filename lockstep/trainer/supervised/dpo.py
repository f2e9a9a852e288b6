"""Direct preference optimization: the policy itself is trained on pairs, relative to the model that it starts from.

    starting model ─► log-probs of every answer, once ─► reference_log_probs.safetensors in the run's folder
    policy ─► log-probs of a batch's answers ─► loss on how far they moved apart

The reference is the starting model, so no second model is in memory: before the first update the policy is the reference. A forward
pass of the reference per step would cost as much in every epoch as this one pass over the data.
"""

import hashlib
import json
import logging
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lockstep.algorithms.preference import dpo_loss
from lockstep.config.preference import DPOConfig
from lockstep.config.schema import to_plain
from lockstep.data.preference_dataset import create_preference_dataset
from lockstep.engines.train.train_engine import LossFn
from lockstep.observability.run_folder import REFERENCE_FILE
from lockstep.trainer.supervised.batches import collate_pairs, pairs
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from lockstep.utils.distributed import on_first_rank
from lockstep.utils.files import atomic_write_bytes
from lockstep.utils.model_path import weight_folders
from lockstep.utils.progress import count, phase

logger = logging.getLogger(__name__)


class ReferencedPairs(Dataset[dict[str, Any]]):
    """Pairs with the reference's log-probs of their answers, once these are known.

    log_probs: (N, 2) sums over the tokens of an answer, chosen and rejected.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.log_probs: Tensor | None = None
        self.fingerprint = getattr(rows, "fingerprint", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        sample = dict(self.rows[item])
        return sample if self.log_probs is None else sample | {"reference": self.log_probs[item]}


def create_dpo_dataset(
    files: list[str], tokenizer: PreTrainedTokenizerBase, *options: Any, **more: Any
) -> ReferencedPairs:
    return ReferencedPairs(create_preference_dataset(files, tokenizer, *options, **more))


class DPOTrainer(SupervisedTrainer):
    config: DPOConfig
    name = "DPO"
    unit = "pairs"
    sequences_per_row = 2
    create_dataset = staticmethod(create_dpo_dataset)
    collate = staticmethod(collate_pairs)

    def loss_fn(self, count: int) -> LossFn:
        """Mean DPO loss over the pairs."""
        dpo = self.config.dpo

        def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            mask = rows["response_mask"]
            policy = (outputs["log_probs"] * mask).sum(-1)
            moved = policy - rows["reference"]
            if dpo.loss_type == "ipo":
                moved = moved / mask.sum(-1).clamp_min(1)
            chosen, rejected = pairs(moved)
            is_data, _ = pairs(rows["is_data"])

            def mean(values: Tensor) -> Tensor:
                return (values * is_data).sum() / count

            loss = mean(dpo_loss(chosen - rejected, dpo.loss_type, dpo.beta, dpo.label_smoothing))
            chosen_log_probs, rejected_log_probs = pairs(policy)
            return loss, {
                "train/loss": loss,
                "rewards/chosen": mean(dpo.beta * chosen),
                "rewards/rejected": mean(dpo.beta * rejected),
                "rewards/margins": mean(dpo.beta * (chosen - rejected)),
                "rewards/accuracies": mean((chosen > rejected).float()),
                "logps/chosen": mean(chosen_log_probs),
                "logps/rejected": mean(rejected_log_probs),
            }

        return loss_fn

    def prepare(self) -> None:
        """Give the datasets the reference's log-probs: from the run's folder, or computed by the model that was just loaded."""
        datasets: dict[str, Any] = {"train": self.loader.dataset}
        if self.val_dataset is not None:
            datasets["val"] = self.val_dataset
        file = self.run.folder / REFERENCE_FILE
        key = self._reference_key(datasets) if self.is_first_rank else ""
        found = on_first_rank(lambda: _read_reference(file, key))
        if found is None:
            logger.info("computing the reference log-probs of %s pairs", sum(map(len, datasets.values())))
            with phase("compute reference log-probs"):
                found = {name: self._reference(dataset) for name, dataset in datasets.items()}
            if self.is_first_rank:
                atomic_write_bytes(file, save(found, metadata={"key": key}))
        for name, dataset in datasets.items():
            dataset.log_probs = found[name]

    def reference_log_probs(self, rows: TensorDict) -> Tensor:
        """(B) the reference's log-prob of each answer: the engine's, since no update and no checkpoint has changed it yet."""
        log_probs = self.engine.forward(rows, self.micro)["log_probs"]
        return (log_probs * rows["response_mask"]).sum(-1)

    def _reference(self, dataset: ReferencedPairs) -> Tensor:
        """(N, 2) of all pairs, on every rank."""
        size = self.config.data.train_batch_size
        found = torch.zeros(len(dataset), 2)
        for start in range(0, len(dataset), size):
            numbers = range(start, min(start + size, len(dataset)))
            count(start, len(dataset), "pairs")
            rows, _ = self.share(collate_pairs([dataset[i] | {"number": torch.tensor(i)} for i in numbers]))
            with phase("forward"):
                log_probs = self.reference_log_probs(rows) * rows["is_data"]
            found.index_add_(0, pairs(rows["number"])[0], log_probs.view(-1, 2))
        everyones = self.engine.global_sum(*found.flatten().tolist())
        return torch.tensor(everyones).view(-1, 2)

    def _reference_key(self, datasets: dict[str, Any]) -> str:
        """A digest of what the log-probs depend on: the sequences, the model's settings and its files."""
        model = self.config.model
        stats = [
            (file.name, file.stat())
            for f in weight_folders(model.path, model.lora_adapter_path, "model")
            for file in f.iterdir()
        ]
        files = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        digest = hashlib.sha256(json.dumps([to_plain(model), files, self.device.type]).encode())
        for dataset in datasets.values():
            for sample in map(dataset.__getitem__, range(len(dataset))):
                for values in chain(sample["chosen"].values(), sample["rejected"].values()):
                    if isinstance(values, Tensor):
                        digest.update(values.numpy().tobytes())
                    elif values is not None:
                        digest.update(b"".join(values.digests))
        return digest.hexdigest()


def _read_reference(file: Path, key: str) -> dict[str, Tensor] | None:
    """The saved log-probs by dataset; None if there are none of the same data and model."""
    if not file.exists():
        return None
    with safe_open(file, framework="pt") as saved:
        if saved.metadata().get("key") == key:
            return {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    logger.warning("%s is of other data or another model; computing it again", file)
    return None
