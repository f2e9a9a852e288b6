"""Several roles in one process: one worker class that contains a worker of each role.

create_colocated_worker_cls({"actor": A, "critic": C}) ─► group with actor_update, critic_update, ...
group.spawn(["actor", "critic"])                       ─► {"actor": group with update, "critic": group with update}
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

from lockstep.observability import profiler
from lockstep.observability.profiler import ProfileRequest
from lockstep.single_controller.dispatch import Dispatch, register, registered_methods
from lockstep.single_controller.worker import Worker
from lockstep.single_controller.worker_group import ClassWithInitArgs
from lockstep.utils import spans
from lockstep.utils.spans import Span, span

_ROLE = "_lockstep_role"


class ColocatedWorker(Worker):
    """Base of the generated classes. `{role}_{method}` calls the method of the role's worker."""

    roles: ClassVar[dict[str, ClassWithInitArgs]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.worker_dict: dict[str, Worker] = {}
        for role, cls_with_init in self.roles.items():
            try:
                self.worker_dict[role] = cls_with_init()
            except Exception as error:
                error.add_note(f"raised while constructing the worker of role {role!r}")
                raise

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, request: ProfileRequest) -> None:
        """Profile this process, if the request has one of its roles and ranks."""
        if any(request.selects(role, self.rank) for role in self.roles):
            profiler.start_profile(request, f"{'+'.join(self.roles)}_rank{self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> list[str]:
        """The files of the profile, if there is one."""
        return profiler.stop_profile()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_spans(self) -> list[Span]:
        """What this process recorded since the last call."""
        return spans.take_spans()


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """A worker class that contains every role of `class_dict`, to be passed to a worker group."""
    if not class_dict:
        raise ValueError("create_colocated_worker_cls: no roles")
    members: dict[str, Any] = {"roles": dict(class_dict)}
    for role, cls_with_init in class_dict.items():
        if not issubclass(cls_with_init.cls, Worker):
            raise TypeError(f"role {role!r}: {cls_with_init.cls.__name__} is not a Worker")
        for name in registered_methods(cls_with_init.cls):
            if f"{role}_{name}" in members:
                raise ValueError(f"role {role!r} method {name!r}: another role already has a method {role}_{name}")
            members[f"{role}_{name}"] = _forward(role, name, getattr(cls_with_init.cls, name))
    cls = type("Colocated_" + "_".join(class_dict), (ColocatedWorker,), members)
    return type(next(iter(class_dict.values())))(cls)


def _forward(role: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the role's worker and records the call; `wraps` copies the registration."""

    @functools.wraps(method)
    def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if name.startswith("_") else span(name, (role, self.rank)):
            return getattr(self.worker_dict[role], name)(*args, **kwargs)

    setattr(call, _ROLE, role)
    return call


def owner_of(worker: Any, method: Callable[..., Any]) -> Any:
    """The role's worker that computes a method of `worker`, or `worker` itself."""
    role = getattr(method, _ROLE, None)
    return worker if role is None else worker.worker_dict[role]
