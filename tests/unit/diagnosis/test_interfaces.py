"""Which network NCCL takes, by its own rule, and what is said of it."""

import pytest

from tfdist.diagnosis.findings import State
from tfdist.diagnosis.interfaces import VARIABLE, network, read_interfaces, taken

NAMES = ["lo", "docker0", "eth0", "eth10", "ib0"]
INTERFACES = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "eth1": "10.1.0.5"}


@pytest.mark.parametrize(
    ("names", "asked", "expected"),
    [
        (NAMES, None, ["ib0"]),
        (NAMES[:-1], None, ["eth0", "eth10"]),
        (NAMES[:2], None, ["docker0"]),
        (NAMES[:1], None, ["lo"]),
        (NAMES, "eth", ["eth0", "eth10"]),
        (NAMES, "=eth1,eth0", ["eth0"]),
        (NAMES, "^docker,lo", ["eth0", "eth10", "ib0"]),
        (NAMES, "^=eth0,lo", ["docker0", "eth10", "ib0"]),
        (NAMES, "bond", []),
    ],
)
def test_nccl_s_rule(names, asked, expected):
    assert taken(names, asked) == expected


@pytest.mark.parametrize(
    ("own", "asked", "state", "words"),
    [
        ("10.0.0.5", None, State.FINE, "NCCL takes eth0 (10.0.0.5), eth1 (10.1.0.5)"),
        ("10.0.0.5", "eth0", State.FINE, "NCCL takes eth0 (10.0.0.5)"),
        ("10.0.0.5", "bond0", State.WRONG, "NCCL_SOCKET_IFNAME=bond0, but this machine has lo (127.0.0.1), docker0"),
        ("10.0.0.5", "eth1", State.WARNING, "set NCCL_SOCKET_IFNAME=eth0, unless the other network is faster"),
        ("10.1.0.5", None, State.WARNING, "as it likes; this worker's address 10.1.0.5 belongs to eth1"),
        ("127.0.0.1", None, State.FINE, "NCCL takes eth0"),  # a job on one machine
        ("10.9.0.5", None, State.FINE, "NCCL takes eth0"),  # a service in front of the machine
    ],
)
def test_what_is_said(own, asked, state, words):
    found = network(INTERFACES, own, {VARIABLE: asked} if asked else {})
    assert found.state is state and words in str(found), found


def test_this_machine():
    assert read_interfaces()["lo"] == "127.0.0.1"
