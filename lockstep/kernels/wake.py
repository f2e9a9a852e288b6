"""Wake the GPU while Python is busy with imports: the driver and Triton need seconds, and little of Python."""

import threading
from contextlib import suppress


def wake_device(device: str) -> threading.Thread | None:
    """Begin to create the CUDA context, to load cuBLAS and to find Triton's compilers, where `device` may be a GPU.

    None where there is nothing to do. What goes wrong is left to whoever uses the device first, who can tell it better.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None

    def wake() -> None:
        with suppress(Exception):
            square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
            torch.mm(square, square)
            _compile_one_kernel()
            torch.cuda.synchronize()

    thread = threading.Thread(target=wake, name="wake-device")
    thread.start()
    return thread


def _compile_one_kernel() -> None:
    """The first one has Triton take a checksum of its 400 MB and build its link to the driver; it is one that generation uses."""
    import torch

    from lockstep.kernels import sampling

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    rows, tables, step = (zeros(*shape, dtype=torch.int32) for shape in ((1,), (1, 16), (1,)))
    state = zeros(1, sampling.STOPS + 4)
    sampling.begin_step(state, tables, rows, zeros(1, 1), zeros(1, 1), zeros(1), step, ring=8, block_size=16)
