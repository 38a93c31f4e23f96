"""Who is in a group while workers come and go, with small scripts in place of workers."""

import io
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.control import wire
from tfdist.control.exit_codes import ExitCode, StartupError
from tfdist.control.membership import VARIABLE, ConnectedWorker, FormedGroup, Groups, Member
from tfdist.control.resolvers import resolve_cluster
from tfdist.control.token import Secret
from tfdist.launcher import elastic_job
from tfdist.launcher.elastic_job import ElasticJob
from tfdist.launcher.workers import LocalWorker

# "Trains" by counting. Files in its folder tell it to finish, to fail at its start, or to hesitate before it joins.
WORKER = """
import os, pathlib, signal, sys, time
from tfdist.control.membership import Member
from tfdist.control.token import read
folder, stop = pathlib.Path(sys.argv[1]), []
if (folder / "fail").exists():
    sys.exit(5)
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("ready", flush=True)
while (folder / f"hesitate-{os.environ['TFDIST_ELASTIC'].split('/')[1]}").exists() and not stop:
    time.sleep(0.01)
member, step, lost = Member(os.environ, read(os.environ)), -1, False
while (cluster := member.join(step, lost)) is not None:
    print(f"in a group of {cluster.size} as rank {cluster.rank}", flush=True)
    while not (member.leave or member.broken or stop):
        step += 1
        if (folder / "finish").exists():
            sys.exit(0)
        time.sleep(0.01)
    if stop:
        print(f"saved step {step}", flush=True)
        sys.exit(42)
    lost = member.broken
sys.exit(42 if stop else 0)
"""


class Run:
    """A job of three, of which at least two are to be left."""

    def __init__(self, folder: Path, least: int = 2, grace: float = 5.0):
        (folder / "worker.py").write_text(WORKER)
        self.output, self.result = io.StringIO(), None
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.job = ElasticJob(
            [sys.executable, str(folder / "worker.py"), str(folder)],
            3,
            folder / "logs",
            wanted=3,
            least=least,
            losses=3,
            grow_after=60,
            pin=False,
            grace=grace,
            environment=environment,
            output=self.output,
        )
        self.job.start()

    def until(self, condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.output.getvalue()
            self.result = self.result or self.job.poll()
            time.sleep(0.01)

    def until_groups_are(self, *sizes: int):
        """Every member of the last one has begun to count."""

        def sizes_so_far():
            lines = [line for line in self.output.getvalue().splitlines() if line.startswith("tfdist: group")]
            return tuple(len(re.findall("is rank", line)) for line in lines)

        self.until(
            lambda: (
                sizes_so_far() == sizes
                and all(
                    self.output.getvalue().count(f"in a group of {size} as") >= size * sizes.count(size)
                    for size in sizes
                )
            )
        )

    def until_it_ends(self):
        self.until(lambda: self.result)
        return self.result

    def pids(self) -> dict[str, int]:
        return {worker.name: worker.process.pid for worker in self.job.workers}

    def kill(self, *slots: int) -> None:
        for slot in slots:
            os.kill(self.pids()[f"worker {slot}"], signal.SIGKILL)


@pytest.fixture
def made(tmp_path):
    made = Run(tmp_path)
    yield made
    made.job.kill()


def test_a_lost_worker_is_replaced_and_the_others_keep_their_processes(made, tmp_path):
    made.until_groups_are(3)
    before = made.pids()
    made.kill(0)
    made.until_groups_are(3, 2, 3)
    after = made.pids()
    assert {name for name in after if after[name] != before[name]} == {"worker 0"}
    assert "tfdist: worker 0 was killed by signal 9 (SIGKILL); 2 of 3 workers are left." in made.output.getvalue()
    *_, second, third = (line for line in made.output.getvalue().splitlines() if line.startswith("tfdist: group"))
    assert re.search(r"worker \d is rank 0, worker \d is rank 1; from step \d+, which is in memory", second)
    assert "worker 0 is rank 2" in third, "the newcomer has nothing to go on from"
    (tmp_path / "finish").touch()
    assert made.until_it_ends().code == ExitCode.OK


def test_a_worker_in_no_group_yet_is_alone(made):
    made.job.environment |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}  # of mpirun around the launcher
    started_in = made.job._process_environment(2, {}).environment
    assert VARIABLE in started_in and resolve_cluster(started_in).size == 1


def test_only_the_worker_that_holds_up_the_others_is_killed(tmp_path):
    made = Run(tmp_path, grace=1.0)
    made.until_groups_are(3)
    before = made.pids()
    os.kill(before["worker 2"], signal.SIGSTOP)
    made.kill(1)
    made.until_groups_are(3, 2, 3)
    assert made.pids()["worker 0"] == before["worker 0"]
    assert "worker 2 did not leave its broken group within --grace=1 s of the others, and was killed; 2 of" in (
        made.output.getvalue()
    )
    (tmp_path / "finish").touch()
    assert made.until_it_ends().code == ExitCode.OK


