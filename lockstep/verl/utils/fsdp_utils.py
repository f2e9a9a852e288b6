"""verl.utils.fsdp_utils: FSDP2 for a program's own modules, on torch's `fully_shard`.

Lockstep's workers shard their models themselves (`lockstep.engines.train.sharding`).
"""

import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy as CPUOffloadPolicy,
    FSDPModule as FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy as MixedPrecisionPolicy,
    fully_shard as fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from lockstep.utils.distributed import current_rank
from lockstep.verl.utils.device import get_device_id, get_device_name


def fsdp_version(model: nn.Module) -> int:
    """2 for `fully_shard`, 1 for FullyShardedDataParallel, 0 for a module that is not sharded."""
    if isinstance(model, FSDPModule):
        return 2
    return int(isinstance(model, FullyShardedDataParallel))


def _device() -> torch.device:
    return torch.device(get_device_name(), get_device_id()) if get_device_name() == "cuda" else torch.device("cpu")


def _layer_names(module: nn.Module, config: Any) -> set[str]:
    """Class names of the layers to shard: those of the config, else those that the model says not to split."""
    policy = _section(config, "wrap_policy")
    asked = policy.get("transformer_layer_cls_to_wrap") or getattr(module, "_no_split_modules", None) or []
    return {asked} if isinstance(asked, str) else set(asked)


def _section(config: Any, name: str) -> Any:
    section = (config or {}).get(name) if hasattr(config or {}, "get") else getattr(config, name, None)
    return section if hasattr(section, "get") else {}


def apply_fsdp2(model: nn.Module, fsdp_kwargs: Mapping[str, Any], config: Any = None) -> None:
    """Shard `model` in place: each decoder layer, embeddings that are not tied to the head, then the rest.

    fsdp_kwargs: of `fully_shard`. config: `wrap_policy.transformer_layer_cls_to_wrap` names the layers.
    """
    names = _layer_names(model, config)
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    for module in list(model.modules()):
        if module is not model and (type(module).__name__ in names or (isinstance(module, nn.Embedding) and not tied)):
            fully_shard(module, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, Any], device_mesh: DeviceMesh | None = None, cpu_offload: Any = None
) -> None:
    """Load the whole weights, which rank 0 has, into a sharded model; the model is on its device afterwards."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to_empty(device=_device())
    else:
        model.to(_device())
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=dist.get_world_size() > 1, cpu_offload=bool(cpu_offload)
    )
    set_model_state_dict(model, full_state, options=options)
    for buffer in model.buffers():  # such as rope frequencies, which are in no state dict
        dist.broadcast(buffer, src=0)
    if cpu_offload:
        model.to("cpu")
        for buffer in model.buffers():
            buffer.data = buffer.data.to(_device())


def fsdp2_clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all shards; returns the norm as a plain tensor."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None], norm_type, error_if_nonfinite)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm.to(_device()), foreach)
    return norm


def get_fsdp_full_state_dict(model: nn.Module, offload_to_cpu: bool = True, rank0_only: bool = True) -> dict[str, Any]:
    """The whole weights by name, on rank 0 or on all ranks; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload_to_cpu and rank0_only)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    if rank0_only and current_rank():
        return {}
    return {name: value.cpu() if offload_to_cpu else value for name, value in state.items()}


def get_fsdp_state_ctx(model: nn.Module, state_type: Any, state_cfg: Any, optim_cfg: Any) -> Any:
    """The context of FSDP1 in which `state_dict` has this form; FSDP2 needs none."""
    if fsdp_version(model) == 1:
        return FullyShardedDataParallel.state_dict_type(model, state_type, state_cfg, optim_cfg)
    return nullcontext()


@torch.no_grad()
def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Move the shards to host memory."""
    _move(model, torch.device("cpu"))
    if empty_cache:
        _free_cache()


@torch.no_grad()
def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Move the shards to this process's device."""
    _move(model, _device())


def _move(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model.to(device)


@torch.no_grad()
def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of the optimizer to host memory."""
    _move_state(optimizer, torch.device("cpu"))


@torch.no_grad()
def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: int | torch.device | str) -> None:
    """Move the state of the optimizer to a device."""
    device = torch.device(get_device_name(), device_id) if isinstance(device_id, int) else torch.device(device_id)
    _move_state(optimizer, device)


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device, non_blocking=True)


def _free_cache() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_fsdp_wrap_policy(module: nn.Module, config: Any = None, is_lora: bool = False) -> Callable[..., bool] | None:
    """Which modules FullyShardedDataParallel wraps (`auto_wrap_policy`); None if the config disables it.

    config: `min_num_params` wraps by size, `transformer_layer_cls_to_wrap` by class name. is_lora: adapters too.
    """
    settings = config if hasattr(config, "get") else {}
    if settings.get("disable", False):
        return None
    if (least := settings.get("min_num_params", 0)) > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    names = _layer_names(module, {"wrap_policy": settings})
    classes = {type(part) for part in module.modules() if type(part).__name__ in names}
    missing = names - {cls.__name__ for cls in classes}
    if missing:
        raise ValueError(f"wrap_policy: the model has no layer of class {', '.join(sorted(missing))}")
    if not classes:
        return None
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    return functools.partial(_also_adapters, by_class) if is_lora else by_class


def _also_adapters(by_class: Callable[..., bool], module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    if recurse or by_class(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel):
        return True
    weight = getattr(module, "weight", None)
    return not list(module.children()) and isinstance(weight, Tensor) and weight.requires_grad


def get_init_weight_context_manager(use_meta_tensor: bool = True, mesh: DeviceMesh | None = None) -> Callable[[], Any]:
    """Makes the context in which a model is constructed: on the CPU on rank 0, without memory on the others.

    mesh: rank 0 is the first along its last dimension. use_meta_tensor: false is the CPU on all ranks.
    """
    first = (mesh.get_coordinate() or [0])[-1] == 0 if mesh is not None else current_rank() == 0
    return functools.partial(torch.device, "cpu" if first or not use_meta_tensor else "meta")


def init_fn(x: nn.Module) -> nn.Module:
    """`param_init_fn` of FullyShardedDataParallel: memory for a module that was constructed without, except on rank 0."""
    if current_rank():
        x = x.to_empty(device=_device(), recurse=False)
        _free_cache()
    return x
