"""The responses of a validation or step, as dumps and metrics get them."""

import gc
import weakref
from pathlib import Path

import torch

from lockstep.observability.image_files import FOLDER
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES, ImageInputs
from lockstep.trainer.ppo.sampling import EXTRA_KEYS
from lockstep.trainer.ppo.validation import Responses


def test_tensors_of_images_are_freed_with_their_batch(tmp_path: Path) -> None:
    images = ImageInputs({"pixel_values": torch.zeros(4, 3)}, 7, (4,), (b"d" * 16,), (b"\x89PNG",))
    ones = torch.ones(2, 1, dtype=torch.int64)
    tensors = dict.fromkeys(("prompts", "responses", "response_mask"), ones) | {"attention_mask": torch.ones(2, 2)}
    columns = {"uid": ["a", "b"], "data_source": ["x", "x"], "reward_model": [{}, {}], IMAGES: [images, None]}
    batch = DataProto.from_dict(
        tensors=tensors | {"input_ids": torch.ones(2, 2), "token_level_scores": torch.ones(2, 1)},
        non_tensors={name: object_array(values) for name, values in columns.items()},
    )
    batch.meta_info[EXTRA_KEYS] = []
    responses = Responses()
    responses.add(batch, lambda rows: ["text"] * len(rows))
    pixels = weakref.ref(images.tensors["pixel_values"])
    del images, columns, batch
    gc.collect()
    assert pixels() is None
    responses.dump(str(tmp_path), 1)
    assert [file.read_bytes() for file in (tmp_path / FOLDER).iterdir()] == [b"\x89PNG"]
