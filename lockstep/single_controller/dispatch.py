"""How a call on a worker group becomes one call per worker, and the outputs become one result.

    group.method(data) ─► dispatch_fn ─► one share per rank ─► workers ─► outputs per rank ─► collect_fn ─► result

A worker method declares its mode with `@register`. The modes:

    ONE_TO_ALL                  every rank gets the same arguments             list of all outputs
    ALL_TO_ALL, DP_COMPUTE      every argument is a list, one item per rank    list of all outputs
    RANK_ZERO                   only rank 0 is called                          its output
    DP_COMPUTE_PROTO            every DataProto is split by rows               the joined DataProto
    DP_COMPUTE_PROTO_WITH_FUNC  the first argument is a function for all,      the joined DataProto
                                the others are split by rows
    DP_COMPUTE_METRIC           every DataProto is split by rows               list of all outputs
    make_nd_compute_dataproto_dispatch_fn(mesh)
                                split over the data-parallel ranks of a mesh;  the joined DataProto of one rank
                                ranks that share a data-parallel rank get      per data-parallel rank; Ray does
                                the same rows                                  not send those of the others

If the rows do not divide evenly, the batch is padded before dispatch: the added rows are marked under the batch key
`is_padding`, which a worker may read (`lockstep.protocol.real_rows`), and are dropped from the joined result. A method
whose outputs are joined must therefore return one row per input row, in the same order.

A TensorDict is split like the DataProto of its entries (`DataProto.from_tensordict`), and TensorDict outputs are joined to one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Protocol, TypedDict, TypeVar

import numpy as np
from tensordict import TensorDict

from lockstep.protocol import PADDING_KEY, DataProto, DataProtoFuture, drop_marked, pad_and_mark
from lockstep.registry import Registry
from lockstep.single_controller.futures import Future

Shares = tuple[tuple[Sequence[Any], ...], dict[str, Sequence[Any]]]
"""Positional and keyword arguments, each a sequence with one item per called rank."""

Rows = DataProto | DataProtoFuture | TensorDict
"""What can be split by rows; a future is of a DataProto or a TensorDict."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(StrEnum):
    """The built-in modes; `register_dispatch_mode` adds others as plain strings."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"


class Execute(Enum):
    """Which ranks a call runs on."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Mesh:
    """How the ranks of a group share the rows of a batch.

    dp_ranks:      for each rank, its data-parallel rank, that is the part of the rows it gets.
    collect_ranks: for each part, the rank whose output is collected.
    """

    dp_ranks: list[int]
    collect_ranks: list[int]

    @property
    def dp_size(self) -> int:
        return len(self.collect_ranks)


class Group(Protocol):
    """The part of a worker group's interface that dispatch and collect functions may use."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh: ...


class DispatchMode(TypedDict):
    """A pair of functions.

    dispatch_fn(group, *args, **kwargs) returns the shares.
    collect_fn(group, outputs) returns the result; for a non-blocking method the outputs are futures.
    """

    dispatch_fn: Callable[..., Shares]
    collect_fn: Callable[[Any, Sequence[Any]], Any]


@dataclass(frozen=True)
class Registration:
    """The settings of `@register` on a worker method."""

    mode: DispatchMode
    execute_mode: Execute
    blocking: bool


def dispatch_one_to_all(worker_group: Group, *args: Any, **kwargs: Any) -> Shares:
    """The same arguments for every rank."""
    n = worker_group.world_size
    return tuple([arg] * n for arg in args), {name: [value] * n for name, value in kwargs.items()}


def dispatch_rank_zero(worker_group: Group, *args: Any, **kwargs: Any) -> Shares:
    """The arguments unchanged, for rank 0."""
    return tuple([arg] for arg in args), {name: [value] for name, value in kwargs.items()}


def dispatch_all_to_all(worker_group: Group, *args: Any, **kwargs: Any) -> Shares:
    """Arguments that already are lists with one item per rank."""
    n = worker_group.world_size
    for name, value in _named(args, kwargs):
        if not isinstance(value, (list, tuple)):
            raise TypeError(
                f"{name} is a {type(value).__name__}; it must be a list with one item for each of {n} ranks"
            )
        if len(value) != n:
            raise ValueError(f"{name} has {len(value)} items for {n} ranks")
    return args, kwargs


def dispatch_dp_compute_data_proto(worker_group: Group, *args: Any, **kwargs: Any) -> Shares:
    """Every batch split by rows, one part per rank."""
    return split_rows(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: Group, *args: Any, **kwargs: Any) -> Shares:
    """A function for every rank, then batches split by rows."""
    if not args or not callable(args[0]):
        raise TypeError("the first argument must be a function, which is called on every rank with the rank's rows")
    parts, named_parts = split_rows(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *parts), named_parts


def dispatch_nd_compute_dataproto(mesh_name: str, worker_group: Group, *args: Any, **kwargs: Any) -> Shares:
    """Every batch split over the data-parallel ranks of a mesh."""
    mesh = worker_group.mesh(mesh_name)
    parts, named_parts = split_rows(mesh.dp_size, args, kwargs)

    def per_rank(shares: Sequence[Any]) -> list[Any]:
        # Ranks with the same rows get the same object: a backend sends it once, and gives each worker its own batch.
        return [shares[dp_rank] for dp_rank in mesh.dp_ranks]

    return tuple(per_rank(p) for p in parts), {name: per_rank(p) for name, p in named_parts.items()}


def collect_all_to_all(worker_group: Group, output: Sequence[Any]) -> Sequence[Any]:
    """All outputs in rank order."""
    return output


def collect_rank_zero(worker_group: Group, output: Sequence[Any]) -> Any:
    """The only output."""
    return output[0]


def collect_dp_compute_data_proto(worker_group: Group, output: Sequence[Any]) -> Rows:
    """The rows of all ranks in order, without padding."""
    return join_rows(output)


def collect_nd_compute_dataproto(mesh_name: str, worker_group: Group, output: Sequence[Any]) -> Rows:
    """The rows of the mesh's collecting ranks in data-parallel order, without padding."""
    return join_rows([output[rank] for rank in worker_group.mesh(mesh_name).collect_ranks])


