"""Workers that look at each other, over real sockets: each a thread here."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.preflight import PortReservation, bind_everywhere
from tfdist.control.token import Secret
from tfdist.diagnosis.findings import State, fine
from tfdist.diagnosis.meeting import WorkerReport, meet

CONFIG = Config().replace(startup_timeout=20.0)
REPORT = WorkerReport(0, 0, "Python 3.11, keras 3.15", (fine("cores", "4"),))


def met(count=2, config=CONFIG, **of_the_last):
    """What each of `count` workers finds; of_the_last: what is another way with the last of them."""
    reserved = PortReservation(count)
    clock = of_the_last.pop("clock", time.time)

    def one(rank):
        cluster = dataclasses.replace(Cluster.of_workers(reserved.addresses, rank), secret=Secret(b"of this job"))
        last = rank == count - 1
        told = dataclasses.replace(REPORT, rank=rank, **(of_the_last if last else {}))
        return meet(config, cluster, told, clock if last else time.time)

    with ThreadPoolExecutor(count) as pool:
        try:
            return list(pool.map(one, range(count)))
        finally:
            reserved.close()


def bad(findings):
    return [finding for finding in findings if finding.state is not State.FINE]


@pytest.mark.parametrize("count", [2, 3])
def test_healthy_ones(count):
    for told, findings in met(count):
        assert [other.rank for other in told] == list(range(count)) and told[0].findings == REPORT.findings
        assert bad(findings) == [] and {finding.name for finding in findings} == {"clocks", "all-reduce"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"clock": lambda: time.time() + 60.0},
            ["worker 1 (rank 1, 127.0.0.1:", "60 s ahead of the chief's", "chrony"],
        ),
        ({"clock": lambda: time.time() - 60.0}, ["60 s behind the chief's"]),
        ({"gpus": 8}, ["worker 0 (rank 0, ", "has none, but the others have"]),
        ({"versions": "Python 3.12"}, ["they differ: rank 0 Python 3.11, keras 3.15; rank 1 Python 3.12"]),
    ],
)
def test_what_differs(change, words):
    for _, findings in met(**change):
        (found,) = bad(findings)
        assert found.state is State.WRONG and all(word in str(found) for word in words), found


def test_a_port_that_is_taken():
    with bind_everywhere(0) as taken:
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told, findings = meet(CONFIG, Cluster.of_workers([address, "127.0.0.1:1"], 0), REPORT)
    assert told == [REPORT] and "is in use on this machine" in str(findings[0]) and findings[0].state is State.WRONG


def test_an_address_at_which_nobody_is():
    reserved = PortReservation(1)
    config = CONFIG.replace(startup_timeout=0.5)
    _, findings = meet(config, Cluster.of_workers([*reserved.addresses, "127.0.0.1:1"], 0), REPORT)
    reserved.close()
    assert "worker 1 (rank 1, 127.0.0.1:1) did not appear within 0.5 s" in str(findings[0])


def test_what_no_doctor_has_sent():
    for data in (b"[]", b"{}", b'{"rank": []}', b"\xff"):
        with pytest.raises((ValueError, KeyError, TypeError)):
            WorkerReport.decoded(data)
    assert WorkerReport.decoded(REPORT.encoded()) == REPORT
