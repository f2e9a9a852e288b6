"""verl.utils.py_functional"""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf

from lockstep.protocol import list_of_dict_to_dict_of_list as list_of_dict_to_dict_of_list


def append_to_dict(data: MutableMapping[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value to the list under `prefix + name`; a list is appended item by item."""
    for name, value in new_data.items():
        data.setdefault(f"{prefix}{name}", []).extend(value if isinstance(value, list) else [value])


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the items of `dict2` to `dict1`; shared keys must have equal values."""
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise AssertionError(f"union_two_dict: {key!r} is {dict1[key]!r} and {value!r}")
        dict1[key] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in data.items()}


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's containers as dicts and lists, at any depth."""
    if OmegaConf.is_config(obj):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return [convert_to_regular_types(item) for item in obj] if isinstance(obj, list | tuple) else obj


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: TimeoutError if a call takes longer.

    use_signals: interrupt the call by SIGALRM, in the main thread of Unix only. Otherwise it runs in a thread, which goes on
    after the error: Python cannot end threads.
    """

    def limit(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            run = _interrupted if use_signals else _in_thread
            return run(seconds, functools.partial(function, *args, **kwargs), function.__name__)

        return call

    return limit


def _interrupted(seconds: float, call: Callable[[], Any], name: str) -> Any:
    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError(f"{name} took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _in_thread(seconds: float, call: Callable[[], Any], name: str) -> Any:
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome["error"] = error

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"{name} took longer than {seconds} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]
