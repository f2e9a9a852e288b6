"""The loader's order depends only on (seed, epoch) and resumes exactly from any position."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.config.data import CustomClassConfig, DataConfig
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.data.fingerprint import changes, content_of
from lockstep.data.loader import StatefulLoader, _kill_processes, create_dataloader, shuffled_order
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.utils.files import sha256
from tests.tiny import tiny_tokenizer, write_rows

PINNED = [1, 3, 0, 7, 6, 5, 2, 4]


class Numbers(Dataset[dict[str, Any]]):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"index": item}


def make_loader(num_rows: int = 11, batch_size: int = 3, **changes: Any) -> StatefulLoader:
    arguments: dict[str, Any] = {"shuffle": True, "seed": 5, "num_workers": 0, "drop_last": True} | changes
    return create_dataloader(Numbers(num_rows), batch_size, **arguments)


def take(loader: StatefulLoader, num_batches: int) -> list[list[int]]:
    """The next batches, across epochs if needed; the state is then the one during the last batch's step."""
    taken: list[list[int]] = []
    while len(taken) < num_batches:
        for batch in loader:
            taken.append(batch["index"].tolist())
            if len(taken) == num_batches:
                break
    return taken


@pytest.mark.parametrize("drop_last", [True, False])
def test_resume_equals_uninterrupted_over_three_epochs(drop_last: bool) -> None:
    per_epoch = 3 if drop_last else 4
    whole = take(make_loader(drop_last=drop_last), 3 * per_epoch)
    for interrupted_after in range(3 * per_epoch):
        first = make_loader(drop_last=drop_last)
        head = take(first, interrupted_after)
        second = make_loader(drop_last=drop_last)
        second.load_state_dict(first.state_dict())
        assert head + take(second, 3 * per_epoch - interrupted_after) == whole


def test_worker_processes_do_not_change_the_order() -> None:
    whole = take(make_loader(), 5)
    loader = make_loader(num_workers=2)
    head = take(loader, 2)
    resumed = make_loader(num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert head + take(resumed, 3) == whole


def test_worker_processes_survive_signals_to_the_whole_job() -> None:
    loader = make_loader(num_rows=30, num_workers=1)
    batches = iter(loader)
    taken = [next(batches)["index"].tolist()]
    (process,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid or 0, number)
    taken += [batch["index"].tolist() for batch in batches]
    assert taken == take(make_loader(num_rows=30), 10)
    assert not multiprocessing.active_children()


def test_process_is_killed_at_exit_even_if_its_queue_gets_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    handler = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        try:
            next(iter(make_loader(num_workers=1)))
        finally:  # before torch's iterator is deleted, which waits for its process for 10 seconds
            (process,) = multiprocessing.active_children()
            _kill_processes()
            process.join(10)
            signal.signal(signal.SIGCHLD, handler)
    assert process.exitcode == -signal.SIGKILL


def test_state_saved_in_the_last_batch_resumes_at_the_next_epoch() -> None:
    loader = make_loader(num_rows=6)
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 3), (1, 0)]
    assert len(list(loader)) == 2  # a whole second epoch, not an empty one


def test_every_epoch_is_a_new_permutation_of_all_rows() -> None:
    loader = make_loader(drop_last=False)
    epochs = [[i for batch in loader for i in batch["index"]] for _ in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs == [shuffled_order(11, 5, epoch) for epoch in range(3)]
    assert epochs[0] != shuffled_order(11, 6, 0)


def test_the_permutation_is_the_same_on_every_machine() -> None:
    assert shuffled_order(8, seed=0, epoch=0) == PINNED


def test_unshuffled_order_and_lengths() -> None:
    assert take(make_loader(shuffle=False, drop_last=False), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert len(make_loader(drop_last=False)) == 4 and len(make_loader()) == 3


def test_iterating_does_not_advance_the_global_rng() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(make_loader(), 4)
    assert torch.equal(before, torch.get_rng_state())


def test_sampler_replaces_the_order() -> None:
    loader = make_loader(num_rows=4, batch_size=2, sampler=lambda epoch: [3, 2, 1, 0] if epoch == 0 else [0, 0, 1, 1])
    assert take(loader, 4) == [[3, 2], [1, 0], [0, 0], [1, 1]]


def test_resume_with_another_batch_size() -> None:
    loader = make_loader(num_rows=10, batch_size=2, shuffle=False)
    take(loader, 2)
    larger = make_loader(num_rows=10, batch_size=3, shuffle=False)
    larger.load_state_dict(loader.state_dict())
    assert take(larger, 3) == [[4, 5, 6], [7, 8, 9], [0, 1, 2]]
    too_large = make_loader(num_rows=10, batch_size=8, shuffle=False)
    too_large.load_state_dict(loader.state_dict())
    assert take(too_large, 1) == [list(range(8))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": 12}, "number of rows was 11 and is now 12"),
        ({"seed": 6}, r"data\.seed was 5 and is now 6"),
        ({"shuffle": False}, r"data\.shuffle was True and is now False.*resume_mode=disable"),
    ],
)
def test_state_of_another_order_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loader(**changes).load_state_dict(make_loader().state_dict())


class Described(Numbers):
    """Numbers with another content, or another description of it."""

    def __init__(self, content: int, **attributes: Any) -> None:
        super().__init__(11)
        self.content = content
        vars(self).update(attributes)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"index": item, "content": self.content, "tensor": torch.arange(3), "array": np.arange(2)}


