"""verl.utils.debug.performance"""

from lockstep.verl.utils.profiler import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer

__all__ = ["GPUMemoryLogger", "log_gpu_memory_usage", "marked_timer", "simple_timer"]
