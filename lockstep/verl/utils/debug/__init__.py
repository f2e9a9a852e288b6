"""verl.utils.debug, the older name of verl.utils.profiler."""

from lockstep.verl.utils.debug.metrics import calculate_debug_metrics
from lockstep.verl.utils.profiler import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer

__all__ = ["GPUMemoryLogger", "calculate_debug_metrics", "log_gpu_memory_usage", "marked_timer", "simple_timer"]