@pytest.mark.slow
def test_a_worker_that_cannot_be_brought_back_is_done_without(made, tmp_path):
    made.until_groups_are(3)
    (tmp_path / "fail").touch()
    made.kill(1)
    made.until(lambda: made.output.getvalue().count("before it could join") == 2)
    made.until_groups_are(3, 2)
    (tmp_path / "fail").unlink()
    made.until_groups_are(3, 2, 3)


class Simulated:
    """A job of three without processes, on a clock of its own."""

    def __init__(self, folder: Path, monkeypatch):
        self.now, self.output, self.cannot_start = 0.0, io.StringIO(), False
        monkeypatch.setattr(elastic_job, "time", SimpleNamespace(monotonic=lambda: self.now))
        options = {"wanted": 3, "least": 1, "losses": 3, "grow_after": 60, "output": self.output}
        self.job = ElasticJob(["none"], 3, folder, **options)
        self.job.groups.close()
        self.job.groups, self.job._ports = self, SimpleNamespace(addresses=["a:1", "b:1", "c:1"])
        self.job._notice_end, self.job._spawn = lambda worker: None, self._spawn
        # What the job sees of its groups:
        self.generation, self.broken_since, self.formed, self.connected = 0, None, None, {}
        self.look = lambda: None
        self.form = lambda *_: self.formed
        for slot in range(3):
            self._spawn(f"worker {slot}", slot)

    def _spawn(self, name, slot, *_):
        if self.cannot_start:
            raise StartupError(f"{name} cannot be started (no memory)")
        worker = LocalWorker(name, slot, shown=True, process=SimpleNamespace(pid=object(), returncode=None))
        worker.relay = threading.Thread(target=int)
        self.job.workers.append(worker)

    def remove(self, slot: int) -> None:
        del self.connected[slot]

    def poll(self) -> None:
        assert self.job.poll() is None

    def forms(self, slots: tuple[int, ...], step: int) -> None:
        self.generation += 1
        self.connected = {slot: SimpleNamespace(generation=self.generation, sent=set(), busy=True) for slot in slots}
        self.formed = FormedGroup(self.generation, slots, step, newcomers=0)
        self.poll()
        self.formed = None

    def loses(self, slot: int) -> None:
        (lost,) = (worker for worker in self.job.workers if worker.slot == slot)
        lost.process.returncode = -signal.SIGKILL
        self.poll()

    def seconds_until_all_run(self) -> float:
        lost_at = self.now
        self.poll()
        while len(self.job.workers) < 3:
            self.now += 0.5
            self.poll()
        return self.now - lost_at


def test_a_worker_lost_again_without_progress_of_a_group_with_it_is_left_out(tmp_path, monkeypatch):
    made, waits, step = Simulated(tmp_path, monkeypatch), [], 0
    made.forms((0, 1, 2), step)
    for progress in (0, 0, 0, 0, 9, 0, 0):
        made.loses(2)
        made.forms((0, 1), step := step + progress)
        waits.append(made.seconds_until_all_run())
        made.forms((0, 1, 2), step := step + 5)  # this progress is that of the other two
    assert waits == [0, 60, 120, 240, 0, 0, 60]
    assert "worker 2 was lost again without progress; it is tried again in 60 s." in made.output.getvalue()


def test_a_worker_that_cannot_be_started_ends_nobody_and_is_tried_again(tmp_path, monkeypatch):
    made = Simulated(tmp_path, monkeypatch)
    made.forms((0, 1, 2), 0)
    made.cannot_start = True
    for now in range(4):  # tried at 0, 1 and 3
        made.now = now
        made.loses(2) if now == 0 else made.poll()
    assert made.output.getvalue().count("tfdist: worker 2 cannot be started (no memory)") == 3
    made.cannot_start = False
    assert made.seconds_until_all_run() == 4


def test_each_worker_has_its_own_count_of_losses(tmp_path, monkeypatch):
    made = Simulated(tmp_path, monkeypatch)
    made.forms((0, 1, 2), 0)
    for slot, others in ((2, (0, 1)), (1, (0, 2))):
        made.loses(slot)
        made.forms(others, 0)
        assert made.seconds_until_all_run() <= 1  # the pause after a loss without progress of any group
        made.forms((0, 1, 2), 0)


def test_too_few_save_and_end(made):
    made.until_groups_are(3)
    made.kill(1, 2)
    result = made.until_it_ends()
    assert result.code == ExitCode.PEER_LOST and "1 of 3 workers is left, fewer than --min_workers=2" in result.cause, (
        result
    )
    assert re.search(r"\[worker 0\] saved step \d+", made.output.getvalue())


def test_nobody_is_left(made):
    made.until_groups_are(3)
    made.kill(0, 1, 2)
    assert made.until_it_ends().code == ExitCode.PEER_LOST


