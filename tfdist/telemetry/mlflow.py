"""MLflow: one MLflow run per tfdist run, found by its tag after a restart.

Storage: MLFLOW_TRACKING_URI, or a SQLite file in the run folder. Experiment: MLFLOW_EXPERIMENT_NAME, or "tfdist". To
view a local one: mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db
"""

from __future__ import annotations

import logging
import os

from tfdist.control.optional_packages import isolate_random, optional_module
from tfdist.telemetry.background import Background
from tfdist.telemetry.events import Event, Observer
from tfdist.telemetry.trackers import Run, numbers

_TAG = "tfdist.run_id"
_MOST_PARAMETERS = 100  # in one call
_LONGEST_PARAMETER = 500  # characters; the limit of the oldest servers


def track(run: Run) -> Background:
    """Makes the tracker `mlflow`. Raises UnsupportedError without the package."""
    packages = "mlflow-skinny sqlalchemy alembic"
    for module in ("sqlalchemy", "alembic") if _uri(run).startswith("sqlite:") else ():
        optional_module(module, "--trackers=mlflow", packages)
    optional_module("mlflow", "--trackers=mlflow", packages)
    return Background("the tracker mlflow", lambda: MlflowTracker(run))


def _uri(run: Run) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"


class MlflowTracker(Observer):
    """Logs metrics under their own names, and flags as parameters.

    A step that MLflow already has keeps its first values, because MLflow cannot delete values.
    """

    def __init__(self, run: Run):
        from mlflow import MlflowClient

        isolate_random()
        for name in ("mlflow", "alembic"):  # both log how they create their tables
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=_uri(run))
        self._artifacts = (
            None if "MLFLOW_TRACKING_URI" in os.environ else (run.folder.resolve() / "mlflow_artifacts").as_uri()
        )
        self._id = self._find(run) or self._create(run)
        self._client.update_run(self._id, status="RUNNING")
        self._last_steps = {kind: self._last_step(kind) for kind in ("train", "eval")}
        for event in run.replay(after=self._last_steps):
            self(event)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tfdist")
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name, artifact_location=self._artifacts)

    def _find(self, run: Run) -> str | None:
        found = self._client.search_runs([self._experiment()], f"tags.`{_TAG}` = '{run.run_id}'", max_results=1)
        return found[0].info.run_id if found else None

    def _create(self, run: Run) -> str:
        from mlflow.entities import Param

        made = self._client.create_run(self._experiment(), run_name=run.folder.resolve().name, tags={_TAG: run.run_id})
        parameters = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in run.flags.items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(made.info.run_id, params=parameters[start : start + _MOST_PARAMETERS])
        return made.info.run_id

    def _last_step(self, kind: str) -> int:
        return max((point.step for point in self._client.get_metric_history(self._id, f"{kind}/loss")), default=-1)

    def __call__(self, event: Event) -> None:
        from mlflow.entities import Metric

        if event.step > self._last_steps.get(event.kind, event.step):
            time = int(event.time * 1000)  # milliseconds
            self._client.log_batch(
                self._id, metrics=[Metric(name, value, time, event.step) for name, value in numbers(event).items()]
            )
            self._last_steps[event.kind] = event.step
        if event.kind == "end":
            self._client.set_terminated(self._id, "KILLED" if event.values.get("stopped") else "FINISHED")
        if event.kind == "error":
            self._client.set_terminated(self._id, "FAILED")
