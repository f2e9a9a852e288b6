"""Masters and moments of a model under DeepSpeed's ZeRO, whole and one parameter at a time, and their checkpoint.

    ZeRO's flat partitions ─► one whole tensor ─► this rank's rows of it (DTensor) ─► shards/ ─► rows ─► whole ─► partitions

The checkpoint is that of `state.py`: it moves between ZeRO stages, world sizes and the FSDP engine. ZeRO's partitions begin and
end inside of rows, which the format cannot express, so saving and loading hold a second copy of this rank's share in host memory.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lockstep.engines.train.state import parts_to_load, read_shards, write_shards
from lockstep.utils.distributed import current_rank, current_world_size, get_mesh

MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


class ZeroState:
    """model: with the parameters that `engine`, DeepSpeed's, trains. stage: ZeRO's."""

    def __init__(self, model: nn.Module, engine: Any, stage: int) -> None:
        self._model = model
        self._engine = engine
        self._stage = stage

    def save(self, folder: Path, contents: Collection[str]) -> None:
        state: dict[str, Any] = {}
        if "model" in contents:
            state["model"] = {name: _rows_of(self.master(p)) for name, p in self._trained()} | self._buffers()
        if "optimizer" in contents and self._states():
            step = self._states()[0]["step"].detach().float().cpu()
            state["optimizer"] = {"state": {}}
            for name, parameter in self._trained():
                moments = {key: _rows_of(self._moment(parameter, key)) for key in MOMENTS}
                state["optimizer"]["state"][name] = {"step": step, **moments}
        write_shards(folder, state)

    def load(self, folder: Path, contents: Collection[str]) -> None:
        parts = parts_to_load(folder, contents)
        state: dict[str, Any] = {}
        shapes = {name: self.shape(p) for name, p in self._trained()}
        if "model" in parts:
            state["model"] = {name: _empty_rows(shape) for name, shape in shapes.items()} | self._buffers()
        if "optimizer" in parts:
            moments = {name: {key: _empty_rows(shape) for key in MOMENTS} for name, shape in shapes.items()}
            state["optimizer"] = {"state": {n: {"step": torch.tensor(0.0), **m} for n, m in moments.items()}}
        read_shards(folder, state)
        if "optimizer" in state:
            self._create_states(next(iter(state["optimizer"]["state"].values()))["step"])
            for name, parameter in self._trained():
                for key in MOMENTS:
                    self._set(parameter, _whole(state["optimizer"]["state"][name][key]), key)
        if "model" in state:
            self.set_masters((name, _whole(state["model"][name])) for name, _ in self._trained())

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The whole float32 master of a trained parameter. Collective."""
        if self._stage == 0:
            return parameter.detach()
        from deepspeed.utils import safe_get_full_fp32_param

        found: Tensor = safe_get_full_fp32_param(parameter)
        return found

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    @torch.no_grad()
    def set_masters(self, masters: Iterator[tuple[str, Tensor]]) -> None:
        """Give the trained parameters new values, by name, whole. Collective."""
        parameters = dict(self._trained())
        for name, value in masters:
            self._set(parameters[name], value)
        self._copy_masters_to_parameters()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def _buffers(self) -> dict[str, Tensor]:
        saved = self._model.state_dict()
        return {name: buffer for name, buffer in self._model.named_buffers() if name in saved}

    @property
    def _adamw(self) -> torch.optim.AdamW:
        return self._engine.basic_optimizer

    def _flat_masters(self) -> list[Tensor]:
        """What AdamW's state belongs to: this rank's partitions of the masters."""
        optimizer = self._engine.optimizer
        if self._stage == 0:
            return [parameter for _, parameter in self._trained()]
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
            if hasattr(optimizer, name):  # of stages 1 and 2, of stage 3, of stage 1 in bfloat16
                return list(getattr(optimizer, name))
        raise AssertionError(type(optimizer))

    def _states(self) -> list[dict[str, Tensor]]:
        """AdamW's state of each partition; empty before the first step."""
        return [self._adamw.state[flat] for flat in self._flat_masters() if self._adamw.state.get(flat)]

    def _create_states(self, step: Tensor) -> None:
        """Give AdamW the state that it has after `step` steps, apart from the moments' values."""
        for flat in self._flat_masters():
            state = self._adamw.state[flat]
            for key in MOMENTS:
                state.setdefault(key, torch.zeros_like(flat))
            state["step"] = step.to(flat.device).clone()
        if hasattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self._stage == 0:
            return self._adamw.state[parameter][key]
        from deepspeed.utils import safe_get_full_optimizer_state

        found: Tensor = safe_get_full_optimizer_state(parameter, key)
        return found

    def _set(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Write this rank's part of a whole master or moment."""
        if self._stage == 0:
            (parameter if key is None else self._adamw.state[parameter][key]).data.copy_(value)
        elif self._stage == 3:
            # DeepSpeed's function for whole values fails if the ranks do not divide the parameter
            size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
            rank = torch.distributed.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
            own = value.flatten()[rank * size : (rank + 1) * size]
            own = torch.nn.functional.pad(own, (0, size - len(own)))
            parameter._z3_optimizer.set_local_hp_param(own, parameter, key)  # type: ignore[attr-defined]
        else:
            parameter.set_full_hp_param(value, key)  # type: ignore[attr-defined]

    def _copy_masters_to_parameters(self) -> None:
        optimizer = self._engine.optimizer
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            optimizer._partition_all_parameters()
            for index in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if optimizer.persistent_parameters:  # those that stay gathered
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _rows_of(whole: Tensor) -> Tensor:
    """This rank's rows of a whole tensor, in host memory."""
    if current_world_size() == 1:
        return whole.detach().to(CPU, copy=True)
    rows = _empty_rows(tuple(whole.shape))
    assert isinstance(rows, DTensor)
    own = rows.to_local()
    chunk = -(-len(whole) // current_world_size())
    own.copy_(whole.detach()[chunk * current_rank() :][: len(own)])
    return rows


def _empty_rows(shape: tuple[int, ...]) -> Tensor:
    """Float32 memory for this rank's rows of a tensor."""
    if current_world_size() == 1:
        return torch.empty(shape)
    mesh = get_mesh(CPU, {"shard": current_world_size()})
    return torch.distributed.tensor.empty(*shape, device_mesh=mesh, placements=[Shard(0)])


def _whole(rows: Tensor) -> Tensor:
    return rows.full_tensor() if isinstance(rows, DTensor) else rows
