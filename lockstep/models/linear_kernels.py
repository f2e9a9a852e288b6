"""Kernels of recurrent layers (flash-linear-attention, causal-conv1d, mamba-ssm): only half precision on CUDA reaches them.

transformers calls them wherever the packages are installed, also for tensors on a CPU, for which they have no code, and in float32,
where their products round to TF32: too much for a reference. The gated delta rule is trained in torch, too, on a GPU on which its
kernel has no backward (`gated_delta.kernels_serve`).
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
from lockstep.models.gated_delta import kernels_serve

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
            serves = kernels_serve if "gated_delta_rule" in name else _is_half_on_cuda
            setattr(functions, name, _Dispatched(function, torch_form, serves))


def _is_half_on_cuda(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


class _Dispatched:
    """A kernel for the tensors that it serves, its torch form for others."""

    def __init__(
        self, kernel: Callable[..., Any], torch_form: Callable[..., Any], serves: Callable[[Tensor], bool]
    ) -> None:
        functools.update_wrapper(self, torch_form)
        self._kernel = kernel
        self._torch_form = torch_form
        self._serves = serves
        self._parameters = inspect.signature(torch_form).parameters

    def __call__(self, *args: Any, **options: Any) -> Any:
        tensor = next(value for value in (*args, *options.values()) if isinstance(value, Tensor))
        if self._serves(tensor):
            return self._kernel(*args, **options)
        known = {name: value for name, value in options.items() if name in self._parameters}
        return self._torch_form(*args, **known)
