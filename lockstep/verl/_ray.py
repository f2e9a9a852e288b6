"""Classes that a program has wrapped by `ray.remote`."""

from typing import Any


def unwrapped(cls: Any) -> Any:
    """The class inside `ray.remote(cls)`; any other class unchanged."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        return cls
    inner = metadata.modified_class
    return getattr(inner, "__ray_actor_class__", inner)
