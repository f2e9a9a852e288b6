"""verl.workers.actor"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.workers.actor.base": ("BasePPOActor",),
        "lockstep.verl.workers.actor.dp_actor": ("DataParallelPPOActor",),
    },
)
