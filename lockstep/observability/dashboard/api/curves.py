"""The curves panel: the metrics of runs, their curves, and the settings that differ between runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.observability.compare import read_settings, shown_settings
from lockstep.observability.curves import default_metrics
from lockstep.observability.dashboard.curve_points import curve_of
from lockstep.observability.dashboard.request import Api, ApiRequest, Recorded, json_list
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.dashboard.validation_bands import MEAN, band_of
from lockstep.observability.glossary import explain

MOST_METRICS = 2000


def metric_names(request: ApiRequest) -> list[dict[str, Any]]:
    """group: the first part of the name; main: its place among those that are shown unless others are chosen, or None."""
    names = request.run().metrics.names()
    main = {name: place for place, name in enumerate(default_metrics(names))}
    return [
        {"name": name, "group": name.partition("/")[0], "meaning": explain(name), "main": main.get(name)}
        for name in names[:MOST_METRICS]
    ]


def curve(request: ApiRequest) -> dict[str, Any]:
    """One metric of one run."""
    return curve_of(request.run(), request.text("metric"))


def band(request: ApiRequest) -> dict[str, Any]:
    """The confidence band of a validation metric of one run."""
    return band_of(request.run(), request.text("metric"))


def settings(request: ApiRequest) -> dict[str, Any]:
    """The settings that differ between runs; `unread`: those whose config cannot be read, and why."""
    readable, configs, unread = [], [], []
    for run in request.several_runs():
        try:
            configs.append(read_settings(run.folder, run.metrics.last()[0]))
            readable.append(run.name)
        except ValueError as error:
            unread.append(f"{run.name}: {error}")
    rows, left_out = shown_settings(configs) if len(configs) > 1 else ([], 0)
    listed = [{"key": key, "values": values} for key, values in rows]
    return {"runs": readable, "rows": listed, "left_out": left_out, "unread": unread}


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    """The main metrics of all runs, then the others."""
    known = {run.name: run.metrics.names() for run in runs}
    yield from (Recorded("/api/metrics", {"run": name}) for name in known)
    main = {(run, metric) for run, names in known.items() for metric in default_metrics(names)}
    others = {(run, metric) for run, names in known.items() for metric in names} - main
    if len(runs) > 1:  # each run beside all others: the settings of those that are chosen together
        pairs = [[one, other] for one in known for other in known if one != other]
        yield from (Recorded("/api/settings", {"runs": json_list(names)}) for names in (*pairs, list(known)))
        shared = {metric for _, metric in main}
        main |= {(run, metric) for run in known for metric in shared}
        others -= main
    for run, metric in (*sorted(main), *sorted(others)):
        yield Recorded("/api/curve", {"run": run, "metric": metric})
        if MEAN.fullmatch(metric):
            yield Recorded("/api/band", {"run": run, "metric": metric})


ROUTES: dict[str, Api] = {
    "/api/metrics": metric_names,
    "/api/curve": curve,
    "/api/band": band,
    "/api/settings": settings,
}
