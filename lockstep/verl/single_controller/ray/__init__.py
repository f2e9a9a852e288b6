"""verl.single_controller.ray; Ray is imported on first use."""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.single_controller.ray.pools": ("merge_resource_pool", "split_resource_pool"),
        "lockstep.verl.single_controller.ray.base": (
            "RayClassWithInitArgs",
            "RayResourcePool",
            "RayWorkerGroup",
            "ResourcePoolManager",
            "create_colocated_worker_cls",
            "create_colocated_worker_cls_fused",
        ),
    },
)
