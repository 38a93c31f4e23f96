"""The order in which files of tests are handed out."""

from __future__ import annotations

from collections import OrderedDict

from tests.fuzz.faults import REPOSITORY
from tests.turns import WAITING, Turns


def test_files_that_wait_are_there():
    assert [name for name in WAITING if not (REPOSITORY / name).is_file()] == []


def test_one_that_waits_the_longest_first_beside_those_that_compute():
    waiting = WAITING[:3]
    turns = Turns.__new__(Turns)  # without a session of pytest-xdist
    files = ["a", *reversed(waiting), "b", "c"]  # the longest is not the first
    turns.workqueue = OrderedDict((file, {"test": False}) for file in files)
    turns.assigned_work = {node: {} for node in range(3)}
    given = []
    while turns.workqueue:
        given.append(turns._next())
        turns.assigned_work[len(given) % 3][given[-1]] = turns.workqueue.pop(given[-1])
        if given[-1] == "b":
            turns.assigned_work[1][waiting[0]]["test"] = True  # it has come to its end
    assert given == [waiting[0], "a", "b", waiting[1], "c", waiting[2]]
