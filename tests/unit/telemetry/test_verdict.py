"""Phases add up, and the verdict names what they say."""

import numpy as np
import pytest

from tfdist.telemetry.phases import IN_CALL, PHASES, Call, Phase, PhaseMeter, values
from tfdist.telemetry.timer import Clock
from tfdist.telemetry.verdict import Verdicts, judge


def ranks(*rows, total=1.0):
    """Seconds by rank; what a row does not say is waited for others in gradient_sync."""
    found = np.zeros([len(rows), len(PHASES)])
    for row, told in zip(found, rows, strict=True):
        for name, seconds in told.items():
            row[PHASES.index(name)] = seconds
        row[PHASES.index("gradient_sync")] += max(0.0, total - row.sum())
    return found


@pytest.mark.parametrize(
    ("kind", "rank", "phase", "by_rank"),
    [
        (
            "input",
            -1,
            "",
            ranks(
                {"data_wait": 0.4, "forward": 0.2, "backward": 0.4},
                {"data_wait": 0.38, "forward": 0.2, "backward": 0.4},
            ),
        ),
        ("input", 0, "data_wait", ranks({"data_wait": 0.7, "backward": 0.3}, {"backward": 0.3})),
        ("input", -1, "", ranks({"data_wait": 0.7, "backward": 0.3})),
        ("communication", -1, "", ranks({"forward": 0.2, "backward": 0.4}, {"forward": 0.2, "backward": 0.3})),
        ("storage", -1, "", ranks({"checkpoint": 0.5, "backward": 0.4}, {"backward": 0.4})),
        ("slow rank", 2, "optimizer", ranks({"backward": 0.3}, {"backward": 0.3}, {"backward": 0.3, "optimizer": 0.6})),
        ("slow rank", 1, "other", ranks({"backward": 0.3}, {"backward": 0.3, "other": 0.6})),
        ("compute", -1, "", ranks({"data_wait": 0.1, "backward": 0.75}, {"data_wait": 0.1, "backward": 0.8})),
        ("host", -1, "", ranks({"other": 0.6, "backward": 0.4})),
        ("compute", -1, "", ranks({"forward": 0.1, "backward": 0.2, "evaluation": 0.7})),  # evaluations are no loss
        ("nothing", -1, "", ranks({"data_wait": 0.15, "backward": 0.36, "other": 0.34})),
    ],
)
def test_what_holds_a_run_up(kind, rank, phase, by_rank):
    found = judge(by_rank)
    assert (found.kind, found.rank, found.phase) == (kind, rank, phase)
    assert found.sentence(7).count("since step 7") == 1 and f"{100 * found.share:.0f} % of the time" in found.sentence(
        since=None
    )


def test_where_nothing_has_most_of_the_time_all_of_it_is_told():
    assert (
        judge(ranks({"data_wait": 0.17, "forward": 0.1, "backward": 0.26, "other": 0.34})).sentence(since=None)
        == "nothing in particular slows the run down: 36 % of the time is computing (forward pass, backward pass and"
        " optimizer), 34 % between the steps, 17 % waiting for data, 13 % gradient synchronization. No single one of"
        " these matters much; a larger batch reduces all but the computing."
    )
    assert (
        judge(ranks({"backward": 0.85, "other": 0.15}))
        .sentence(since=None)
        .startswith(
            "compute-bound: 85 % of the time is computing (forward pass, backward pass and optimizer). So the devices"
            " are the limit; "
        )
    )


def test_a_verdict_is_told_when_it_holds_and_when_it_changes():
    fast, slow = (
        ranks({"backward": 0.9}, {"backward": 0.9}),
        ranks({"backward": 0.9}, {"backward": 0.9, "optimizer": 1.1}, total=2.0),
    )
    verdicts = Verdicts()
    told = [
        verdicts.add(10 * index, 10, account)
        for index, account in enumerate([fast, fast, slow, fast, fast, slow, slow, slow])
    ]
    assert [sentence.split(":")[0] for sentence in told] == ["", "compute-bound", "", "", "", "", "a slow rank", ""]
    assert told[6].startswith(
        "a slow rank: all wait 55 % of the time for rank 1, since step 50; rank 1 takes 1.1 s a step for the optimizer,"
        " the others 0 ms. "
    )
    assert verdicts.final() == told[6]
    assert Verdicts().final() == ""


def test_phases_add_up_and_waits_are_not_taken_for_work():
    """Two calls of which one is sampled; the other waits for a save of another worker, which must not count as its own
    work.
    """
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.restore({"seconds": 100.0, "pauses": {"saving": 7.0}})
    clock.start()
    meter = PhaseMeter(clock)
    assert meter.seconds() is None
    now[0] += 1.2
    meter.add(Call(10, 1.0, 0.2, np.array([0.1, 0.0, 0.2, 0.3, 0.2, 0.1]), 0.35))
    now[0] += 3.0
    meter.add(Call(10, 3.0, 2.2, None, 2.2))
    with clock.pause("saving"):
        now[0] += 0.8
    told = values(meter.seconds(), meter.overlap_s, split=True)
    expected = {
        "data_wait": 0.2,
        "forward": 0.4,
        "backward": 0.6,
        "gradient_sync": 2.4,
        "optimizer": 0.2,
        "other": 0.4,
        "checkpoint": 0.8,
    }
    assert told == pytest.approx(
        {f"phase/{name}_s": seconds / 20 for name, seconds in expected.items()} | {"overlap/gradient_sync_s": 0.0075}
    )
    assert sum(meter.seconds()) * 20 == pytest.approx(5.0)
    together = values(meter.seconds(), None, split=False)
    assert (
        together["phase/forward_backward_s"] == pytest.approx(1.0 / 20)
        and "phase/backward_s" not in together
        and "overlap/gradient_sync_s" not in together
    )
    meter.begin()
    assert meter.seconds() is None


def test_where_only_sampled_calls_know_the_reduction_all_splits_as_they_do():
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.start()
    meter = PhaseMeter(clock)
    now[0] += 4.0
    meter.add(Call(1, 1.0, None, np.array([0.5, 0.0, 0.0, 0.0, 0.5, 0.0]), travel_s=None))
    meter.add(Call(1, 3.0, None, None, travel_s=None))
    assert values(meter.seconds(), meter.overlap_s, split=True) == pytest.approx(
        {"phase/data_wait_s": 1.0, "phase/gradient_sync_s": 1.0}
    )


def test_events_name_the_phases_so():
    """In this order they stand in logs and plots."""
    assert PHASES == (
        "data_wait",
        "host_to_device",
        "forward",
        "backward",
        "gradient_sync",
        "optimizer",
        "other",
        "checkpoint",
        "evaluation",
    )
    assert [PHASES[phase] for phase in Phase] == list(PHASES) and set(IN_CALL) < set(Phase)


def test_more_accumulation_does_not_help_where_communication_is_slow():
    """The same global batch in more pieces sends as much, and with ZeRO from stage 2 on more."""
    said = judge(ranks({"forward": 0.2, "backward": 0.4}, {"forward": 0.2, "backward": 0.3})).sentence(None)
    assert "Raise --global_batch" in said and "--accumulation" not in said