def split_rows(num_parts: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Shares:
    """Split every batch into `num_parts` equal parts, padded and marked if it does not divide evenly."""
    rows: dict[str, int] = {}
    for name, value in _named(args, kwargs):
        if not isinstance(value, Rows):
            raise TypeError(
                f"{name} is a {type(value).__name__}; only DataProto and TensorDict can be split by rows, put other values "
                f"in meta_info"
            )
        if isinstance(value, TensorDict) or (
            isinstance(value, DataProto) and (value.batch is not None or value.non_tensor_batch)
        ):
            rows[name] = len(value)
    if 0 in rows.values():
        raise ValueError(f"no rows to split in {', '.join(name for name, num in rows.items() if num == 0)}")
    if len(set(rows.values())) > 1:
        raise ValueError(f"batches of one call must have the same number of rows, got {rows}")
    return tuple(_split(num_parts, arg) for arg in args), {k: _split(num_parts, v) for k, v in kwargs.items()}


def _split(num_parts: int, data: Rows) -> Sequence[Any]:
    if isinstance(data, DataProtoFuture):
        return data.split_by([functools.partial(_padded_part, num_parts, i) for i in range(num_parts)])
    if isinstance(data, TensorDict):
        return [part.to_tensordict() for part in _split(num_parts, DataProto.from_tensordict(data))]
    return pad_and_mark(data, num_parts).chunk(num_parts)


def _padded_part(num_parts: int, index: int, data: Any) -> Any:
    return _split(num_parts, data)[index]


def separate_batch(share: Any) -> Any:
    """A batch with the same columns, so that a worker that pops keys does not affect others; other values as they are."""
    if isinstance(share, TensorDict):
        return share.copy()
    return share.select() if isinstance(share, DataProto) else share


def join_rows(outputs: Sequence[Any]) -> Rows:
    """One batch of the outputs' rows, without padding; a future of it if the outputs are futures."""
    first = outputs[0]
    if isinstance(first, Future):
        return DataProtoFuture(join_real_rows, list(outputs), resolve=type(first).get_all)
    return join_real_rows(outputs)


def join_real_rows(outputs: Sequence[Any]) -> Any:
    """The rows of all outputs in order, without those marked as padding."""
    if all(isinstance(output, TensorDict) for output in outputs):
        return join_real_rows([DataProto.from_tensordict(output) for output in outputs]).to_tensordict()
    for i, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            raise TypeError(
                f"part {i} of the output is a {type(output).__name__}; this dispatch mode joins DataProto or TensorDict"
            )
    return drop_marked(DataProto.concat(outputs))


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """The mode that splits over the mesh registered by `_register_dispatch_collect_info(mesh_name, ...)`."""
    return {
        "dispatch_fn": functools.partial(dispatch_nd_compute_dataproto, mesh_name),
        "collect_fn": functools.partial(collect_nd_compute_dataproto, mesh_name),
    }


DISPATCH_MODES: Registry[DispatchMode] = Registry("dispatch mode")


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Shares], collect_fn: Callable[[Any, Sequence[Any]], Any]
) -> None:
    """Add a custom mode; workers select it with `@register(dispatch_mode="NAME")` or `Dispatch.NAME`."""
    name = str(dispatch_mode_name)
    DISPATCH_MODES.register(name)({"dispatch_fn": dispatch_fn, "collect_fn": collect_fn})
    if not hasattr(Dispatch, name):
        setattr(Dispatch, name, name)


def get_predefined_dispatch_fn(dispatch_mode: str) -> DispatchMode:
    """The dispatch and collect functions of a mode."""
    return DISPATCH_MODES.get(dispatch_mode)


