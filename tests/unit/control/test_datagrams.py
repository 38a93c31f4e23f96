"""Datagrams that strangers forge, repeat or hold back; and beacons that go on through all of it."""

import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.control.test_watchdog import crowd, until
from tfdist.control import datagrams
from tfdist.control.beacons import Report, parse_report
from tfdist.control.datagrams import Seals
from tfdist.control.packet_filter import marked_only
from tfdist.control.token import Secret

SECRET = Secret(b"the secret of this job")
TABLE = ("127.0.0.1:1/aa", "127.0.0.1:2/bb")


def seals(rank=1, secret=SECRET, table=TABLE):
    return Seals(secret, rank, "beacons", *table)


def test_what_one_seals_the_others_open_once():
    sender, receiver = seals(1), seals(0)
    sealed = [sender.seal(word) for word in (b"one", b"two", b"")]
    assert [receiver.open(each) for each in sealed] == [(1, b"one"), (1, b"two"), (1, b"")]
    assert [receiver.open(each) for each in sealed] == [None] * 3  # replayed
    assert seals(0).open(sealed[0]) == (1, b"one") and receiver.open(sender.seal(b"more")) == (1, b"more")


def test_nothing_else_opens():
    sealed = seals(1).seal(b"words")
    others = [
        seals(1, Secret(b"another")),
        seals(1, Secret()),
        seals(1, table=TABLE[::-1]),
        seals(1, table=("127.0.0.1:1/ab", TABLE[1])),
    ]
    for other in others:  # of another job, without a token, of another meeting
        assert seals(0).open(other.seal(b"words")) is None
    for length in range(len(sealed)):
        assert seals(0).open(sealed[:length]) is None
    for at in range(8, len(sealed)):
        assert seals(0).open(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]) is None
    assert seals(0).open(seals(1).seal(b"x" * datagrams.MOST_BYTES)) is None and seals(0).open(sealed) == (1, b"words")


def test_what_was_held_back_does_not_count_whatever_the_clocks_say(monkeypatch):
    clock = [10**18]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    receiver, sender = seals(0), seals(1)
    for hour in range(3):  # the sender's clock is wildly off; that is no reason to drop anything
        clock[0] -= 10**17
        held = sender.seal(b"in time")
        later = sender.seal(b"later")
        clock[0] += 10**17 + hour * 10**9
        assert receiver.open(held) == (1, b"in time")
        clock[0] += 31 * 10**9
        assert receiver.open(later) is None


def test_a_clock_may_be_slower_than_ours(monkeypatch):
    """By 100 parts of a million, which is a lot for two hosts: 30 seconds are reached after three and a half days."""
    clock = [10**18]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    receiver, sender = seals(0), seals(1)
    for second in range(0, 6 * 86400, 3600):
        clock[0] = 10**18 + second * (10**9 - 10**5)
        sealed = sender.seal(b"alive")
        clock[0] = 10**18 + second * 10**9
        assert receiver.open(sealed) == (1, b"alive")


GOOD = {name: value for name, value in vars(Report(0.0, rank=1)).items() if name != "heard"}


def test_a_report_is_read_as_it_was_sent():
    sent = {**GOOD, "waiting_for": 2, "error": "why", "code": 4, "seconds": 1.5}
    report = parse_report(1, json.dumps(sent).encode(), 3)
    assert (report.rank, report.waiting_for, report.error, report.code, report.seconds) == (1, 2, "why", 4, 1.5)
    del sent["code"]  # as from an earlier version
    assert parse_report(1, json.dumps(sent).encode(), 3).code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rank": []},
        {"rank": {}},
        {"rank": 0},
        {"rank": 1.0},
        {"rank": True},
        {"calls": "many"},
        {"calls": None},
        {"seconds": 1},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"error": 5},
        {"error": ["x"]},
        {"code": "4"},
        {"code": 4.0},
        {"code": True},
        {"code": None},
        {"error_time": "now"},
        {"error_time": float("-inf")},
        {"secondary": 0},
        {"section": None},
        {"at": {}},
        {"waiting_for": 3},
        {"waiting_for": -1},
        {"waiting_for": True},
        {"waiting_for": []},
        {"more": 1},
    ],
)
def test_reports_of_wrong_types_are_none(change):
    assert parse_report(1, json.dumps({**GOOD, **change}).encode(), 3) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
        b"{}",
        b'{"rank": 1}',
        json.dumps({name: value for name, value in GOOD.items() if name != "calls"}).encode(),
    ],
)
def test_what_is_no_report_is_none(data):
    assert parse_report(1, data, 3) is None


def test_a_peers_words_cannot_act_on_a_terminal_or_forge_a_line():
    nasty = "x\x1b[2J\x1b]0;title\x07\r\ntfdist: error: forged\x9b31m\u202egnorw\u2028"
    report = parse_report(1, json.dumps({**GOOD, "error": nasty, "at": nasty, "section": nasty}).encode(), 3)
    for text in (report.error, report.at, report.section):
        assert text.isprintable() and "forged" in text


@pytest.mark.slow
def test_strangers_neither_forge_a_failure_nor_stop_detection():
    """They know the addresses and the format; one has also heard a datagram of a worker."""
    beacons, dogs = crowd(3, secret=SECRET)
    for dog in dogs:
        dog.enter("step")
    sent = []
    address = beacons[0]._socket.getsockname()
    open_socket = beacons[1]._socket

    class Overheard:
        def __getattr__(self, name):
            return getattr(open_socket, name)

        def sendto(self, data, target):
            sent.append(data)
            return open_socket.sendto(data, target)

    beacons[1]._socket = Overheard()
    until(lambda: len(sent) > 4)
    stop = threading.Event()
    forged = json.dumps({**GOOD, "rank": 2, "error": "forged", "error_time": 1.0}).encode()
    stranger_seals = Seals(Secret(), 2, "beacons", *TABLE)
    stranger_seals.mark = beacons[0]._seals.mark
    garbage = [
        b"",
        b"x",
        b"\xff" * 2000,
        json.dumps({**GOOD, "rank": []}).encode(),
        forged,
        stranger_seals.seal(forged),
        stranger_seals.seal(b'{"rank": []}'),
        beacons[0]._seals.mark + bytes(60),
    ]

    def attack():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            while not stop.is_set():
                for data in [*garbage, *sent[:50]]:  # what worker 1 has said, again and again
                    stranger.sendto(data, address)

    with ThreadPoolExecutor(2) as pool:
        attacks = [pool.submit(attack) for _ in range(2)]
        try:
            until(lambda: beacons[0].first_error(0) is None and len(sent) > 20)
            beacons[1].close()  # it is silent, whatever is replayed of it
            until(lambda: beacons[0].culprits() == [1])
            beacons[2].announce("the true cause")
            until(lambda: (found := beacons[0].first_error(0)) and (found.rank, found.error) == (2, "the true cause"))
            assert beacons[0].silent() == [1]
        finally:
            stop.set()
        [each.result() for each in attacks]
    for each in beacons:
        each.close()


def test_a_flood_without_the_mark_does_not_reach_the_buffer():
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(5)
        marked_only(receiver, b"the mark")
        for index in range(1000):
            sender.sendto(struct.pack("!II", index, index) + bytes(500), receiver.getsockname())
        sender.sendto(b"the mark and more", receiver.getsockname())
        assert receiver.recv(2000) == b"the mark and more"
