"""The lease of a run folder: who gets it, who is refused, what survives a crash."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from tfdist.control import lease
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.lease import FILE, Lease, held, job_identity, refuse_if_held
from tfdist.control.lease_owner import Owner, Patience, Watched, end_attempt, end_worker, ending

HOLDER = """
import sys, time
from pathlib import Path
from tfdist.control import lease
with lease.held(Path(sys.argv[1]), ""):
    print("held", flush=True)
    time.sleep(60)
"""


PATIENCE = Patience(dead=1.0, damaged=0.1, to_end=0.3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (
        ("_RENEW_SECONDS", 0.1),
        ("_LOOK_SECONDS", 0.02),
        ("_PATIENCE", PATIENCE),
    ):
        monkeypatch.setattr(lease, name, seconds)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def stranger(**changes):
    """An owner on another machine."""
    return replace(Owner.myself(""), host="node7", pid="31", machine="another boot", id="1", **changes)


@pytest.mark.slow
def test_a_second_job_is_refused_with_a_sentence_that_names_the_first(tmp_path, holder):
    for attempt in (lambda: Lease(tmp_path, "").take(), lambda: refuse_if_held(tmp_path)):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert all(
            word in str(refused.value)
            for word in (str(tmp_path), f"process {holder.pid} on ", "since 20", "choose another folder")
        )
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_job_that_was_killed_is_followed_at_once(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(lease, "_PATIENCE", replace(PATIENCE, to_end=20.0))  # then it would be refused
    holder.send_signal(signal.SIGKILL)  # not waited for: what is left of it still has its number
    with held(tmp_path, ""):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == str(os.getpid())
    assert not list(tmp_path.iterdir())


def test_a_job_that_is_stopped_lives(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="in use by another job"):
        Lease(tmp_path, "").take()


def test_another_process_with_the_number_of_a_dead_owner_is_not_that_owner(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(asdict(replace(Owner.myself(""), started="1"))))
    with held(tmp_path, ""):
        pass


def test_an_owner_on_another_machine_is_dead_when_it_does_not_renew(tmp_path, capfd):
    (tmp_path / FILE).write_text(json.dumps(asdict(stranger())))
    begun = time.monotonic()
    with held(tmp_path, ""):
        assert time.monotonic() - begun >= 1.0
    assert "process 31 on node7" in capfd.readouterr().err


def test_an_owner_on_another_machine_that_renews_lives(tmp_path, monkeypatch):
    # A busy machine may keep the thread that renews from its work for longer than the second of the other tests. Who
    # did not go by its renewals would have the lease then.
    monkeypatch.setattr(lease, "_PATIENCE", replace(PATIENCE, dead=20.0))
    first = Lease(tmp_path, "other")
    first.owner = stranger(job="other")
    first.take()
    try:
        with pytest.raises(ConfigError, match="process 31 on node7"):
            Lease(tmp_path, "").take()
    finally:
        first.give_back()
    assert not list(tmp_path.iterdir())


def test_a_lease_that_could_not_be_removed_is_taken_over_by_its_process_at_once(tmp_path, monkeypatch):
    """The next group of an elastic job, or the next fit of a script: they were refused as another job."""
    monkeypatch.setattr(lease, "_PATIENCE", replace(PATIENCE, to_end=20.0))  # then it would be refused
    first = Lease(tmp_path, "")
    first.take()
    first.give_back()
    (tmp_path / FILE).write_text(first.owner.lease())
    with held(tmp_path, ""):
        pass


def test_a_living_process_of_the_same_job_holds_a_lease_as_long_as_it_renews_it():
    other, mine = Owner.myself("launcher 1"), Owner.myself("launcher 1")
    text = json.dumps({**asdict(other), "renewed": 1})
    silent = Watched("lease.json", "--run_dir=a", mine, replace(PATIENCE, dead=0.0, to_end=0.0))
    assert not silent.is_free(text) and silent.is_free(text)
    renewed = Watched("lease.json", "--run_dir=a", mine, replace(PATIENCE, dead=20.0, to_end=0.0))
    assert not renewed.is_free(text)
    with pytest.raises(ConfigError, match="--run_dir=a is in use by another job"):
        renewed.is_free(json.dumps({**asdict(other), "renewed": 2}))


def test_the_same_job_on_another_machine_goes_on_at_once_and_the_old_owner_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(
        lease, "_PATIENCE", replace(PATIENCE, dead=60.0)
    )  # who waited would see it renewed, and be refused
    told, heard = [], threading.Event()
    first = Lease(tmp_path, "slurm 17.0", on_loss=lambda sentence: (told.append(sentence), heard.set()))
    first.owner = stranger(job="slurm 17.0")
    first.take()
    with held(tmp_path, "slurm 17.0"):
        assert heard.wait(30) and "has been taken over by process" in told[0]
    first.give_back()


def test_the_workers_of_an_earlier_attempt_join_the_later_one():
    """A pod whose machine was cut off, and whose successor has the folder: no reason to give the whole job up."""
    job = "addresses 17"
    assert ending(stranger(job=job), job) is end_attempt
    for owner, mine in ((stranger(job="other"), job), (stranger(job=""), ""), (None, job)):
        assert ending(owner, mine) is end_worker


def test_only_one_of_many_gets_it(tmp_path):
    """Also of a dead owner's, for which all reach at once."""
    for _ in range(8):
        (tmp_path / FILE).write_text(json.dumps(asdict(replace(Owner.myself(""), started="1"))))
        leases = [Lease(tmp_path, "") for _ in range(6)]

        def take(one):
            try:
                one.take()
            except ConfigError:
                return False
            return True

        with ThreadPoolExecutor(6) as pool:
            taken = list(pool.map(take, leases))
        holder = json.loads((tmp_path / FILE).read_text())["id"]
        assert [one.owner.id == holder for one in leases] == taken, taken
        for one in leases:
            one.give_back()
        assert not list(tmp_path.iterdir())


