"""verl.utils.checkpoint"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.utils.checkpoint.checkpoint_manager": (
            "BaseCheckpointManager",
            "find_latest_ckpt_path",
            "get_checkpoint_tracker_filename",
            "should_save_ckpt_esi",
        ),
        "lockstep.verl.utils.checkpoint.fsdp_checkpoint_manager": ("FSDPCheckpointManager",),
    },
)
