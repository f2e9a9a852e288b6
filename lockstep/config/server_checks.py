"""Checks of a rollout by running servers (`rollout.server`)."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from lockstep.config.compat import NOT_SUPPORTED
from lockstep.config.engines import SERVER_KINDS, ServerKind
from lockstep.config.errors import Problem

_ACTOR = "actor_rollout_ref.actor"
Values = Mapping[str, Any]
"""Dotted key to value."""


def servers(values: Values, section: str, only_kind: str | None) -> Iterator[Problem]:
    """section: of the rollout. only_kind: the protocol of the engine, if it has but one."""
    name, kind = values[f"{section}.name"], values[f"{section}.server.kind"]
    yield from _urls(values, section)
    if only_kind is not None and kind not in ("auto", only_kind):
        message = f"{section}.name={name} speaks {SERVER_KINDS[only_kind].title}'s protocol; set {section}.name=server"
        yield Problem(f"{section}.server.kind", kind, message, also=(f"{section}.name",))
        return
    protocol = SERVER_KINDS.get(only_kind or kind)
    named = (f"{section}.name", name) if only_kind is not None else (f"{section}.server.kind", kind)
    if protocol is not None:
        yield from _limits(values, section, only_kind or kind, protocol, named[0])
    if values[f"{section}.server.reload_command"] is not None:
        yield from _reload_command(values, section)
        return
    lr, val_only = values.get(f"{_ACTOR}.optim.lr", 0), values.get("trainer.val_only", True)
    if protocol is not None and not protocol.transfers and lr and not val_only:
        message = (
            f"such a server has no endpoints for weight updates; set {section}.server.reload_command, which restarts it with the "
            f"new weights, start vLLM or SGLang, or train nothing ({_ACTOR}.optim.lr=0, trainer.val_only=true)"
        )
        yield Problem(*named, message, also=(f"{section}.name", f"{section}.server.kind"))


def _limits(values: Values, section: str, kind: str, protocol: ServerKind, named: str) -> Iterator[Problem]:
    """What the protocol lacks. named: the key that selects it."""
    transfer = values[f"{section}.server.weight_transfer"]
    if protocol.transfers and transfer not in ("auto", *protocol.transfers):
        forms = " or ".join(protocol.transfers)
        message = f"servers of kind {kind} take weights by {forms}; set one of these, or auto"
        yield Problem(f"{section}.server.weight_transfer", transfer, message, also=(named,))
    for key, only in protocol.lacks:
        for place in (f"{section}.{key}", f"{section}.val_kwargs.{key}"):
            if values.get(place, only) != only:
                message = f"{protocol.title} has no such setting; set {str(only).lower()}"
                yield Problem(place, values[place], message, also=(named,))


def _urls(values: Values, section: str) -> Iterator[Problem]:
    key = f"{section}.server.urls"
    urls = values[key]
    if not urls:
        message = f"{NOT_SUPPORTED} without running servers: list them in {key}=[http://127.0.0.1:8000], or set embedded or vllm"
        yield Problem(f"{section}.name", values[f"{section}.name"], message, also=(key,))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            yield Problem(key, url, "must be a base URL without a path, such as http://127.0.0.1:8000")
    if len(set(urls)) < len(urls):
        yield Problem(key, urls, "lists a server twice")


def _reload_command(values: Values, section: str) -> Iterator[Problem]:
    key = f"{section}.server.reload_command"
    command = values[key]
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Problem(key, command, f"cannot be split into arguments ({error}); quote them as in a shell")
        return
    if not any("{folder}" in word for word in words[1:]):
        yield Problem(key, command, "must have {folder} among its arguments: where the new weights are")
    if len(values[f"{section}.server.urls"]) > 1 and not any("{url}" in word for word in words[1:]):
        message = "runs once for each server, so it must have {url} among its arguments to know which"
        yield Problem(key, command, message, also=(f"{section}.server.urls",))
    transfer = values[f"{section}.server.weight_transfer"]
    if transfer != "auto":
        message = f"{key} brings the weights; set auto"
        yield Problem(f"{section}.server.weight_transfer", transfer, message, also=(key,))
    if values[f"{section}.server.sleep"]:
        message = f"{NOT_SUPPORTED} with {key}: a server that is restarted is awake; set false"
        yield Problem(f"{section}.server.sleep", True, message, also=(key,))
