"""Samplers by path: curricula see every step and resume exactly; stateless samplers are redrawn."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

from lockstep.config.data import DataConfig, SamplerConfig
from lockstep.data.loader import StatefulLoader, create_dataloader
from lockstep.data.sampler import AbstractCurriculumSampler, AbstractSampler, Resumable, create_rl_sampler
from lockstep.protocol import DataProto, object_array


class Numbers(Dataset[dict[str, Any]]):
    def __init__(self, num_rows: int = 11) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"index": item}


class HardestFirst(AbstractCurriculumSampler):
    """Yields the row with the lowest score so far, each once per epoch; the position in the epoch is part of its state."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.scores = [float(i % 4) for i in range(len(data_source))]
        self.given: list[int] = []
        self.num_updates = 0

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[int]:
        while len(self.given) < len(self.scores):
            row = min(set(range(len(self.scores))) - set(self.given), key=lambda i: (self.scores[i], i))
            self.given.append(row)
            yield row
        self.given = []

    def update(self, batch: DataProto) -> None:
        self.num_updates += 1
        for row in batch.non_tensor_batch["index"]:
            self.scores[row] += 1.0
            self.scores[(row * 5 + 3) % len(self.scores)] -= 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"scores": list(self.scores), "given": list(self.given), "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores, self.given = list(state_dict["scores"]), list(state_dict["given"])
        self.num_updates = state_dict["num_updates"]


def curriculum_loader(dataset: Dataset[Any] | None = None) -> StatefulLoader:
    dataset = dataset or Numbers()
    sampler = HardestFirst(dataset, DataConfig())
    return create_dataloader(dataset, 3, shuffle=True, seed=1, sampler=sampler)


def train(loader: StatefulLoader, num_steps: int) -> list[list[int]]:
    """Like a trainer: pass each batch to the loader before requesting the next one."""
    taken: list[list[int]] = []
    while len(taken) < num_steps:
        for batch in loader:
            taken.append(batch["index"].tolist())
            loader.on_batch_end(DataProto.from_dict(non_tensors={"index": object_array(taken[-1])}))
            if len(taken) == num_steps:
                break
    return taken


def test_update_changes_the_next_batch() -> None:
    loader = curriculum_loader()
    # Initial scores: 0 1 2 3 0 1 2 3 0 1 2, so rows 0, 4, 8 come first. The update lowers 3, 1 and 10 by 2.
    assert train(loader, 2) == [[0, 4, 8], [1, 10, 3]]
    assert loader.rows.sampler.num_updates == 2


def test_curriculum_resumes_exactly() -> None:
    whole = train(curriculum_loader(), 9)  # three epochs of three batches, two rows of each left over
    assert len({tuple(batch) for batch in whole}) > 3
    for stopped_after in range(9):
        first = curriculum_loader()
        head = train(first, stopped_after)
        second = curriculum_loader()
        second.load_state_dict(first.state_dict())
        assert head + train(second, 9 - stopped_after) == whole


@pytest.mark.parametrize("drop_last", [True, False])
def test_stateless_samplers_are_redrawn(drop_last: bool) -> None:
    def make() -> StatefulLoader:
        order = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(3))
        return create_dataloader(Numbers(), 4, shuffle=False, seed=0, sampler=order, drop_last=drop_last)

    whole = train(make(), 8)
    assert sorted(i for batch in train(make(), 3) for i in batch) == list(range(11)) or drop_last
    for stopped_after in range(8):
        first, second = make(), make()
        head = train(first, stopped_after)
        second.load_state_dict(first.state_dict())
        assert head + train(second, 8 - stopped_after) == whole


