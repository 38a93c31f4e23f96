"""Schedules of pipelines as data: complete, free of deadlock, with the bubble and the memory that the papers give."""

import graphlib
import itertools

import pytest

from tfdist.training.parallel.pipe_schedule import Action, Receipt, Schedule, live, make_schedule, receipts, timeline

CASES = [
    (name, stages, micros, chunks)
    for name in ("gpipe", "1f1b")
    for stages in (2, 3, 4)
    for micros in (1, 2, 4, 12)
    for chunks in (1, 2, 3)
    if chunks == 1 or (micros % stages == 0 and name == "1f1b")
]


@pytest.mark.parametrize("name, stages, micros, chunks", CASES)
def test_every_action_once_and_no_deadlock(name, stages, micros, chunks):
    schedule = make_schedule(name, stages, micros, chunks)
    everything = {
        Action(forward, micro, chunk) for forward in (True, False) for micro in range(micros) for chunk in range(chunks)
    }
    for actions in schedule:
        assert len(actions) == len(everything) and set(actions) == everything
        for chunk in range(chunks):  # what travels between two stages keeps its order
            for forward in (True, False):
                order = [action.micro for action in actions if action.chunk == chunk and action.forward == forward]
                assert order == sorted(order)
    timeline(schedule)


def bubble(schedule: Schedule) -> float:
    """The fraction of all stages' time in which they wait."""
    lines = timeline(schedule)
    end = max(start + action.units for line in lines for start, action in line)
    busy = sum(action.units for line in lines for _, action in line)
    return 1 - busy / (end * len(schedule))


def test_the_bubble():
    """(S - 1) / (M + S - 1), and with C chunks (S - 1) / (C M + S - 1)."""
    assert bubble(make_schedule("gpipe", 4, 8)) == pytest.approx(3 / 11)
    assert bubble(make_schedule("1f1b", 4, 8)) == pytest.approx(3 / 11)
    assert bubble(make_schedule("1f1b", 4, 8, 2)) == pytest.approx(3 / 19)


def test_micro_batches_held():
    assert live(make_schedule("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert live(make_schedule("1f1b", 4, 8)) == [4, 3, 2, 1]


def test_a_schedule_that_cannot_work_is_noticed():
    schedule = make_schedule("1f1b", 2, 2)
    schedule[1].reverse()
    with pytest.raises(ValueError, match="wait for each other"):
        timeline(schedule)


@pytest.mark.parametrize("name, stages, micros, chunks", CASES)
def test_one_order_of_all_transfers_suits_all_stages(name, stages, micros, chunks):
    schedule = make_schedule(name, stages, micros, chunks)
    earlier: dict[Receipt, set[Receipt]] = {}
    for stage, (actions, received) in enumerate(zip(schedule, receipts(schedule), strict=True)):
        transfers, there = [], set()
        for action, before in zip(actions, received, strict=True):
            part = action.chunk * stages + stage
            transfers += before
            there |= set(before)
            assert part in (0, stages * chunks - 1) or action.forward or Receipt(False, action.micro, part + 1) in there
            assert part == 0 or not action.forward or Receipt(True, action.micro, part - 1) in there
            if 0 <= (part + 1 if action.forward else part - 1) < stages * chunks:
                transfers.append(Receipt(action.forward, action.micro, part))
        for one, other in itertools.pairwise(transfers):
            earlier.setdefault(other, set()).add(one)
    assert len(earlier) >= 2 * micros * (stages * chunks - 1) - 1  # each once, but for the first
    graphlib.TopologicalSorter(earlier).prepare()  # an error, if stages would wait for each other
