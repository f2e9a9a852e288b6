"""Wake the GPU while Python is busy with imports: the driver needs a second or more, and not Python."""

import threading
from contextlib import suppress


def wake_device(device: str) -> threading.Thread | None:
    """Begin to create the CUDA context and to load cuBLAS, where `device` may be a GPU; None where there is nothing to do.

    What goes wrong is left to whoever uses the device first, who can tell it better.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None

    def wake() -> None:
        with suppress(RuntimeError):
            square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
            torch.mm(square, square)
            torch.cuda.synchronize()

    thread = threading.Thread(target=wake, name="wake-device", daemon=True)
    thread.start()
    return thread
