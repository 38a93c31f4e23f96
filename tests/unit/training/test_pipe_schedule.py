"""Schedules of pipelines as data: complete, free of deadlock, with the bubble and the memory that the papers give."""

import pytest

from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.pipe_schedule import Action, bubble, live, make_schedule, picture, timeline

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


def test_picture():
    assert picture(make_schedule("1f1b", 2, 3)).splitlines() == [
        "stage 0  01..aa2bb.cc",
        "stage 1  .0aa1bb2cc..",
        "bubble 25.0%, micro-batches held 2, 1",
    ]


def test_rounds_must_be_whole():
    with pytest.raises(ConfigError, match="--pipe_chunks=2.*--accumulation=3"):
        make_schedule("1f1b", 2, 3, 2)
