"""verl.single_controller.base.decorator: dispatch modes of worker methods."""

from lockstep.single_controller.dispatch import (
    Dispatch,
    Execute,
    collect_all_to_all,
    collect_dp_compute_data_proto,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)

__all__ = [
    "Dispatch",
    "Execute",
    "collect_all_to_all",
    "collect_dp_compute_data_proto",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
]
