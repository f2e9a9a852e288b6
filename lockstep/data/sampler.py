"""Samplers of training rows by user code: fixed orders and curricula that learn from the batches.

    data.sampler.{class_path,class_name} --create_rl_sampler--> sampler --create_dataloader--> batches
                       update(batch) after each step <------------------------------------------'

What a sampler must do to be resumed is said in `Resumable`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Sampler

from lockstep.config.data import DataConfig
from lockstep.protocol import DataProto
from lockstep.registry import load_object

logger = logging.getLogger(__name__)


class AbstractSampler(Sampler[int], ABC):
    """The order of the training rows; `__iter__` gives the row numbers of one epoch, `__len__` how many they are.

    Row numbers are drawn one batch at a time, and the next batch's only when its step begins.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__: the number of rows in an epoch")


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is told of every finished training step."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """`batch` is the step's whole batch, with scores and advantages."""


@runtime_checkable
class Resumable(Protocol):
    """What a sampler (or a dataset) has whose state a checkpoint must keep.

    A sampler's state includes its place in the epoch: after `load_state_dict`, `__iter__` gives the rest of it. One
    without these methods is resumed by drawing again what had been drawn, which is right where its order depends on
    nothing but the epoch's number (`set_epoch` is called if there is one) or on a generator of its own.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def create_rl_sampler(data_config: DataConfig, dataset: Sized) -> AbstractSampler | None:
    """The sampler that `data.sampler` names; None where it names none and `data.shuffle` decides."""
    path, name = data_config.sampler.class_path, data_config.sampler.class_name
    if path is None:
        return None
    if name is None:
        raise ValueError(f"data.sampler.class_path={path} needs data.sampler.class_name, the class in it")
    try:
        cls = load_object(path, name)
    except (ValueError, ImportError, SyntaxError) as error:
        raise ValueError(f"data.sampler.class_path={path}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, AbstractSampler)):
        raise ValueError(f"data.sampler.class_name={name} must be a subclass of lockstep.data.sampler.AbstractSampler")
    if data_config.dataloader_num_workers != 0:
        raise ValueError(
            f"data.dataloader_num_workers={data_config.dataloader_num_workers} with data.sampler: loader processes "
            "would draw rows before the sampler has seen the batches before them; set data.dataloader_num_workers=0"
        )
    sampler = cls(data_source=dataset, data_config=data_config)
    if isinstance(sampler, AbstractCurriculumSampler) and not isinstance(sampler, Resumable):
        logger.warning(
            "%s has no state_dict and load_state_dict: a resumed run draws its rows as if it had seen no batch", name
        )
    return sampler
