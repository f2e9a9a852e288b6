"""Tracker `mlflow`; the only file that imports it. Runs go to $MLFLOW_TRACKING_URI, else to `mlruns/` in the run's folder
(`mlflow ui --backend-store-uri <run>/mlruns` shows them)."""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lockstep.config.schema import leaves
from lockstep.observability.tracker import (
    Metrics,
    RunIdFile,
    RunInfo,
    check_installed,
    import_service,
    numbers_of,
    plain,
)

logger = logging.getLogger(__name__)

PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
PARAM_CHARS = 6000
CONNECT_TIMEOUT_S = 3.0


class MlflowTracker:
    """A resumed run continues the same MLflow run; its id is in `mlflow_run_id.txt` in the run's folder.

    A server failure during training only logs a warning: `metrics.jsonl` has all metrics.
    """

    def __init__(self, run: RunInfo) -> None:
        mlflow = import_service("mlflow", "mlflow")
        self._entities = import_service("mlflow.entities", "mlflow")
        self._failure: type[Exception] = import_service("mlflow.exceptions", "mlflow").MlflowException
        run_id = RunIdFile(run, "mlflow")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would garble the console
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny supports only the file store
            uri = (run.run_dir / "mlruns").resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        previous = run_id.previous()
        self._id = previous or self._new_run(run)
        if previous:
            self._client.update_run(self._id, status="RUNNING")
        run_id.save(self._id)

    @staticmethod
    def check() -> None:
        """ValueError if the package is missing or the server does not answer; MLflow itself would retry for minutes."""
        check_installed("mlflow", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        server = urlsplit(uri)
        host = server.hostname or ""
        if server.scheme not in ("http", "https"):
            return
        if getproxies().keys() & {server.scheme, "all"} and not proxy_bypass(host):
            return  # the proxy connects to the server; this machine may have no route to it
        port = server.port or (443 if server.scheme == "https" else 80)
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ValueError(
                f"trainer.logger includes mlflow, but no server answers at MLFLOW_TRACKING_URI={uri} ({error}): start it, or "
                "unset MLFLOW_TRACKING_URI to write to the run's folder"
            ) from error

    def _new_run(self, run: RunInfo) -> str:
        experiment = self._client.get_experiment_by_name(run.project_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project_name)
        created = self._client.create_run(experiment_id, run_name=run.experiment_name).info.run_id
        params = [self._entities.Param(name, str(plain(value))[:PARAM_CHARS]) for name, value in leaves(run.config)]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(created, params=params[start : start + PARAMS_PER_CALL])
        return str(created)

    def log(self, data: Metrics, step: int) -> None:
        now_ms = int(time.time() * 1000)
        numbers = numbers_of(data).items()
        metrics = [self._entities.Metric(metric_name(name), value, now_ms, step) for name, value in numbers]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self._send(step, self._client.log_batch, metrics=metrics[start : start + METRICS_PER_CALL])

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Append the rows to the artifact `<name>.json`."""
        table = {"step": [step] * len(rows)}
        table |= {column: [plain(row[i]) for row in rows] for i, column in enumerate(columns)}
        self._send(step, self._client.log_table, data=table, artifact_file=f"{name}.json")

    def finish(self) -> None:
        self._send(None, self._client.set_terminated)

    def _send(self, step: int | None, call: Callable[..., Any], **arguments: Any) -> None:
        try:
            call(self._id, **arguments)
        except self._failure as error:
            what = "the end of the run" if step is None else f"step {step}"
            logger.warning("mlflow failed to log %s (%s); metrics.jsonl has all metrics", what, error)


def metric_name(name: str) -> str:
    """The name in MLflow's allowed characters: mean@8 becomes mean_at_8, other disallowed characters an underscore."""
    name = name.replace("@", "_at_")
    return "".join(char if char.isalnum() or char in "_-. /" else "_" for char in name)
