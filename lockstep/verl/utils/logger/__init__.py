"""verl.utils.logger"""

import logging
import sys
from typing import Any

from lockstep.utils.distributed import current_rank


def print_rank_0(message: Any) -> None:
    """Print on rank 0 of the process group."""
    print_with_rank(message, current_rank(), log_only_rank_0=True)


def print_with_rank(message: Any, rank: int = 0, log_only_rank_0: bool = False) -> None:
    if not log_only_rank_0 or rank == 0:
        sys.stdout.write(f"[rank {rank}] {message}\n")


def log_with_rank(
    message: Any, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    if not log_only_rank_0 or rank == 0:
        logger.log(level, "[rank %d] %s", rank, message)
