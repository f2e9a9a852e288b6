"""verl.interactions.utils.interaction_registry"""

from pathlib import Path
from typing import Any

from lockstep.agents.interactions.interaction import INTERACTIONS, BaseInteraction
from lockstep.agents.interactions.load import VERL_INTERACTIONS, load_interactions
from lockstep.agents.tools.load import find_class


def get_interaction_class(cls_name: str) -> type[BaseInteraction]:
    """The class that `class_name` of an entry names: `module.Class`, `file.py:Class` or a registered name."""
    found: Any = find_class("class_name", cls_name, INTERACTIONS, BaseInteraction, VERL_INTERACTIONS)
    return found


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """The interactions of a YAML file, by name; FileNotFoundError without the file."""
    if not Path(interaction_config_file).expanduser().is_file():
        raise FileNotFoundError(f"no file {interaction_config_file}")
    return load_interactions(interaction_config_file)
