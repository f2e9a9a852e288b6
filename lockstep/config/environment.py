"""Settings that read environment variables, such as `${oc.env:HF_TOKEN}`.

Their values exist in memory only: files, trackers and messages get them as they were written (`schema.as_written`).
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

_replacing = threading.Lock()
ROUNDS = 20_000
"""Of a digest, so that guessing a value from it is slow."""


@dataclass(frozen=True)
class RootConfig:
    """The base of each program's config, with what is known of its origin.

    from_environment: dotted key -> (as written, value) of the settings that read environment variables, themselves or through other
                      keys.
    unset_sizes:      batch sizes and tokens of micro-batches that the user has not set (`batch_sizes.py`).
    """

    from_environment: dict[str, tuple[Any, Any]] = field(
        default_factory=dict, kw_only=True, repr=False, compare=False, metadata={"internal": True}
    )
    unset_sizes: frozenset[str] = field(
        default=frozenset(), kw_only=True, repr=False, compare=False, metadata={"internal": True}
    )


def digests_of(config: RootConfig) -> dict[str, str]:
    """Dotted key -> digest of its value, which shows that a variable has changed without showing the value."""
    return {
        name: hashlib.pbkdf2_hmac("sha256", json.dumps(value, default=str).encode(), name.encode(), ROUNDS)[:12].hex()
        for name, (_, value) in config.from_environment.items()
    }


@contextmanager
def noted_variables() -> Iterator[list[str]]:
    """The environment variables that interpolations read inside the block, in this order."""
    names: list[str] = []

    def read(name: str, *default: Any) -> Any:
        names.append(name)
        return oc.env(name, *default)

    with _replacing:
        OmegaConf.register_new_resolver("oc.env", read, replace=True)
        try:
            yield names
        finally:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
