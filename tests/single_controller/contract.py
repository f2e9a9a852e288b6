"""Workers of the contract suite."""

import numpy as np
import torch
from tensordict import TensorDict

from lockstep.protocol import DataProto, drop_marked, real_rows
from lockstep.single_controller import (
    Backend,
    Dispatch,
    Execute,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)


def make_group(backend: Backend, cls: type[Worker], processes: list[int], *args, **kwargs) -> WorkerGroup:
    pool = backend.pool_class(process_on_nodes=processes, name_prefix="test")
    return backend.group_class(pool, backend.class_with_init(cls, *args, **kwargs))


def batch(rows: int, **meta) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"u{i}" for i in range(rows)]}, meta)


def reverse_ranks(group, *args):
    return tuple(list(arg)[::-1] for arg in args), {}


def join_with_plus(group, outputs):
    return "+".join(outputs)


register_dispatch_mode("TEST_REVERSED", reverse_ranks, join_with_plus)


class Scaler(Worker):
    """Multiplies `x`, and returns its rank and the number of rows."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        self.factor = factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_factor(self, factor: int, add: int = 0) -> tuple[int, int]:
        """Set the factor."""
        self.factor = factor + add
        return self.rank, self.factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register()
    def own_argument(self, text: str, suffix: str = "") -> str:
        return f"{self.rank}:{text}{suffix}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def plus_rank(self, number: int) -> int:
        return number + self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first_only(self, values: list[int]) -> tuple[int, list[int]]:
        return self.rank, values

    @register(execute_mode=Execute.RANK_ZERO)
    def first_only_by_execute(self, value: str) -> tuple[int, str]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data: DataProto) -> DataProto:
        x = data.batch["x"]
        return DataProto.from_dict(
            {"y": x * self.factor, "rank": torch.full_like(x, self.rank), "seen": torch.full_like(x, len(x))},
            meta_info={"metrics": {"sum": int((x * real_rows(data)).sum())}},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale_real_rows(self, data: DataProto) -> DataProto:
        data = drop_marked(data)
        return DataProto.from_dict({"y": data.batch["x"] * self.factor})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale_tensordict(self, data: TensorDict) -> TensorDict:
        out = TensorDict({"y": data["x"] * self.factor * data["times"]}, batch_size=data.batch_size)
        out.set_non_tensor("metrics", {"rows": len(data)})
        return out

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same_batch(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def metrics_only(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": int(real_rows(data).sum())}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double_rows(self, data: DataProto) -> DataProto:
        return data.select(non_tensor_batch_keys=["uid"]).repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_batches(self, a: DataProto, b: DataProto) -> DataProto:
        return DataProto.from_dict({"y": a.batch["x"] + b.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def upper(self, data: DataProto) -> DataProto:
        assert data.batch is None
        return DataProto(non_tensor_batch={"name": np.array([u.upper() for u in data.non_tensor_batch["uid"]], object)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def no_batch(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> dict[str, int]:
        return {"rank": self.rank, "rows": int(real_rows(data).sum())}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] * self.factor})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_later(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def first_later(self) -> str:
        return "first"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole_sum(self, data: DataProto) -> int:
        return int(data.batch["x"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait(self, value: int) -> int:
        return value + self.rank

    @register(dispatch_mode="TEST_REVERSED")
    def custom(self, text: str) -> str:
        return f"{self.rank}{text}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise LookupError("no such thing")
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, data: DataProto) -> DataProto:
        raise LookupError("no such thing")

    def private_to_the_worker(self) -> None:
        """Not registered."""


class Meshed(Worker):
    """Four ranks, two data-parallel parts: ranks (0, 2) hold part 1 and ranks (1, 3) part 0; 2 and 3 are collected."""

    def __init__(self, collect_all: bool = False) -> None:
        super().__init__()
        self._register_dispatch_collect_info(
            "model", dp_rank=1 - self.rank % 2, is_collect=collect_all or self.rank >= 2
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def tag(self, data: DataProto) -> DataProto:
        x = data.batch.pop("x")
        return DataProto.from_dict({"x": x, "rank": torch.full_like(x, self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"), blocking=False)
    def tag_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 100})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("modle"))
    def unknown_mesh(self, data: DataProto) -> DataProto:
        return data


class Breaking(Worker):
    """Cannot be constructed on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        if self.rank == 1:
            raise MemoryError("full")
