"""The start event: how long a start took, in a new process and in one that was in a group of workers before."""

from types import SimpleNamespace

import pytest

from tfdist import build
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.data.batch_plan import BatchPlan
from tfdist.flags import write_flagfile
from tfdist.run import announcement, parameter_server_run


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_only_the_first_group_of_a_process_is_told_its_age(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(announcement, "process_seconds", lambda: 3600.0)
    config = Config().replace(source="digits", model="mlp", global_batch=8, steps=1, run_dir=str(tmp_path)).validate()
    job = build.compose(config, build.start_runtime(config, Cluster()))
    write_flagfile(config, tmp_path / "flags.txt", command="")
    found = announcement.Announcement(groups and SimpleNamespace(groups=groups))
    found.built()
    found.restored([])
    values = next(found.events(Cluster(), job, tmp_path, 0)).values
    assert values["import_s"] == (0.0 if groups == 2 else 3600.0)
    assert 0 <= values["startup_s"] - values["import_s"] < 60
    job.runtime.compute_workers = 3
    assert next(found.events(Cluster(), job, tmp_path, 0)).values["workers"] == 3


def test_a_run_with_servers_starts_once():
    """A second start event would take the place of the first, in which workers and configuration are."""
    job = SimpleNamespace(config=Config(), runtime=SimpleNamespace(compute_workers=1))
    parameters = SimpleNamespace(describe=lambda: "4 weights on 2 parameter servers")
    remote = SimpleNamespace(options=SimpleNamespace(plan=BatchPlan(8, 1, 1)), parameters=parameters)
    (event,) = parameter_server_run.placement(job, remote, 7)
    assert event.kind == "placement" and event.values["message"].endswith(parameters.describe())
