"""Tests of programs that use Hydra."""

import logging
from collections.abc import Iterator

import pytest

from lockstep.utils.distributed import leave_process_group


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`hydra.main` configures logging for the whole process."""
    root = logging.root
    level, handlers = root.level, root.handlers[:]
    loggers = [logging.getLogger(name) for name in root.manager.loggerDict]
    disabled = [logger.disabled for logger in loggers]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for logger, was_disabled in zip(loggers, disabled):
        logger.disabled = was_disabled


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A program on verl may create a group for its own module, which would be that of later tests."""
    yield
    leave_process_group()