def test_fewer_and_more_are_wanted(made):
    made.until_groups_are(3)
    before = made.pids()
    assert made.job.resize(2)
    made.until_groups_are(3, 2)
    made.until(lambda: len(made.pids()) == 2)
    made.job.resize(3)
    made.until_groups_are(3, 2, 3)
    assert sum(pid in before.values() for pid in made.pids().values()) == 2


def test_a_stop_while_a_group_changes(made, tmp_path):
    """The one that hesitates is not waited for."""
    made.until_groups_are(3)
    (tmp_path / "hesitate-1").touch()
    made.kill(1)
    made.until(lambda: made.job.groups.generation == 2)
    made.job.request_stop()
    result = made.until_it_ends()
    assert result.code == ExitCode.PREEMPTED and made.output.getvalue().count("saved step") == 2, (
        result,
        made.output.getvalue(),
    )


def test_a_stop_before_all_have_met(tmp_path):
    (tmp_path / "hesitate-2").touch()
    made = Run(tmp_path)
    made.until(lambda: len(made.job.groups.connected) == 2 and made.output.getvalue().count("ready") == 3)
    made.job.request_stop()
    assert made.until_it_ends().code == ExitCode.PREEMPTED and made.job.groups.generation == 0


def test_nobody_is_held_up_by_one_that_is_no_longer_needed():
    groups = Groups(Secret(b"of this job"))
    ends = []
    for slot, state in enumerate([{"waits": True, "lost": True}, {"generation": 2}]):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ends += [ours, theirs]
        groups._all.append(ConnectedWorker(ours, slot, **state))
    groups.look()
    assert groups.broken_since is not None
    groups.connected[0].send(dismissed=True)
    groups.look()
    assert groups.broken_since is None
    groups.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("lost", [True, False], ids=["after an error", "in order"])
def test_the_others_do_not_wait_for_one_that_has_left_after_an_error(lost):
    """It keeps its process, so nothing else told them, and all the others were killed for holding it up."""
    groups, ends = Groups(Secret(b"of this job")), []
    for slot, generation in enumerate([2, 2, 1]):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        ends += [ours, theirs]
        groups._all.append(ConnectedWorker(ours, slot, generation))
    ends[1].sendall(json.dumps({"ready": 3, "lost": lost}).encode() + b"\n")
    groups.look()
    told = [bool(select.select([theirs], [], [], 0)[0]) for theirs in ends[1::2]]
    assert told == [False, lost, False] and (not lost or json.loads(ends[3].recv(100)) == {"broken": True})
    groups.close()
    for end in ends:
        end.close()


def test_what_a_worker_says_in_no_known_way_changes_nothing():
    secret = Secret(b"of this job")
    groups, made = Groups(secret), []
    thread = threading.Thread(target=lambda: made.append(Member(groups.invitation(1), secret)))
    thread.start()

    def look_until(condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            groups.look()
            time.sleep(0.01)

    look_until(lambda: made)
    thread.join()
    for line in (
        b"\xff\n",
        b"[]\n",
        b"{}\n",
        b'{"ready": [], "lost": true}\n',
        b'{"ready": 1.5, "lost": false}\n',
        b'{"ready": true, "lost": false}\n',
        b'{"ready": 3, "lost": 1}\n',
        b"[" * 100_000 + b"\n",
    ):
        made[0]._connection.sendall(line)
    made[0]._connection.sendall(b'{"ready": 7, "lost": false}\n')
    look_until(lambda: groups.connected[1].copy == 7)
    endless = threading.Thread(target=made[0]._connection.sendall, args=(b"x" * 3_000_000,))  # a line without an end
    endless.start()
    look_until(lambda: not endless.is_alive())
    look_until(lambda: len(groups.connected[1].unread) == 65536)
    for _ in range(100):
        groups.look()
        assert len(groups.connected[1].unread) == 65536
    groups.close()


def test_strangers_are_not_taken_for_workers(tmp_path):
    (tmp_path / "hesitate-2").touch()
    made = Run(tmp_path)
    host, port = made.job.groups.invitation(0)[VARIABLE].split("/")[0].split(":")
    guessed = wire.SharedKey.of(Secret(b"guessed"), "membership")
    said = [
        b'GET / HTTP/1.1\n{"slot": 2, "token": "guessed"}\n{"slot": 2}\n[]\n',
        b"",
        b"\xff" * 5000,
        guessed.hello(2),
        guessed.hello(2) + bytes(36),
    ]
    strangers = []
    for number in range(100):
        strangers.append(socket.create_connection((host, int(port)), timeout=10))
        strangers[-1].sendall(said[number % len(said)])
    made.until(lambda: len(made.job.groups.connected) == 2)
    (tmp_path / "hesitate-2").unlink()
    made.until_groups_are(3)
    for stranger in strangers:
        stranger.close()
    (tmp_path / "finish").touch()
    assert made.until_it_ends().code == ExitCode.OK