def loader_of(dataset: Dataset[Any]) -> StatefulLoader:
    return create_dataloader(dataset, 3, shuffle=True, seed=5)


def test_rows_of_a_dataset_without_files_are_sampled() -> None:
    state = loader_of(Described(1)).state_dict()
    loader_of(Described(1)).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"the content of 16 rows of Described has changed\. Resume with the same data"
    ):
        loader_of(Described(2)).load_state_dict(state)


def test_own_fingerprint_of_a_dataset() -> None:
    state = loader_of(Described(1, fingerprint="v1")).state_dict()
    loader_of(Described(2, fingerprint="v1")).load_state_dict(state)
    with pytest.raises(ValueError, match="the content of data has changed"):
        loader_of(Described(1, fingerprint="v2")).load_state_dict(state)


class Random(Numbers):
    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"index": item, "noise": torch.randn(2)}


def test_content_that_cannot_be_described_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = loader_of(Random(11)).state_dict()
    assert "reading a row twice gives different values; give Random a `fingerprint` attribute" in caplog.text
    loader_of(Random(11)).load_state_dict(state)
    caplog.clear()
    loader_of(Described(object())).state_dict()
    assert "row 0 of Described: content is a builtins.object" in caplog.text


def test_changed_files_are_named() -> None:
    saved = {"a": "1", "b": "2"}
    assert changes(saved, {"a": "1", "b": "2"}) == []
    assert changes(saved, {"moved/a": "1", "moved/b": "2"}) == []
    assert changes(saved, {"a": "1", "b": "3"}) == ["the content of b has changed"]
    assert changes(saved, {"a": "1", "c": "3"}) == ["c is new", "b is gone"]
    assert changes(saved, {"b": "2", "a": "1"}) == ["the order of the files has changed"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fingerprint_of_files_is_their_content(suffix: str, tmp_path: Path) -> None:
    files = [str(write_rows(tmp_path / f"{name}.{suffix}", 4)) for name in "ab"]
    config = DataConfig(max_prompt_length=40)
    before = content_of(RLHFDataset(files, tiny_tokenizer(), config))
    assert before == {file: sha256(file) for file in files}
    write_rows(tmp_path / f"b.{suffix}", 4, data_source="other")
    after = content_of(RLHFDataset(files, tiny_tokenizer(), config))
    assert changes(before, after) == [f"the content of {files[1]} has changed"]


def test_files_of_a_custom_class_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "custom.py").write_text(
        "from torch.utils.data import Dataset\n"
        "class Own(Dataset):\n"
        "    def __init__(self, data_files, tokenizer, config, max_samples): pass\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, item): return {'index': item}\n"
    )
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "custom.py"), name="Own"))
    file = write_rows(tmp_path / "a.jsonl", 4)
    assert content_of(create_rl_dataset(str(file), tiny_tokenizer(), config)) == {str(file): sha256(file)}
    assert list(content_of(create_rl_dataset("generated", tiny_tokenizer(), config))) == ["16 rows of Own"]


class Queued(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"queue": deque([1])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_state_that_cannot_be_saved_is_refused_at_the_start() -> None:
    loader_of(Numbers(11)).check_state()
    with pytest.raises(
        ValueError, match=r"Queued\.state_dict\(\) of the dataset: queue is a collections\.deque, which cannot"
    ):
        loader_of(Queued(11)).check_state()


def test_impossible_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"data\.train_batch_size=3, but the dataset has only 2 rows"):
        make_loader(num_rows=2)
    assert len(make_loader(num_rows=2, drop_last=False)) == 1
    with pytest.raises(ValueError, match="the dataset is empty"):
        make_loader(num_rows=0, drop_last=False)
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        make_loader(batch_size=0)
    with pytest.raises(ValueError, match=r"data\.seed=-1"):
        make_loader(seed=-1)
