"""The curves panel: metrics of runs by step."""

from typing import Any

from lockstep.observability.dashboard.request import Api, ApiRequest
from lockstep.observability.glossary import explain


def metric_names(request: ApiRequest) -> list[dict[str, Any]]:
    return [{"name": name, "meaning": explain(name)} for name in request.run().metrics.names()]


def curve(request: ApiRequest) -> dict[str, Any]:
    """One metric of one run."""
    steps, values, times = request.run().metrics.column(request.text("metric"))
    return {"step": steps, "value": values, "time": times}


ROUTES: dict[str, Api] = {"/api/metrics": metric_names, "/api/curve": curve}
