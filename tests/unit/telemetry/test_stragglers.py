"""Workers that are persistently slower."""

from tfdist.telemetry.stragglers import Stragglers


def test_a_persistently_slow_rank_is_named_once_and_cleared():
    stragglers = Stragglers(1.5, patience=3)
    said = [stragglers.add([1.0, 1.1, 2.0, 0.9]) for _ in range(5)]
    assert (
        [len(each) for each in said] == [0, 0, 1, 0, 0]
        and "rank 2 is a straggler" in said[2][0]
        and "2.0 times" in said[2][0]
    )
    assert stragglers.add([1.0, 1.0, 1.0, 1.0]) == ["rank 2 is no longer a straggler."]


def test_noise_is_not_named():
    stragglers = Stragglers(1.5, patience=3)
    assert not any(stragglers.add([1.0, 2.0 if interval % 3 else 1.0]) for interval in range(20))


def test_without_figures_or_peers_there_is_none():
    assert not any(Stragglers(1.5, patience=1).add(seconds) for seconds in ([], [5.0], [0.0, 3.0]))
    assert not Stragglers(0.0, patience=1).add([1.0, 9.0])
