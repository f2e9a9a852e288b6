"""How many threads a process that computes on the CPU uses."""

import os

import torch

SMALL_MODEL = 5_000_000
"""Parameters below which tensors are so small that threads would mostly wait for each other, spinning."""

_largest_model = 0


def use_threads_for(num_parameters: int) -> None:
    """Use one thread if all models of this process are small. Respects OMP_NUM_THREADS and torch.set_num_threads."""
    global _largest_model
    _largest_model = max(_largest_model, num_parameters)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() in (1, _DEFAULT):
        torch.set_num_threads(1 if _largest_model < SMALL_MODEL else _DEFAULT)


_DEFAULT = torch.get_num_threads()
