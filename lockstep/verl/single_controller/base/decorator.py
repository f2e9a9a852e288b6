"""verl.single_controller.base.decorator: dispatch modes of worker methods."""

from lockstep.single_controller.dispatch import (
    Dispatch as Dispatch,
    Execute as Execute,
    collect_all_to_all as collect_all_to_all,
    collect_dp_compute_data_proto as collect_dp_compute_data_proto,
    collect_nd_compute_dataproto as collect_nd_compute_dataproto,
    dispatch_all_to_all as dispatch_all_to_all,
    dispatch_dp_compute_data_proto as dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func as dispatch_dp_compute_data_proto_with_func,
    dispatch_nd_compute_dataproto as dispatch_nd_compute_dataproto,
    dispatch_one_to_all as dispatch_one_to_all,
    get_predefined_dispatch_fn as get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
    register as register,
    register_dispatch_mode as register_dispatch_mode,
)
