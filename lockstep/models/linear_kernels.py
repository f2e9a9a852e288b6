"""Kernels of recurrent layers (flash-linear-attention, causal-conv1d, mamba-ssm): only half precision on CUDA reaches them.

transformers calls them wherever the packages are installed, also for tensors on a CPU, for which they have no code, and in float32,
where their products round to TF32: too much for a reference.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lockstep.kernels.ops import HALF

PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")


def limit_kernels(model: nn.Module) -> None:
    """On other devices and in float32 the modules of a transformers model compute by transformers' torch forms."""
    if not any(package in sys.modules or find_spec(package) for package in PACKAGES):
        return
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers.models."):
            _dispatch(sys.modules[name])


def _dispatch(functions: ModuleType) -> None:
    """Replace the functions of a modeling file that stand for a kernel."""
    for name, function in list(vars(functions).items()):
        torch_form = inspect.unwrap(function) if inspect.isfunction(function) else function
        is_here = getattr(torch_form, "__module__", None) == functions.__name__
        if torch_form is not function and is_here:
            setattr(functions, name, _HalfOnCuda(function, torch_form))


class _HalfOnCuda:
    """A kernel for half precision on CUDA, its torch form for other tensors."""

    def __init__(self, kernel: Callable[..., Any], torch_form: Callable[..., Any]) -> None:
        functools.update_wrapper(self, torch_form)
        self._kernel = kernel
        self._torch_form = torch_form
        self._parameters = inspect.signature(torch_form).parameters

    def __call__(self, *args: Any, **options: Any) -> Any:
        tensor = next(value for value in (*args, *options.values()) if isinstance(value, Tensor))
        if tensor.is_cuda and tensor.dtype in HALF:
            return self._kernel(*args, **options)
        known = {name: value for name, value in options.items() if name in self._parameters}
        return self._torch_form(*args, **known)
