"""The table of batch keys and the `require` check."""

import pytest
import torch

from lockstep.protocol import DataProto
from lockstep.protocol.keys import BATCH_KEYS
from lockstep.protocol.require import require


def batch() -> DataProto:
    return DataProto.from_dict(
        {
            "prompts": torch.zeros(2, 3, dtype=torch.int64),
            "responses": torch.zeros(2, 4, dtype=torch.int64),
            "input_ids": torch.zeros(2, 7, dtype=torch.int64),
            "response_mask": torch.ones(2, 4, dtype=torch.int64),
            "old_log_probs": torch.zeros(2, 4),
            "sampling_seed": torch.tensor([1, 2]),
        },
        {"uid": ["a", "b"], "raw_prompt_ids": [[1], [2, 3]]},
    )


def changed(name: str, value: torch.Tensor) -> DataProto:
    data = batch()
    assert data.batch is not None
    data.batch[name] = value
    return data


def test_complete_batch_passes() -> None:
    require(batch(), "prompts", "responses", "input_ids", "response_mask", "old_log_probs", "sampling_seed", "uid")
    require(DataProto.from_dict(non_tensors={"raw_prompt_ids": [[1]]}), "raw_prompt_ids")


def test_missing_key_error_names_its_writer() -> None:
    with pytest.raises(KeyError, match="batch key 'advantages' is missing: it is written by the controller"):
        require(batch(), "responses", "advantages")
    with pytest.raises(KeyError, match="batch key 'data_source' is missing: it is written by the data"):
        require(batch(), "data_source")
    with pytest.raises(KeyError, match="batch key 'responses' is missing"):
        require(DataProto.from_dict(non_tensors={"uid": ["a"]}), "responses")


def test_wrong_types_and_shapes() -> None:
    with pytest.raises(ValueError, match=r"batch key 'old_log_probs' is torch.bfloat16, it must be torch.float32"):
        require(changed("old_log_probs", torch.zeros(2, 4, dtype=torch.bfloat16)), "old_log_probs")
    with pytest.raises(ValueError, match=r"'old_log_probs' has shape \(2, 4, 1\), it must be \(B, R\)"):
        require(changed("old_log_probs", torch.zeros(2, 4, 1)), "old_log_probs")
    with pytest.raises(ValueError, match=r"'old_log_probs' has shape \(2, 5\): R is 5, but 4 in 'responses'"):
        require(changed("old_log_probs", torch.zeros(2, 5)), "responses", "old_log_probs")
    with pytest.raises(ValueError, match=r"T = P \+ R: P = 3 in 'prompts', R = 4 in 'responses', T = 8 in 'input_ids'"):
        require(changed("input_ids", torch.zeros(2, 8, dtype=torch.int64)), "prompts", "responses", "input_ids")


def test_unknown_key_name() -> None:
    with pytest.raises(KeyError, match=r"'advantage' is not a batch key. Did you mean 'advantages'"):
        require(batch(), "advantage")


def test_the_table_is_complete() -> None:
    for key in BATCH_KEYS.values():
        assert key.written_by and key.read_by and key.meaning
        assert set(key.shape) <= set("BPRTSLK") and key.shape.startswith("B")
        assert key.dtype is not None or key.shape == "B"
