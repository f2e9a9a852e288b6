"""Batches that audits keep."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES, ImageInputs
from lockstep.trainer.ppo import batch_dump
from lockstep.trainer.ppo.batch_dump import DumpInfo, checkpoint_name, read_dump, write_dump
from lockstep.trainer.replay.main_replay import main
from tests.tiny import random_batch


def info_of(step: int, audit: str = "finite") -> DumpInfo:
    return DumpInfo(audit, "something is wrong", step, num_updates=step - 1, checkpoint="global_step_2")


def test_a_dump_is_read_back_without_what_is_not_plain_data(tmp_path: Path) -> None:
    batch = DataProto(random_batch(), {"uid": np.array(["a"] * 6, dtype=object)}, {"global_steps": 4})
    batch.non_tensor_batch["image"] = np.array([object()] * 6, dtype=object)
    folder = write_dump(tmp_path, batch, info_of(4))
    assert folder == tmp_path / "audits" / "step_4_finite"
    dump = read_dump(folder)
    assert torch.equal(dump.batch.tensors["input_ids"], batch.tensors["input_ids"])
    assert dump.batch.meta_info == {"global_steps": 4} and list(dump.batch.non_tensor_batch) == ["uid"]
    assert dump.info == DumpInfo("finite", "something is wrong", 4, 3, "global_step_2", left_out=["image"])
    assert dump.run == tmp_path.resolve() and dump.checkpoint == tmp_path.resolve() / "global_step_2"


def test_large_columns_and_rows_beyond_the_limit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = DataProto(random_batch())
    size = sum(tensor.nbytes for tensor in batch.tensors.values())
    batch.tensors["routed_experts"] = torch.zeros(6, 1000)
    monkeypatch.setattr(batch_dump, "MOST_BYTES", size // 2)
    folder = write_dump(tmp_path, batch, info_of(4))
    assert folder is not None
    dump = read_dump(folder)
    assert len(dump.batch) == 3 and dump.info.left_out == ["routed_experts", "3 rows"]
    assert torch.equal(dump.batch.tensors["input_ids"], batch.tensors["input_ids"][:3])


def test_a_dump_of_rows_with_images_is_not_replayed_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = ImageInputs({"pixel_values": torch.zeros(4, 3)}, 7, (4,), (b"d" * 16,))
    for step, first in ((3, None), (4, images)):
        batch = DataProto(random_batch(), {IMAGES: object_array([first, *[None] * 5])})
        folder = write_dump(tmp_path, batch, info_of(step))
        assert folder is not None
        assert read_dump(folder).info.left_out == ([] if first is None else [IMAGES])
    assert main([str(folder)]) == 2
    assert f"leaves out; lockstep replay {tmp_path.resolve()} --step 4 computes" in capsys.readouterr().err


def test_an_audit_keeps_three_batches_and_a_repeated_step_replaces_its_own(tmp_path: Path) -> None:
    batch = DataProto(random_batch())
    assert all(write_dump(tmp_path, batch, info_of(step)) for step in (1, 2, 3, 2))
    assert write_dump(tmp_path, batch, info_of(4)) is None
    assert write_dump(tmp_path, batch, info_of(4, "weights")) is not None
    assert len(list((tmp_path / "audits").iterdir())) == 4


def test_what_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "audits").write_text("in the way")
    assert write_dump(tmp_path, DataProto(random_batch()), info_of(1)) is None


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the dump of an audit"):
        read_dump(tmp_path)


def test_checkpoints_elsewhere_keep_their_path(tmp_path: Path) -> None:
    assert checkpoint_name(tmp_path, None) is None
    assert checkpoint_name(tmp_path, tmp_path / "global_step_3") == "global_step_3"
    assert checkpoint_name(tmp_path / "a", tmp_path / "b" / "global_step_3") == str(tmp_path / "b" / "global_step_3")
