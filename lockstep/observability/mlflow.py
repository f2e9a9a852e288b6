"""Tracker `mlflow`: the one place that imports it. $MLFLOW_TRACKING_URI says where runs go; without it to `mlruns/` in the
run's folder (`mlflow ui --backend-store-uri <run>/mlruns` shows them)."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.observability.base import Metrics, RunIdFile, RunInfo, import_service, plain

logger = logging.getLogger(__name__)

PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
PARAM_CHARS = 6000


class MlflowTracker:
    """A resumed run goes on in the same MLflow run: its id is kept as `mlflow_run_id.txt` in the run's folder.

    A server that fails once the run is on costs a warning, never the run: `metrics.jsonl` holds what it missed.
    """

    def __init__(self, run: RunInfo) -> None:
        mlflow = import_service("mlflow", "mlflow")
        self._entities = import_service("mlflow.entities", "mlflow")
        self._failure: type[Exception] = import_service("mlflow.exceptions", "mlflow").MlflowException
        run_id = RunIdFile(run, "mlflow")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would break the console's lines
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # folders are what the small package can write
            uri = (run.run_dir / "mlruns").resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        earlier = run_id.earlier()
        self._id = earlier or self._new_run(run)
        if earlier:
            self._client.update_run(self._id, status="RUNNING")
        run_id.keep(self._id)

    def _new_run(self, run: RunInfo) -> str:
        experiment = self._client.get_experiment_by_name(run.project_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project_name)
        created = self._client.create_run(experiment_id, run_name=run.experiment_name).info.run_id
        params = [self._entities.Param(name, value[:PARAM_CHARS]) for name, value in _flat(run.config)]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(created, params=params[start : start + PARAMS_PER_CALL])
        return str(created)

    def log(self, data: Metrics, step: int) -> None:
        now_ms = int(time.time() * 1000)
        numbers = {name: plain(value) for name, value in data.items()}
        metrics = [
            self._entities.Metric(metric_name(name), float(value), now_ms, step)
            for name, value in numbers.items()
            if isinstance(value, (int, float))
        ]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self._send(step, self._client.log_batch, metrics=metrics[start : start + METRICS_PER_CALL])

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """The rows, under those of earlier steps, in the artifact `<name>.json`."""
        table = {"step": [step] * len(rows)}
        table |= {column: [plain(row[place]) for row in rows] for place, column in enumerate(columns)}
        self._send(step, self._client.log_table, data=table, artifact_file=f"{name}.json")

    def finish(self) -> None:
        self._send(None, self._client.set_terminated)

    def _send(self, step: int | None, call: Callable[..., Any], **arguments: Any) -> None:
        try:
            call(self._id, **arguments)
        except self._failure as error:
            what = "the end of the run" if step is None else f"step {step}"
            logger.warning("mlflow did not take %s (%s); metrics.jsonl has every number", what, error)


def metric_name(name: str) -> str:
    """The name in the characters that MLflow allows: mean@8 is mean_at_8, any other stranger an underscore."""
    spelled = name.replace("@", "_at_")
    return "".join(char if char.isalnum() or char in "_-. /" else "_" for char in spelled)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        full = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, full)
        else:
            yield full, str(plain(value))
