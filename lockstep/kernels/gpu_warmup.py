"""Initialise the GPU in a background thread while Python imports: driver, cuBLAS and Triton take seconds but little Python time."""

import threading
from contextlib import suppress


def start_gpu_warmup(device: str) -> threading.Thread | None:
    """Create the CUDA context, load cuBLAS and initialise Triton. None if `device` is "cpu" or there is no GPU.

    Warm-up errors are ignored; the first real use of the device raises them.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None

    def warm_up() -> None:
        with suppress(Exception):
            square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
            torch.mm(square, square)
            _compile_one_kernel()
            torch.cuda.synchronize()

    thread = threading.Thread(target=warm_up, name="gpu-warmup")
    thread.start()
    return thread


def _compile_one_kernel() -> None:
    """For the first kernel Triton hashes its installation and builds its driver interface; use one that generation needs."""
    import torch

    from lockstep.kernels import sampling

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    slot_ids, tables, step = (zeros(*shape, dtype=torch.int32) for shape in ((1,), (1, 16), (1,)))
    slot_state = zeros(1, sampling.STOPS + 4)
    sampling.begin_step(slot_state, tables, slot_ids, zeros(1, 1), zeros(1, 1), zeros(1), step, ring=8, block_size=16)
