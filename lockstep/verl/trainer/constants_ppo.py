"""verl.trainer.constants_ppo"""

import os
from typing import Any

PPO_RAY_RUNTIME_ENV: dict[str, Any] = {"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}}
"""Environment of Ray processes; `lockstep` sets the rest itself."""


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """`runtime_env` for `ray.init`: variables that are set in this process are left to it."""
    variables = {name: value for name, value in PPO_RAY_RUNTIME_ENV["env_vars"].items() if name not in os.environ}
    return {"env_vars": variables}
