"""FSDP2 over a token model: each decoder layer a group of parameters that is gathered when it computes, then the rest.

fsdp_size = -1 or all ranks   (world,)                        sharded over all ranks
fsdp_size = n                 (world / n replicas, n shards)  hybrid: sharded over n ranks that follow each other

Weights in 4 bits are not sharded: every rank has all of them.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lockstep.config.model import FSDPEngineConfig
from lockstep.models.decoder import decoder_of
from lockstep.models.four_bit import is_4bit
from lockstep.models.stream_layer import StreamLayer
from lockstep.models.token_models import TokenModel
from lockstep.models.vision import is_vision
from lockstep.utils.distributed import current_world_size, get_mesh, init_single_process_group


def shard(model: nn.Module, config: FSDPEngineConfig, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Shard `model` in place; its gathered parameters are cast to `compute_dtype`, gradients are averaged over all ranks."""
    init_single_process_group(device)
    world_size, shard_size = current_world_size(), _shard_size(config.fsdp_size)
    replicas = {} if shard_size == world_size else {"replicate": world_size // shard_size}
    mesh = get_mesh(device, replicas | {"shard": shard_size})
    # inputs keep their dtype: the residual stream is in float32
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if streams_from_host(config, device) else OffloadPolicy()
    whole = {parameter for parameter in model.parameters() if is_4bit(parameter)}
    layers = decoder_layers(model)
    for layer in layers:
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward,
            ignored_params=whole,
        )
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=False,
        ignored_params=whole,
    )
    if config.forward_prefetch:
        for before, after in pairwise(cast(list[FSDPModule], layers)):
            before.set_modules_to_forward_prefetch([after])


def streams_from_host(config: FSDPEngineConfig, device: torch.device) -> bool:
    """Whether parameters live in host memory and come to the device layer by layer; on CPU they are there already."""
    return config.offload_policy and device.type != "cpu"


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: a forward without a backward does not."""
    for module in _sharded(model):
        module.reshard()


def whole_by_group(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once by name, whole and in the compute dtype, with one FSDP group gathered at a time. Collective.

    Parameters in 4 bits, of which every rank has all, are given as they are.
    """
    reshard(model)
    yield from ((name, parameter) for name, parameter in model.named_parameters() if is_4bit(parameter))
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for name, parameter in cast(nn.Module, module).named_parameters(prefix=prefix):
                # those of nested groups are still sharded
                if not isinstance(parameter, DTensor) and not is_4bit(parameter):
                    yield name, parameter.detach()
            module.reshard()


def sum_replicas(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward adds gradients up over replicas too; over several backwards the last one is enough."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def whole(tensor: Tensor) -> Tensor:
    """All shards of `tensor`, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded(model: nn.Module) -> list[FSDPModule]:
    if not isinstance(model, FSDPModule):
        return []  # `shard` makes the whole one a group too
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _shard_size(fsdp_size: int) -> int:
    world_size = current_world_size()
    if fsdp_size == -1:
        return world_size
    if fsdp_size < 1 or world_size % fsdp_size:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks of this role; set it to -1 (shard over "
            f"all ranks) or to a divisor of {world_size}"
        )
    return fsdp_size


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered together.

    Those of a vision tower are not among them: a rank without images does not call them.
    """
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    transformer = model.transformer if isinstance(model, TokenModel) else model
    is_seeing = isinstance(transformer, PreTrainedModel) and is_vision(transformer.config)
    inside = decoder_of(transformer) if is_seeing else model
    return [m for m in inside.modules() if isinstance(m, StreamLayer) or type(m).__name__ in names]
