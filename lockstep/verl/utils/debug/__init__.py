"""verl.utils.debug, the older name of verl.utils.profiler."""

from lockstep.verl.utils.debug.metrics import calculate_debug_metrics as calculate_debug_metrics
from lockstep.verl.utils.profiler import (
    GPUMemoryLogger as GPUMemoryLogger,
    log_gpu_memory_usage as log_gpu_memory_usage,
    marked_timer as marked_timer,
    simple_timer as simple_timer,
)