class Alternating(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (range(6) if self.epoch % 2 == 0 else reversed(range(6)))

    def __len__(self) -> int:
        return 6


def test_set_epoch_is_called_and_the_samplers_length_is_used() -> None:
    loader = create_dataloader(Numbers(), 2, shuffle=True, seed=0, sampler=Alternating())
    assert len(loader) == 3
    assert train(loader, 6) == [[0, 1], [2, 3], [4, 5], [5, 4], [3, 2], [1, 0]]


def test_leaving_an_epoch_early_continues_the_same_draw() -> None:
    loader = create_dataloader(Numbers(), 2, shuffle=False, seed=0, sampler=SequentialSampler(Numbers()))
    assert train(loader, 1) + train(loader, 2) == [[0, 1], [2, 3], [4, 5]]


class Remembering(Numbers):
    """A dataset with on_batch_end and state."""

    seen = 0

    def on_batch_end(self, batch: DataProto) -> None:
        self.seen += len(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_dataset_gets_batches_and_its_state_is_saved() -> None:
    dataset = Remembering()
    loader = curriculum_loader(dataset)
    train(loader, 2)
    assert dataset.seen == 6
    resumed = Remembering()
    curriculum_loader(resumed).load_state_dict(loader.state_dict())
    assert resumed.seen == 6
    with pytest.raises(ValueError, match="the checkpoint has no state of the dataset"):
        curriculum_loader(Remembering()).load_state_dict(curriculum_loader().state_dict())


def test_custom_collate_of_dataset_or_caller() -> None:
    dataset = Numbers()
    dataset.collate_fn = lambda samples: sum(sample["index"] for sample in samples)  # type: ignore[attr-defined]
    assert list(create_dataloader(dataset, 5, shuffle=False, seed=0)) == [10, 35]
    assert list(create_dataloader(dataset, 5, shuffle=False, seed=0, collate_fn=len)) == [5, 5]


SAMPLERS = """
from lockstep.data.sampler import AbstractCurriculumSampler, AbstractSampler
class Backwards(AbstractSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))
    def __len__(self):
        return len(self.data_source)
class Forgetful(AbstractCurriculumSampler):
    def __iter__(self):
        return iter(range(len(self.data_source)))
    def __len__(self):
        return len(self.data_source)
    def update(self, batch):
        pass
class Wrong: pass
class Short(Backwards):
    def __len__(self):
        return 12
"""


def sampler_by_path(folder: Path, name: str | None, **changes: Any) -> AbstractSampler | None:
    file = folder / "samplers.py"
    file.write_text(SAMPLERS)
    config = DataConfig(sampler=SamplerConfig(class_path=str(file), class_name=name), **changes)
    return create_rl_sampler(config, Numbers())


def test_sampler_by_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert create_rl_sampler(DataConfig(), Numbers()) is None
    sampler = sampler_by_path(tmp_path, "Backwards")
    assert train(create_dataloader(Numbers(), 4, shuffle=True, seed=0, sampler=sampler), 1) == [[10, 9, 8, 7]]
    assert not isinstance(sampler, Resumable) and not caplog.text
    sampler_by_path(tmp_path, "Forgetful")
    assert "Forgetful has no state_dict and load_state_dict" in caplog.text


def test_documented_sampler(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    (tmp_path / "sampler.py").write_text(next(block for block in blocks if "class EasyFirst" in block))
    config = DataConfig(sampler=SamplerConfig(str(tmp_path / "sampler.py"), "EasyFirst"))

    def make() -> StatefulLoader:
        return create_dataloader(Numbers(), 3, True, 0, sampler=create_rl_sampler(config, Numbers()))

    def steps(loader: StatefulLoader, num_steps: int) -> list[list[int]]:
        taken = []
        for batch in (batch for _ in range(3) for batch in loader):
            taken.append(batch["index"].tolist())
            scores = torch.tensor([[float(row), 0.0] for row in taken[-1]])
            loader.on_batch_end(DataProto.from_dict({"token_level_scores": scores}, {"index": batch["index"]}))
            if len(taken) == num_steps:
                break
        return taken

    whole = steps(make(), 5)
    assert whole == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [8, 7, 6], [5, 4, 3]]  # rows 9 and 10 are unseen: score 0
    first, second = make(), make()
    head = steps(first, 4)
    second.load_state_dict(first.state_dict())
    assert head + steps(second, 1) == whole


def test_bad_samplers_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names no attribute; write it as .*:name"):
        sampler_by_path(tmp_path, None)
    with pytest.raises(ValueError, match=r"data\.sampler\.class_path=.*no attribute 'Backward'.*Did you mean"):
        sampler_by_path(tmp_path, "Backward")
    with pytest.raises(ValueError, match=r"name=Wrong: must be a subclass of .*AbstractSampler"):
        sampler_by_path(tmp_path, "Wrong")
    with pytest.raises(ValueError, match=r"data\.dataloader_num_workers=2 with data\.sampler.*=0"):
        sampler_by_path(tmp_path, "Backwards", dataloader_num_workers=2)
    with pytest.raises(ValueError, match=r"data\.dataloader_num_workers=1 with a sampler"):
        create_dataloader(Numbers(), 2, False, 0, num_workers=1, sampler=SequentialSampler(Numbers()))
    with pytest.raises(ValueError, match=r"the sampler yielded 11 rows in epoch 0, but its len\(\) is 12"):
        train(create_dataloader(Numbers(), 4, False, 0, sampler=sampler_by_path(tmp_path, "Short")), 3)
    with pytest.raises(ValueError, match=r"data\.train_batch_size=7, but Alternating yields only 6 rows"):
        create_dataloader(Numbers(), 7, False, 0, sampler=Alternating())
