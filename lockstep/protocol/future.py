"""DataProtoFuture: a batch that workers are still computing.

The controller can pass it to the next worker group without waiting: `chunk` gives each worker a future of its part, and
the worker waits for it. The backend provides `resolve`, which waits for its futures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.protocol.data_proto import DataProto


def resolve_each(futures: Sequence[Any]) -> list[Any]:
    """Wait for futures that have a `get` method, one after another."""
    return [future.get() for future in futures]


@dataclass
class DataProtoFuture:
    """The batch `dispatch_fn(collect_fn(values of futures))`, computed when `get` is called.

    collect_fn:  joins the workers' outputs.
    futures:     one per worker that contributes.
    dispatch_fn: takes a part of the joined batch; None keeps all of it.
    resolve:     waits for all futures and returns their values.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    resolve: Callable[[Sequence[Any]], list[Any]] = resolve_each

    def get(self) -> DataProto:
        """Wait and return the batch."""
        data = self.collect_fn(self.resolve(self.futures))
        return data if self.dispatch_fn is None else self.dispatch_fn(data)

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Futures of the `chunks` equal parts."""
        return self.split_by([partial(_part, index=i, chunks=chunks) for i in range(chunks)])

    def split_by(self, parts: Sequence[Callable[[DataProto], DataProto]]) -> list["DataProtoFuture"]:
        """One future per function that takes a part of this batch."""
        return [
            DataProtoFuture(self.collect_fn, self.futures, partial(_then, self.dispatch_fn, part), self.resolve)
            for part in parts
        ]

    @staticmethod
    def concat(data: Sequence[Any]) -> "DataProtoFuture":
        """A future of the rows of all given futures, in order."""
        return DataProtoFuture(DataProto.concat, list(data))


def _part(data: DataProto, index: int, chunks: int) -> DataProto:
    return data.chunk(chunks)[index]


def _then(
    first: Callable[[DataProto], DataProto] | None, second: Callable[[DataProto], DataProto], data: DataProto
) -> DataProto:
    return second(data if first is None else first(data))
