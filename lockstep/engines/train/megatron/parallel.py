"""How the ranks of a process group share a model: megatron's parallel groups, which a process has once.

world = dp x pp x tp, in megatron's order: ranks that follow each other are of one tensor-parallel group, and pipeline stages
are furthest apart. Expert-parallel groups lie inside a stage, over its tensor- and data-parallel ranks.
"""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lockstep.config.megatron import McoreEngineConfig
from lockstep.engines.train.megatron.cpu import megatron_calls
from lockstep.utils.distributed import current_world_size, init_single_process_group


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups.

    ep, expert_tp: ranks that share a layer's experts, and that split each expert's matrices; 0 for a model without experts.
    """

    tp: int
    pp: int
    ep: int
    expert_tp: int

    def serves(self, other: "Layout") -> bool:
        """Whether these groups can be used for `other`. A model without experts does not use their groups."""
        return self.groups == other.groups or (not other.ep and self.groups[:2] == other.groups[:2])

    @property
    def groups(self) -> tuple[int, int, int, int]:
        """The sizes of Megatron's groups, which exist for experts in any case."""
        return self.tp, self.pp, self.ep or 1, self.expert_tp or self.tp

    def __str__(self) -> str:
        sizes = f"tensor_model_parallel_size={self.tp}, pipeline_model_parallel_size={self.pp}"
        experts = f", expert_model_parallel_size={self.ep}, expert_tensor_parallel_size={self.expert_tp}"
        return sizes + (experts if self.ep else "")


@dataclass
class _Current:
    """The layout of this process, the process group it divides, and the live engines that use it with their keys."""

    layout: Layout
    world: Any
    users: "weakref.WeakKeyDictionary[object, str]"


_current: _Current | None = None


def layout_of(config: McoreEngineConfig, key: str, num_experts: int | None) -> Layout:
    """ValueError if the sizes do not fit the ranks. key: the config section, for messages."""
    tp, pp, ep = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.expert_model_parallel_size,
    )
    expert_tp = config.expert_tensor_parallel_size or tp
    world = current_world_size()
    if config.context_parallel_size > 1:
        raise ValueError(
            f"{key}.context_parallel_size={config.context_parallel_size} needs attention kernels of TransformerEngine, which this "
            f"engine does not use; set it to 1, and {key}.tensor_model_parallel_size with {key}.sequence_parallel=true, or "
            "strategy=fsdp with ulysses_sequence_parallel_size for long sequences"
        )
    if (config.virtual_pipeline_model_parallel_size or 1) > 1:
        raise ValueError(
            f"{key}.virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size}: interleaved stages are not "
            "supported; set it to null"
        )
    if world % (tp * pp):
        raise ValueError(
            f"{key}.tensor_model_parallel_size={tp} times {key}.pipeline_model_parallel_size={pp} does not divide the {world} "
            "ranks of this role"
        )
    if not num_experts:
        if ep > 1:
            raise ValueError(f"{key}.expert_model_parallel_size={ep}: the model has no experts; set it to 1")
        return Layout(tp, pp, 0, 0)
    if (world // pp) % (ep * expert_tp):
        raise ValueError(
            f"{key}.expert_model_parallel_size={ep} times {key}.expert_tensor_parallel_size={expert_tp} does not divide the "
            f"{world // pp} ranks of a pipeline stage"
        )
    return Layout(tp, pp, ep, expert_tp)


def join(layout: Layout, engine: object, key: str, device: torch.device) -> None:
    """Create the groups of `layout`, or use those of the engines of this process, which must have the same. Collective."""
    global _current
    init_single_process_group(device)
    if _current is not None and (_current.world is not dist.group.WORLD or not ps.model_parallel_is_initialized()):
        ps.destroy_model_parallel()
        _current = None
    if _current is not None and not _current.layout.serves(layout):
        if _current.users:
            gc.collect()  # an engine that was dropped may be part of a cycle
        if _current.users:
            other = next(iter(_current.users.values()))
            raise ValueError(
                f"{key}: {layout}; but {other} has {_current.layout}, in the same processes, where megatron-core has one layout. "
                "Set the same sizes for both, or place the roles on different GPUs (trainer.placement)"
            )
        _leave_groups()
        _current = None
    if _current is None:
        with megatron_calls(device):
            tp, pp, ep, expert_tp = layout.groups
            ps.initialize_model_parallel(
                tp,
                pp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=expert_tp,
                create_gloo_process_groups=False,
            )
        _current = _Current(layout, dist.group.WORLD, weakref.WeakKeyDictionary())
    _current.users[engine] = key


def _leave_groups() -> None:
    """End the groups of this layout: megatron forgets them, but each keeps three threads of gloo, or the memory of NCCL."""
    for group in (ps._global_process_group_list or [])[1:]:  # the first stands for the whole world
        dist.destroy_process_group(group)
    ps.destroy_model_parallel()
