"""Loads interactions from the YAML of `multi_turn.interaction_config_path`.

interaction:
  - name: gsm8k                      what a row's interaction_kwargs.name selects
    class_name: gsm8k                registered, or module.Class, module:Class, file.py:Class
    config: {}
"""

from typing import Any

from lockstep.agents.interactions.interaction import INTERACTIONS, BaseInteraction
from lockstep.agents.tools.load import find_class, read_entries

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"

VERL_INTERACTIONS = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
"""verl's classes that have a counterpart here."""


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """The interactions by name; ValueError with the key if an entry is wrong."""
    found: dict[str, BaseInteraction] = {}
    for number, entry in enumerate([] if path is None else read_entries(KEY, path, "interaction")):
        where = f"{KEY}={path}, interaction[{number}]"
        cls = find_class(where, entry.get("class_name"), INTERACTIONS, BaseInteraction, VERL_INTERACTIONS)
        name = entry.get("name") or _default_name(cls)
        if name in found:
            raise ValueError(f"{where}: the name {name!r} is taken")
        try:
            found[name] = cls({**(entry.get("config") or {}), "name": name})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error
    return found


def _default_name(cls: Any) -> str:
    """The class name in lower case, without the ending `Interaction`."""
    return str(cls.__name__).removesuffix("Interaction").lower()
