"""Rows with images in programs on verl: what is generated and what is computed afterwards have the rows' images."""

from types import SimpleNamespace
from typing import Any

import torch

from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES, ImageInputs
from lockstep.protocol.tokens import images_of, with_images
from lockstep.verl._whole_batches import ByHand, WholeBatchGroup


class Group:
    """Answers each prompt with one token, and keeps the images of the rows that it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def generate_sequences(self, rows: DataProto) -> DataProto:
        self.seen.append(rows.non_tensor_batch[IMAGES].tolist())
        ids = torch.ones(len(rows), 2, dtype=torch.int64)
        names = ("input_ids", "attention_mask", "position_ids")
        return DataProto.from_dict(dict.fromkeys(names, ids) | {"responses": ids[:, 1:]})

    def compute_log_prob(self, rows: DataProto) -> Any:
        self.seen.append(images_of(with_images(rows)))
        return SimpleNamespace(get=lambda: DataProto())

    compute_ref_log_prob = compute_values = compute_rm_score = compute_log_prob


def test_images_go_from_the_prompts_to_every_pass() -> None:
    """A program takes the prompts out of its batch, and adds what comes back to the rest."""
    image = ImageInputs({}, 9, (1,), (bytes(16),))
    columns = {"raw_prompt_ids": object_array([[9], [5]]), IMAGES: object_array([image, None])}
    batch = DataProto.from_dict(non_tensors=columns | {"uid": object_array("ab")})
    group = Group()
    config: Any = SimpleNamespace(rollout=SimpleNamespace(name="hf", seed=0))
    whole = WholeBatchGroup(group, ByHand(config, "rollout"))
    prompts = batch.pop(non_tensor_batch_keys=["raw_prompt_ids", IMAGES])
    batch = batch.union(whole.generate_sequences(prompts))
    whole.compute_log_prob(batch)
    whole.compute_values(batch)
    whole.compute_rm_score(batch)
    assert group.seen == [[image, None]] * 4
