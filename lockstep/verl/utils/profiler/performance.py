"""verl.utils.profiler.performance"""

from lockstep.verl.utils.profiler import (
    GPUMemoryLogger as GPUMemoryLogger,
    log_gpu_memory_usage as log_gpu_memory_usage,
    marked_timer as marked_timer,
    simple_timer as simple_timer,
)