def test_without_links(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    with held(tmp_path, ""), pytest.raises(ConfigError, match="in use"):
        Lease(tmp_path, "").take()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "\x00" * 100, '{"host": {}}', "9" * 10_000, json.dumps({"pid": 7})]
)
def test_a_damaged_lease_is_no_lease(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with held(tmp_path, ""):
        assert Owner.read((tmp_path / FILE).read_text())


def test_an_empty_lease_of_a_killed_writer_is_taken(tmp_path):
    (tmp_path / FILE).touch()
    one = Lease(tmp_path, "")
    taking = threading.Thread(target=one.take, daemon=True)  # which may never end
    taking.start()
    taking.join(20)
    assert Owner.read((tmp_path / FILE).read_text()) == one.owner
    one.give_back()


def test_who_gets_it_removes_what_killed_writers_have_left(tmp_path, holder):
    left = f".{FILE}.{'0a' * 16}"
    others = (f"{left}.bak", f".{FILE}.notes", f"{FILE}.{'0a' * 16}", f".{FILE}.{'0a' * 8}")
    for name in (left, *others):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="in use"):
        Lease(tmp_path, "").take()
    assert (tmp_path / left).exists()  # the holder's to remove
    holder.kill()
    with held(tmp_path, ""):
        assert {path.name for path in tmp_path.iterdir()} == {FILE, *others}


@pytest.mark.parametrize("has_links", [True, False])
def test_who_waits_gets_over_it_that_the_holder_removes_what_is_just_written(tmp_path, monkeypatch, has_links):
    with held(tmp_path, ""):
        make_link = os.link

        def link(written, path):
            os.unlink(written)
            if not has_links:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            make_link(written, path)

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(ConfigError, match="in use"):
            Lease(tmp_path, "").take()

        def is_there(written, path):
            os.unlink(written)
            raise FileExistsError

        monkeypatch.setattr(os, "link", is_there)
        with pytest.raises(ConfigError, match="in use"):
            Lease(tmp_path, "").take()


def test_it_is_renewed_and_made_again(tmp_path):
    with held(tmp_path, ""):
        path = tmp_path / FILE
        first = path.read_text()
        path.unlink()
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert Owner.read(path.read_text()) == Owner.read(first)


def test_nothing_is_written_where_a_link_in_its_place_leads(tmp_path):
    other, path = tmp_path / "other", tmp_path / FILE
    other.write_text("of somebody else")
    path.symlink_to(other)
    one = Lease(tmp_path, "")
    assert one._renew() and other.read_text() == "of somebody else"
    assert not path.is_symlink() and Owner.read(path.read_text()) == one.owner


def test_a_link_that_leads_nowhere_is_no_lease(tmp_path):
    """Making the file fails, as there is one, and reading it, as there is none."""
    (tmp_path / FILE).symlink_to(tmp_path / "nowhere")
    with held(tmp_path, ""):
        assert not (tmp_path / FILE).is_symlink() and not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_removed_is_told_of(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("tfdist.control.lease._RENEW_SECONDS", 0.05)
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run", ""):
        shutil.rmtree(tmp_path / "run")
        deadline = time.monotonic() + 30
        said = ""
        while "HAS BEEN REMOVED" not in said and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capfd.readouterr().err
    assert said.count(f"--run_dir={tmp_path / 'run'} HAS BEEN REMOVED") == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used"):
        Lease(tmp_path / "gone", "").take()


def test_what_tells_a_job_from_others():
    addresses = Cluster("worker", 0, 0, 2, ("a:1", "b:1"), {"worker": ["a:1", "b:1"]})
    local = Cluster("worker", 0, 0, 2, ("127.0.0.1:1", "127.0.0.1:2"), {"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    assert job_identity({lease.JOB_VARIABLE: "x", "SLURM_JOB_ID": "1"}, local) == "launcher x"
    assert job_identity({"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}, local) == "slurm 17.0"
    assert (
        job_identity({}, addresses)
        == job_identity({}, addresses)
        != job_identity({}, replace(addresses, peers=("a:1", "c:1")))
        != ""
    )
    assert job_identity({}, local) == job_identity({}, Cluster()) == ""


def test_who_goes_on_without_the_disk_gets_its_lease_written_when_there_is_room(tmp_path, monkeypatch):
    """The next group of an elastic job ended, and with it the only good copies of the state."""
    path, put, room = tmp_path / FILE, Lease._put, threading.Event()
    path.write_text(json.dumps(asdict(replace(Owner.myself("job"), started="1"))))  # of a chief that was killed

    def put_if_there_is_room(lease):
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(lease)

    monkeypatch.setattr(Lease, "_put", put_if_there_is_room)
    with held(tmp_path, "job", even_if_full=True):
        assert not path.exists()
        room.set()
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.exists()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_of_with_its_place_and_the_flag(tmp_path, monkeypatch):
    def full(lease):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Lease, "_put", full)
    for name, flag in (("--run_dir=runs", "a folder"), ("--run_dir=s3://bucket/run", "another --cache_dir")):
        with pytest.raises(ConfigError, match=f"{name} cannot be used .No space left on device: {tmp_path}.*{flag}"):
            Lease(tmp_path, "job", name=name).take()
