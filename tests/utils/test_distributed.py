"""The choice of backends before there is a process group."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lockstep.utils.distributed import _shares_gpu


@pytest.mark.parametrize(("gpus", "shared"), [("abc", False), ("aba", True), ("aa", True), ("a", False)])
def test_ranks_on_one_gpu_are_found(gpus: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=gpu))
    store = HashStore()

    def ask(gpu: Any) -> bool:
        return _shares_gpu(store, gpu, len(gpus))

    with ThreadPoolExecutor(len(gpus)) as ranks:
        assert list(ranks.map(ask, gpus)) == [shared] * len(gpus)
