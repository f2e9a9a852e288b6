"""verl.utils.memory_utils"""

import gc

import torch


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 1) -> None:
    """Collect garbage and return torch's cached GPU memory to the device."""
    for _ in range(max_retries):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            if force_sync:
                torch.cuda.synchronize()
