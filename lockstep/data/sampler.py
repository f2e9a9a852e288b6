"""Custom samplers of training rows: fixed orders, and curricula that adapt to the training batches.

    data.sampler.{class_path,class_name} --create_rl_sampler--> sampler --create_dataloader--> batches
                       update(batch) after each step <------------------------------------------'

`Resumable` describes what a sampler needs in order to resume.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Sampler

from lockstep.config.data import DataConfig
from lockstep.protocol import DataProto
from lockstep.registry import load_plugin

logger = logging.getLogger(__name__)


class AbstractSampler(Sampler[int], ABC):
    """The order of the training rows; `__iter__` yields the row numbers of one epoch, `__len__` is their count.

    Row numbers are drawn one batch at a time, when the batch's step begins.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__: the number of rows in an epoch")


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is updated after every training step."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """`batch` is the step's whole batch, with scores and advantages."""


@runtime_checkable
class Resumable(Protocol):
    """A sampler (or dataset) whose state is saved in checkpoints.

    A sampler's state includes its position in the epoch: after `load_state_dict`, `__iter__` yields the rest. A sampler
    without these methods is resumed by drawing again, which is correct if its order depends only on the epoch number
    (`set_epoch` is called if it exists) or on its own generator.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def create_rl_sampler(data_config: DataConfig, dataset: Sized) -> AbstractSampler | None:
    """The sampler named by `data.sampler`; None if unset, then `data.shuffle` decides."""
    path, name = data_config.sampler.class_path, data_config.sampler.class_name
    if path is None:
        return None
    cls = load_plugin("data.sampler.class_path", path, name, base=AbstractSampler)
    if data_config.dataloader_num_workers != 0:
        raise ValueError(
            f"data.dataloader_num_workers={data_config.dataloader_num_workers} with data.sampler: loader processes "
            "would draw rows before the sampler has seen the previous batches; set data.dataloader_num_workers=0"
        )
    sampler = cls(data_source=dataset, data_config=data_config)
    if isinstance(sampler, AbstractCurriculumSampler) and not isinstance(sampler, Resumable):
        logger.warning(
            "%s has no state_dict and load_state_dict: a resumed run draws rows as if it had seen no batches",
            cls.__name__,
        )
    return sampler
