"""What megatron-core lacks: the names that it takes from TransformerEngine, a CPU mode, and ranks that share a GPU over gloo.

megatron-core 0.16 names the CUDA device in many places and has no CPU mode. `megatron_calls` surrounds every call into it; outside
of it torch is unchanged, so that other engines of the process are not affected.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # megatron-core forgets to define it without TransformerEngine

# Nothing is random, neither dropout nor initial weights: generators are neither split over ranks nor kept for recomputation.
tensor_parallel.random.initialize_rng_tracker()
tensor_parallel.get_cuda_rng_tracker().fork = lambda *args: contextlib.nullcontext()
tensor_parallel.random._get_cuda_rng_state = lambda *args, **options: torch.empty(0)
tensor_parallel.random._set_cuda_rng_state = lambda *args, **options: None


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" makes a CPU tensor, x.cuda() is x, and x.type() names the type of a GPU tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")  # the distributed optimizer compares these names
        if kwargs and str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


_all_gather = dist.all_gather
_reduce_scatter = dist.reduce_scatter


def _gather_any(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """all_gather, also of tensors of different sizes, which gloo refuses."""
    if len({part.shape for part in parts}) == 1:
        return _all_gather(parts, own, group=group, **options)
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(own)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return None


def _reduce_scatter_any(own: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **options: Any) -> Any:
    """reduce_scatter, also of tensors of different sizes, which gloo refuses."""
    if len({part.shape for part in parts}) == 1:
        return _reduce_scatter(own, parts, group=group, **options)
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == group.rank():
            own.copy_(total)
    return None


class _Nothing:
    """A stream or an event of a device that has none: every method returns another one, and it is a context."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _Nothing

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        pass


_REPLACED: list[tuple[Any, str, Any]] = [
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "synchronize", lambda *args: None),
    *((torch.cuda, name, _Nothing) for name in ("Stream", "stream", "current_stream", "Event")),
    (dist, "all_gather", _gather_any),
    (dist, "reduce_scatter", _reduce_scatter_any),
]
"""Functions of torch that megatron-core calls on every device: owner, name and what serves a CPU process."""

_depth = 0


@contextlib.contextmanager
def megatron_calls(device: torch.device) -> Iterator[None]:
    """Call megatron-core inside."""
    global _depth
    if device.type == "cuda" and "cuda:gloo" in dist.get_backend_config():
        param_and_grad_buffer._coalescing_manager = _one_by_one
    if device.type != "cpu" or _depth:
        yield
        return
    token_dispatcher.maybe_move_tensor_to_cpu = _on_cpu
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _REPLACED]
    _depth += 1
    try:
        for owner, name, value in _REPLACED:
            setattr(owner, name, value)
        with _CudaMeansCpu():
            yield
    finally:
        _depth -= 1
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _one_by_one(*args: object, **options: object) -> Iterator[None]:
    """Collectives inside run as they are called: gloo cannot join those of CUDA tensors."""
    yield


def _on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core's turns only tensors of a GPU into numpy arrays."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
