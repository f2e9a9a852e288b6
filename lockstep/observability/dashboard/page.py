"""What the page consists of, served or exported: its files, plotly, and the functions that answer its requests."""

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.observability.dashboard.api import (
    compare,
    conversation,
    curves,
    health,
    rollouts,
    runs as runs_api,
    talk,
    timeline,
)
from lockstep.observability.dashboard.request import Api

STATIC = Path(__file__).resolve().with_name("static")
APIS: dict[str, Api] = {
    **runs_api.ROUTES,
    **health.ROUTES,
    **curves.ROUTES,
    **rollouts.ROUTES,
    **conversation.ROUTES,
    **timeline.ROUTES,
    **compare.ROUTES,
    **talk.ROUTES,
}
POSTS: dict[str, Api] = talk.POSTS
"""What changes something, so that it must come from the page itself."""


def plotly_script() -> str:
    """The JavaScript that the plotly package ships."""
    try:
        return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ValueError("plotly is not installed: pip install 'lockstep-rl[dashboard]'") from error


def json_bytes(data: Any) -> bytes:
    """NaN and infinities, which JSON lacks, are null; lone surrogates, which models emit, are replaced."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
