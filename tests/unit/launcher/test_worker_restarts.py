"""When dead workers of a job with parameter servers are restarted."""

import pytest

from tfdist.launcher import worker_restarts
from tfdist.launcher.worker_restarts import WorkerRestarts


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_restarts.time, "monotonic", lambda: now[0])
    return now


def due_after(restarts, clock):
    """The seconds until the restart is due; None if it never is."""
    for seconds in range(200):
        if restarts.due("worker 0", -9):
            return seconds
        if not restarts.is_pending("worker 0"):
            return None
        clock[0] += 1
    raise AssertionError("pending for ever")


def test_a_worker_that_dies_again_and_again_is_given_up(clock):
    restarts = WorkerRestarts()
    assert [due_after(restarts, clock) for _ in range(6)] == [1, 1, 1, 1, 1, None]


def test_one_that_cannot_be_started_is_tried_again_for_ever(clock):
    restarts, waits = WorkerRestarts(), []
    for _ in range(9):
        waits.append(due_after(restarts, clock))
        restarts.not_started("worker 0")
        assert restarts.is_pending("worker 0")
    assert waits == [1, 1, 2, 4, 8, 16, 32, 60, 60]
    assert due_after(restarts, clock) == 60
    restarts.due("worker 0", None)  # it runs
    assert [due_after(restarts, clock) for _ in range(5)] == [1, 1, 1, 1, None], "only the start that succeeded counts"
