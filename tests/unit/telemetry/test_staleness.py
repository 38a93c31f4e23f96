"""The histogram of staleness."""

from tfdist.telemetry.staleness import Staleness


def test_buckets_mean_and_dropped():
    recent, whole = Staleness(), Staleness()
    assert recent.values() == {"staleness/dropped": 0}
    for staleness in (0, 0, 1, 7, 8, 15, 16):
        recent.add(staleness, applied=True)
    recent.add(40, applied=False)
    expected = {
        "staleness/dropped": 1,
        "staleness/mean": 47 / 7,
        "staleness/max": 16,
        "staleness/0": 2,
        "staleness/1": 1,
        "staleness/7": 1,
        "staleness/8-15": 2,
        "staleness/16-31": 1,
    }
    assert recent.values() == expected
    whole.merge(recent)
    whole.merge(recent)
    assert whole.values() == {
        **{name: 2 * value for name, value in expected.items()},
        "staleness/mean": 47 / 7,
        "staleness/max": 16,
    }