register_dispatch_mode(Dispatch.RANK_ZERO, dispatch_rank_zero, collect_rank_zero)
register_dispatch_mode(Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all_to_all)
register_dispatch_mode(Dispatch.ALL_TO_ALL, dispatch_all_to_all, collect_all_to_all)
register_dispatch_mode(Dispatch.DP_COMPUTE, dispatch_all_to_all, collect_all_to_all)
register_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, dispatch_dp_compute_data_proto, collect_dp_compute_data_proto)
register_dispatch_mode(
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
)
register_dispatch_mode(Dispatch.DP_COMPUTE_METRIC, dispatch_dp_compute_data_proto, collect_all_to_all)

_REGISTRATION = "_lockstep_registration"


def register(
    dispatch_mode: str | DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Decorator: make a worker method callable on its worker group.

    dispatch_mode:       a name in `Dispatch` or of `register_dispatch_mode`, or the two functions themselves.
    execute_mode:        RANK_ZERO calls only rank 0 with the arguments unchanged and returns its output.
    blocking:            False returns immediately an object with `get()`.
    materialize_futures: the worker waits for DataProtoFuture arguments before the method runs.
    """
    if Execute.RANK_ZERO is execute_mode:
        whole = (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        if not isinstance(dispatch_mode, str) or dispatch_mode not in whole:
            raise ValueError(
                f"execute_mode RANK_ZERO would drop the other ranks' shares of dispatch_mode {dispatch_mode}"
            )
        dispatch_mode = Dispatch.RANK_ZERO
    if dispatch_mode == Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    mode = DISPATCH_MODES.get(dispatch_mode) if isinstance(dispatch_mode, str) else dispatch_mode
    registration = Registration(mode, execute_mode, blocking)

    def decorate(method: Method) -> Method:
        # The wrappers run on the worker.
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _materialize(args, kwargs) if materialize_futures else (args, kwargs)
            marks = _padding_marks(args, kwargs)
            return _mark_output(method(self, *args, **kwargs), marks, method.__qualname__)

        @functools.wraps(method)
        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _materialize(args, kwargs) if materialize_futures else (args, kwargs)
            marks = _padding_marks(args, kwargs)
            return _mark_output(await method(self, *args, **kwargs), marks, method.__qualname__)

        wrapper: Any = call_async if inspect.iscoroutinefunction(method) else call
        setattr(wrapper, _REGISTRATION, registration)
        return wrapper

    return decorate


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Every method of the class with `@register`."""
    found = {name: getattr(getattr(worker_cls, name, None), _REGISTRATION, None) for name in dir(worker_cls)}
    return {name: registration for name, registration in found.items() if registration is not None}


def is_collected(worker: Any, method: Callable[..., Any]) -> bool:
    """False on a rank whose output of a registered method nobody reads: another rank of the mesh has the same rows."""
    registration: Registration | None = getattr(method, _REGISTRATION, None)
    collect: Any = None if registration is None else registration.mode["collect_fn"]
    if getattr(collect, "func", None) is not collect_nd_compute_dataproto:
        return True
    (mesh_name,) = collect.args
    meshes: dict[str, tuple[int, bool]] = getattr(worker, "_meshes", {})
    return meshes.get(mesh_name, (0, True))[1]


def _materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def value(arg: Any) -> Any:
        return arg.get() if isinstance(arg, (DataProtoFuture, Future)) else arg

    return tuple(value(arg) for arg in args), {name: value(arg) for name, arg in kwargs.items()}


def _padding_marks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> np.ndarray | None:
    """The padding marks of the input rows; None if nothing was padded."""
    for _, value in _named(args, kwargs):
        if isinstance(value, TensorDict) and PADDING_KEY in value.keys():  # noqa: SIM118 - TensorDict has no `in`
            return np.array(value.get(PADDING_KEY).tolist())
        if isinstance(value, DataProto) and PADDING_KEY in value.non_tensor_batch:
            return value.non_tensor_batch[PADDING_KEY]
    return None


def _mark_output(output: Any, marks: np.ndarray | None, method: str) -> Any:
    """Copy the padding marks of the input rows to the output, so that collect can drop the padding."""
    if marks is not None and isinstance(output, TensorDict):
        return _mark_output(DataProto.from_tensordict(output), marks, method).to_tensordict()
    if marks is None or not isinstance(output, DataProto) or PADDING_KEY in output.non_tensor_batch:
        return output
    if output.batch is None and not output.non_tensor_batch:
        return output
    num_padding = int(marks.sum())
    if len(output) == len(marks) - num_padding or num_padding == 0:  # the method dropped the padding, or got none
        marks = np.zeros(len(output), dtype=bool)
    elif len(output) != len(marks):
        raise ValueError(
            f"{method} returned {len(output)} rows for {len(marks)} input rows, {num_padding} of them padding, so the "
            f"padding cannot be dropped; call it with a batch size divisible by the number of ranks"
        )
    marked = output.select()
    marked.non_tensor_batch[PADDING_KEY] = marks
    return marked


def _named(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"argument {i}", arg) for i, arg in enumerate(args)] + [(f"argument {k!r}", v) for k, v in kwargs.items()]
