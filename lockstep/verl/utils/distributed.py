"""verl.utils.distributed"""

import os

import torch

from lockstep.utils.distributed import join_process_group, leave_process_group


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the processes of torchrun; returns (local rank, rank, world size)."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    join_process_group(rank, world_size, device, timeout_second)
    return local_rank, rank, world_size


destroy_global_process_group = leave_process_group
