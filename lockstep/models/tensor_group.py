"""The ranks that share one copy of a model's weights (tensor parallelism, Shoeybi et al. 2019, arXiv 1909.08053).

    attention, MLP: each rank has some heads and some columns of the MLP ─► its share of the output ─ sum ─► the output, on all
    vocabulary:     each rank has some rows of the embedding and the head ─► its logits ─ gather ─► the logits, on all

Every rank sees the same bits after a sum or a gather, so that all of them sample the same tokens. Not differentiable.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.utils.distributed import current_rank, current_world_size, get_mesh

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Concatenates; torch 2.13 has renamed it."""


@dataclass(frozen=True)
class TensorGroup:
    """`rank` of `size` in `group`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def sum(self, share: Tensor) -> Tensor:
        """All-reduce, in float32 whatever the dtype is; in place if it is float32."""
        total = share.float().contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(share.dtype)

    def once(self, tensor: Tensor) -> Tensor:
        """The tensor on the first rank and zeros on the others: added to their shares, a sum contains it once."""
        return tensor if self.rank == 0 else torch.zeros_like(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """(size, ...) of all ranks."""
        own = tensor.contiguous().view(-1)
        parts = own.new_empty(self.size * own.numel())
        all_gather(parts, own, group=self.group)
        return parts.view(self.size, *tensor.shape)

    def least(self, number: int) -> int:
        """The smallest `number` of the ranks."""
        least = torch.tensor(number)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return int(least)

    @property
    def fits_cuda_graphs(self) -> bool:
        """Only collectives of NCCL can be captured."""
        return "cuda:nccl" in dist.get_backend_config(self.group)


def tensor_group(size: int) -> TensorGroup | None:
    """The group of this rank among groups of `size` ranks that follow each other; None for 1. Collective."""
    if size == 1:
        return None
    world_size = current_world_size()
    if world_size % size:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the {world_size} ranks of the rollout"
        )
    # groups have the backends of every device, whatever the mesh is of
    mesh = get_mesh(torch.device("cpu"), {"dp": world_size // size, "tp": size})
    return TensorGroup(mesh.get_group("tp"), current_rank() % size, size)
