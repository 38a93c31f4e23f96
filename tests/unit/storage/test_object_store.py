"""tfdist/storage/ against a real server, with and without faults before it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import requests

from tests.stores.faulty_proxy import FAULTS, faulty_proxy
from tests.stores.s3_server import BUCKET
from tests.stores.webhdfs_server import webhdfs_server
from tfdist.control.exit_codes import ConfigError, StartupError, UnsupportedError
from tfdist.control.lease_owner import Patience
from tfdist.control.run_address import check_address, working_folder
from tfdist.storage import mirror as mirror_module
from tfdist.storage import object_store, store_lease
from tfdist.storage.mirror import FolderMirror, bring_files, files_below
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError, as_sentence, explained

URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture(
    params=["s3", "gs", "webhdfs", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("abfs", "ceph"))]
)
def url(request, monkeypatch) -> Iterator[str]:
    """A place in an empty store, one of each protocol."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield URL
    elif request.param == "gs":
        request.getfixturevalue("gcs")
        yield URL.replace("s3", "gs")
    elif request.param == "abfs":
        request.getfixturevalue("azure")
        yield URL.replace("s3", "abfs")
    elif request.param == "ceph":
        request.getfixturevalue("ceph")
        yield URL
    else:
        monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
        with webhdfs_server() as server:
            yield server.url
            assert server.users == {"somebody"}


def test_objects_are_written_listed_read_and_removed(url, tmp_path):
    objects = ObjectStore(url, patience=5)
    assert objects.names() == {}
    assert objects.text("a") is None
    objects.put_text("a", "one")
    (tmp_path / "file").write_bytes(b"x" * 1000)
    objects.send(tmp_path / "file", "folder/b")
    assert objects.names() == {"a": 3, "folder/b": 1000}
    assert objects.names("folder") == {"folder/b": 1000}
    assert ObjectStore(url[:-1]).names() == {}, "a name that begins alike is another run's"
    objects.fetch("folder/b", tmp_path / "deep" / "copy", 1000)
    assert (tmp_path / "deep" / "copy").read_bytes() == b"x" * 1000
    assert os.listdir(tmp_path / "deep") == ["copy"]
    objects.put_text("digits", "0123456789")
    assert objects.piece("digits", 3, 4) == b"3456" and objects.piece("digits", 0, 10) == b"0123456789"
    with pytest.raises(FileNotFoundError):
        objects.piece("nothing", 0, 1)
    objects.remove("digits")
    objects.remove("a")
    objects.remove("a")
    assert objects.text("a") is None


def test_a_folder_that_was_made_in_a_console_is_no_object(s3):
    """It is an object without content, with a slash at the end of its name. Its name below the URL was ""."""
    objects = ObjectStore(URL, patience=5)
    for name in ("", "logs/"):
        objects._system.pipe_file(f"{BUCKET}/runs/one/{name}", b"")
    assert sorted(s3.names()) == ["runs/one/", "runs/one/logs/"] and objects.names() == {}


def test_a_file_that_goes_while_it_is_sent_is_told_of_as_gone(s3, tmp_path, monkeypatch):
    """And not as a bucket that does not exist."""
    file = tmp_path / "log"
    file.write_text("a line")
    objects = ObjectStore(URL, patience=0.1)

    def lost(*_):
        file.unlink(missing_ok=True)
        raise ConnectionError

    monkeypatch.setattr(objects._system, "pipe_file", lost)
    with pytest.raises(FileNotFoundError, match=str(file)):
        objects.send(file, "log")


def test_an_object_is_created_once(url):
    objects = ObjectStore(url, patience=5)
    assert objects.create_text("a", "one")
    assert not objects.create_text("a", "two")
    assert objects.text("a") == "one"


@pytest.mark.slow
def test_of_many_that_create_an_object_at_once_one_has_made_it(url):
    """A lease begins so: of two jobs that both believed it, both would write."""
    objects = ObjectStore(url, patience=20)
    with ThreadPoolExecutor(8) as together:
        for number in range(5):
            begin = threading.Barrier(8)

            def create(who, number=number, begin=begin):
                begin.wait()
                return objects.create_text(f"lease-{number}", str(who))

            made = [who for who, is_mine in enumerate(together.map(create, range(8))) if is_mine]
            assert len(made) == 1 and objects.text(f"lease-{number}") == str(made[0]), made


@pytest.mark.thorough
def test_a_container_of_azure_that_is_not_there_is_no_empty_place(azure):
    with pytest.raises(StoreError, match="the bucket or folder does not exist"):
        ObjectStore("abfs://nowhere/run", patience=1).names()


def test_an_object_that_is_there_is_known_from_whatever_a_store_answers(s3, through_proxy):
    """Ceph says of it what s3fs takes for an invalid argument."""
    ObjectStore(URL).put_text("a", "one")
    with through_proxy(lambda method, path: "412" if method == "PUT" else ""):
        assert not ObjectStore(URL, patience=1).create_text("a", "two")


@pytest.mark.slow
def test_a_file_of_many_parts_arrives_whole(s3, tmp_path):
    content = random.Random(1).randbytes((1 << 20) * 70)  # two parts of 50 MB
    (tmp_path / "file").write_bytes(content)
    objects = ObjectStore(URL, patience=20)
    objects.send(tmp_path / "file", "large")
    objects.fetch("large", tmp_path / "copy", len(content))
    assert (tmp_path / "copy").read_bytes() == content


def test_uploads_that_a_killed_process_has_begun_are_ended(s3):
    objects = ObjectStore(URL, patience=5)
    call = objects._system.call_s3
    call("create_multipart_upload", Bucket=BUCKET, Key="runs/one/large")
    others = ["runs/one/another/large", "runs/other/large"]
    for name in others:
        call("create_multipart_upload", Bucket=BUCKET, Key=name)
    objects.remove_half_sent("large")
    left = call("list_multipart_uploads", Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == others


def test_the_store_is_told_what_it_should_receive(s3, through_proxy, tmp_path):
    """S3 refuses a body that does not fit its checksum, which moto does not."""
    (tmp_path / "file").write_bytes(b"x" * 1000)
    with through_proxy(lambda method, path: "") as proxy:
        objects = ObjectStore(URL, patience=5)
        objects.send(tmp_path / "file", "file")
        objects.put_text("text", "one")
    assert {path for path, names in proxy.headers.items() if "x-amz-checksum-crc32" in names} == {
        f"/{BUCKET}/runs/one/{name}" for name in ("file", "text")
    }


def test_what_the_store_has_not_received_as_it_was_sent_is_sent_again(gcs, tmp_path, monkeypatch):
    content = random.Random(1).randbytes(20_000)
    (tmp_path / "file").write_bytes(content)
    left = ["flip"]
    with faulty_proxy(gcs, lambda method, path: left.pop() if method == "POST" and left else "") as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
        objects = ObjectStore(URL.replace("s3", "gs"), patience=10)
        objects.send(tmp_path / "file", "file")
    assert proxy.done["flip"] == 1
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{gcs}")
    assert ObjectStore(URL.replace("s3", "gs"), patience=10).piece("file", 0, len(content)) == content


@pytest.mark.slow
@pytest.mark.parametrize("url", ["s3", "gs"], indirect=True)
def test_a_store_that_makes_one_wait_leaves_the_users_random_numbers_alone(url, monkeypatch):
    """Its package draws how long to wait; Keras shuffles a PyDataset with Python's generator."""
    name = "AWS_ENDPOINT_URL" if url.startswith("s3") else "STORAGE_EMULATOR_HOST"
    left, before = ["503"], random.getstate()
    with faulty_proxy(urlsplit(os.environ[name]).port, lambda method, path: left.pop() if left else "") as proxy:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert ObjectStore(url, patience=5).text("a") is None
    assert proxy.done["503"] == 1 and random.getstate() == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_faults_that_pass_change_nothing(s3, through_proxy, tmp_path, seed):
    chance = random.Random(seed)

    def draw(method: str, path: str) -> str:
        return chance.choice(FAULTS) if chance.random() < 0.4 else ""

    with through_proxy(draw) as proxy:
        objects = ObjectStore(URL, patience=60)
        for number in range(16):
            content = chance.randbytes(chance.randrange(1, 5000))
            file = tmp_path / "file"
            file.write_bytes(content)
            objects.send(file, f"{number}")
            objects.fetch(f"{number}", tmp_path / "copy", len(content))
            assert (tmp_path / "copy").read_bytes() == content
            assert s3.content(f"runs/one/{number}") == content
            assert objects.piece(f"{number}", 0, len(content)) == content
        assert sum(proxy.done.values()) > 10, proxy.done
    assert set(os.listdir(tmp_path)) == {"file", "copy"}


@pytest.mark.thorough
def test_what_will_not_pass_is_told_in_a_sentence(through_proxy, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nowhere.*the bucket or folder does not exist.*create it"), as_sentence():
        ObjectStore("s3://nowhere/run", patience=5).put_text("a", "")
    with pytest.raises(ConfigError, match="the bucket or folder does not exist"), as_sentence():
        ObjectStore("s3://nowhere/run", patience=5).names()
    with pytest.raises(ConfigError, match="Invalid bucket name.*correct the URL"), as_sentence():
        ObjectStore("s3://bücket/run", patience=5).names()
    refusal = pytest.raises(ConfigError, match=f"{URL}.*it is not permitted.*allow these credentials")
    with through_proxy(lambda method, path: "403"), refusal, as_sentence():
        ObjectStore(URL, patience=5).text("a")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(StartupError, match="Could not connect.*can be reached from here"), as_sentence():
            ObjectStore(URL, patience=1).text("a")
    for name, value, sentence in (
        ("AWS_ENDPOINT_URL", "not-a-url", "Invalid endpoint: not-a-url: correct AWS_ENDPOINT_URL"),
        (
            "AWS_ENDPOINT_URL",
            "http://me:SECRET@127.0.0.1:1",
            "AWS_ENDPOINT_URL. contains a user or password: remove it",
        ),
        ("AWS_PROFILE", "nosuch", "profile .nosuch. could not be found: correct AWS_PROFILE"),
    ):
        refusal = pytest.raises(ConfigError, match=sentence)
        with monkeypatch.context() as changed, refusal as refused, as_sentence():
            changed.setenv(name, value)
            ObjectStore(URL, patience=60).text("a")
        assert "SECRET" not in str(refused.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no credentials were found"), as_sentence():
        ObjectStore(URL, patience=5).text("a")


def test_a_full_disk_here_is_told_at_once_and_is_no_fault_of_the_store(s3, tmp_path, monkeypatch):
    objects = ObjectStore(URL, patience=60)
    objects.put_text("a", "one")
    monkeypatch.setattr(objects, "_system", FullDisk(objects._system))
    begun = time.monotonic()
    with (
        pytest.raises(ConfigError, match="copy on this machine cannot be used.*No space left.*make room"),
        as_sentence(),
    ):
        objects.fetch("a", tmp_path / "a", 3)
    assert time.monotonic() - begun < 10 and not list(tmp_path.iterdir())


class FullDisk:
    """A file system whose objects find no room here."""

    def __init__(self, system):
        self._system = system

    def get_file(self, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_listed_is_not_empty():
    """fsspec leaves it out."""
    with webhdfs_server() as server:
        objects, lost = ObjectStore(server.url, patience=1), ["folder/inner"]
        for name in ("a", "folder/b", "folder/inner/c"):
            objects.put_text(name, "one")
        request = objects._system.session.request

        def failing(**given):
            if given["params"]["op"] == "LISTSTATUS" and any(given["url"].endswith(each) for each in lost):
                lost.pop()
                raise requests.exceptions.ConnectionError("it is lost")
            return request(**given)

        objects._system.session.request = failing
        assert objects.names() == {"a": 3, "folder/b": 3, "folder/inner/c": 3} and not lost
        lost.extend(["folder/inner"] * 100)
        objects.patience = 0.2
        with pytest.raises(StoreError, match="listing the folder failed: ConnectionError: it is lost"):
            objects.names()
    with pytest.raises(StoreError, match="listing folder failed: ConnectionError"):
        objects.names("folder")


def test_hdfs_without_its_library_is_told(monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigError, match="Hadoop's native library .libhdfs. and Java were not found"), as_sentence():
        ObjectStore("hdfs://host/run")


@pytest.mark.slow
@pytest.mark.parametrize("code", [301, 400])
def test_a_bucket_of_another_region_is_told_with_its_region(s3, through_proxy, monkeypatch, code):
    """As S3 answers: to HEAD without a word, but with the region among the headers."""
    monkeypatch.setattr(object_store, "_REFUSED_SECONDS", 0.1)
    with through_proxy(lambda method, path: str(code)):
        objects = ObjectStore(URL, patience=1)
        for use in (objects.names, lambda: objects.create_text("a", ""), lambda: objects.text("a")):
            with pytest.raises(StoreError, match="the bucket is in the region eu-west-1: set AWS_REGION=eu-west-1"):
                use()


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("timeout at bucket/region-study/run1", False),
        ("GET https://host/credentials-test/run1 failed", False),
        ("You must specify a region.", True),
        ("Unable to locate credentials", True),
    ],
)
def test_the_name_of_an_object_is_no_reason_to_give_up(said, refused):
    assert explained(Exception(said))[1] is refused


def test_a_missing_region_is_told_by_the_name_of_the_error():
    sentence, refused = explained(type("NoRegionError", (Exception,), {})("s3://bucket/region-study"))
    assert refused and "set AWS_REGION to the bucket's region" in sentence


def test_a_missing_package_is_named():
    with pytest.raises(UnsupportedError, match="abfs:// needs the Python package adlfs.*pip install adlfs"):
        ObjectStore("abfs://bucket/run")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://host/run", "not a store that tfdist knows.*s3://"),
        ("s3://bucket", "BUCKET/FOLDER"),
        ("s3:/bucket/run", "write s3://bucket/run"),
        ("s3:bucket/run", "write s3://bucket/run"),
        ("s3//bucket/run", "write s3://bucket/run"),
        (" s3://bucket/run", "run_dir= s3://bucket/run is not a URL: write s3://bucket/run"),
        ("s3:///run", "BUCKET/FOLDER"),
        ("s3://key:secret@bucket/run", "does not belong in the URL"),
        ("s3://bucket/a/../b", "may not be in the URL"),
        ("s3://bucket/run?version=1", "may not be in the URL"),
        ("s3://bucket/a b", "may not be in the URL"),
        ("s3://bucket/a::file://b", "may not be in the URL"),
        ("s3://bucket/a::b", "may not be in the URL"),
        ("s3://bucket/a\x00", "may not be in the URL"),
        ("s3://bucket/\udcff", "may not be in the URL"),
        ("s3://bucket/a\x1b[1mb", "a.x1b.* may not be in the URL"),
        ("s3://bucket/" + "a" * 1000, "too long for a store"),
    ],
)
def test_urls_that_name_no_place_are_refused(url, sentence):
    with pytest.raises(ConfigError, match=sentence) as refusal:
        check_address("run_dir", url)
    assert "--run_dir" in str(refusal.value) and "secret@" not in str(refusal.value)


def test_each_url_has_a_working_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = working_folder("s3://bucket/a/run", cache_dir=""), working_folder("s3://bucket/b/run", cache_dir="")
    assert one != other and one.parent == other.parent == tmp_path / "tfdist" / "runs"
    assert working_folder("s3://bucket/a/run/", cache_dir="") == one
    assert working_folder("runs/first", "elsewhere") == working_folder("runs/first", cache_dir="")


# -- a folder's copy ---------------------------------------------------------------------------------------------------


def test_a_folder_is_sent_and_brought(url, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "logs").mkdir(parents=True)
    (here / "logs" / "rank-0.jsonl").write_text("one\n")
    (here / "logs" / "rank-1.jsonl").write_text("not ours\n")
    (here / "status.json").write_text("{}")
    (here / ".hidden").write_text("")
    (here / "link").symlink_to(here / "status.json")
    os.mkfifo(here / "pipe")
    objects = ObjectStore(url, patience=5)
    mirror = FolderMirror(objects, here, lambda name: "rank-1" not in name, "status.json", lambda trouble: None)
    mirror.finish(with_last=False)
    assert objects.names() == {"logs/rank-0.jsonl": 4}
    mirror.finish(with_last=True)
    assert objects.names() == {"logs/rank-0.jsonl": 4, "status.json": 2}
    there.mkdir()
    (there / "logs").mkdir()
    (there / "logs" / "rank-0.jsonl").write_text("longer here\n")
    if not url.startswith("abfs"):  # which knows no such name
        objects.put_text("../outside", "")
    bring_files(objects, there, lambda name: True, longer=True)
    assert (there / "logs" / "rank-0.jsonl").read_text() == "longer here\n"
    assert (there / "status.json").read_text() == "{}"
    assert not (tmp_path / "outside").exists()


def test_a_file_that_is_removed_while_its_folder_is_listed_is_left_out_alone(tmp_path):
    for name in "abc":
        (tmp_path / name).touch()
    names = files_below(tmp_path)
    assert next(names) == "a"
    (tmp_path / "b").unlink()
    assert list(names) == ["c"]


def test_an_error_of_the_disk_here_is_told_and_the_next_round_comes(tmp_path, monkeypatch):
    errors, told = [OSError(errno.EIO, os.strerror(errno.EIO))], queue.Queue()

    def send(*_):
        if errors:
            raise errors.pop()

    (tmp_path / "a").touch()
    monkeypatch.setattr(mirror_module, "_PERIOD_SECONDS", 0.01)
    mirror = FolderMirror(SimpleNamespace(send=send), tmp_path, lambda name: True, "", told.put)
    mirror.start()
    trouble = told.get(timeout=20)
    assert isinstance(trouble, StoreError) and f"{tmp_path} cannot be read" in str(trouble)
    assert told.get(timeout=20) is None
    mirror.finish(with_last=False)


def test_what_is_removed_while_it_is_brought_is_left_out_alone(s3, tmp_path, monkeypatch):
    objects = ObjectStore(URL, patience=5)
    there = {f"{number}": len(str(number)) for number in range(12)}
    for name in there:
        objects.put_text(name, name)
    monkeypatch.setattr(objects, "names", lambda: {"0-gone": 3, **there, "gone": 7})
    bring_files(objects, tmp_path, lambda name: True)
    assert set(os.listdir(tmp_path)) == set(there)


def test_whatever_ends_one_transfer_ends_all(s3, tmp_path, monkeypatch):
    objects = ObjectStore(URL, patience=5)

    def fetch(name: str, file: Path, size: int) -> None:
        if name == "7":
            raise MemoryError

    monkeypatch.setattr(objects, "fetch", fetch)
    with pytest.raises(MemoryError):
        objects.fetch_all((f"{number}", tmp_path / f"{number}", 1) for number in range(12))


# -- the lease ---------------------------------------------------------------------------------------------------------


def lease(objects: ObjectStore, job: str, lost: list[str] | None = None) -> store_lease.StoreLease:
    return store_lease.StoreLease(objects, job, (lost if lost is not None else []).append)


def test_a_second_job_is_refused_and_a_given_back_lease_taken(url, monkeypatch):
    monkeypatch.setattr(store_lease, "_PATIENCE", Patience(dead=60.0, damaged=1.0, to_end=0.5))
    monkeypatch.setattr(store_lease, "_LOOK_SECONDS", 0.1)
    objects = ObjectStore(url, patience=5)
    first = lease(objects, "one")
    first.take()
    with pytest.raises(ConfigError, match=f"{url} is in use by another job .process {os.getpid()} on"):
        lease(objects, "other").take()
    first.give_back()
    second = lease(objects, "other")
    second.take()
    first.give_back()  # does nothing: it is another's
    assert json.loads(objects.text("lease.json"))["id"] == second.owner.id
    second.give_back()
    assert objects.text("lease.json") is None


def test_a_dead_owners_lease_is_taken_over(url, monkeypatch):
    monkeypatch.setattr(store_lease, "_LOOK_SECONDS", 0.1)
    objects = ObjectStore(url, patience=5)
    dead = lease(objects, "one").owner
    here = {**dataclasses.asdict(dead), "pid": "999999999"}
    objects.put_text("lease.json", json.dumps(here))
    second = lease(objects, "other")
    second.take()  # at once
    second.give_back()
    elsewhere = {**here, "machine": "another", "host": "far"}
    objects.put_text("lease.json", json.dumps(elsewhere))
    monkeypatch.setattr(store_lease, "_PATIENCE", Patience(dead=0.5, damaged=1.0))
    begun = time.monotonic()
    third = lease(objects, "other")
    third.take()
    assert 0.5 < time.monotonic() - begun < 20
    third.give_back()
    objects.put_text("lease.json", json.dumps(elsewhere))
    monkeypatch.setattr(store_lease, "_PATIENCE", Patience(dead=1000.0, damaged=1.0))
    lease(objects, "one").take()  # of the same job: whoever starts it again has ended it


def test_an_owner_elsewhere_that_renews_its_lease_lives(s3, monkeypatch):
    monkeypatch.setattr(store_lease, "_LOOK_SECONDS", 0.1)
    objects = ObjectStore(URL, patience=5)
    elsewhere = {**dataclasses.asdict(lease(objects, "one").owner), "machine": "another"}
    objects.put_text("lease.json", json.dumps({**elsewhere, "renewed": 0}))
    second, looked = lease(objects, "other"), []

    def text(name: str) -> str:
        looked.append(name)
        return json.dumps({**elsewhere, "renewed": len(looked) // 3})

    monkeypatch.setattr(objects, "text", text)
    with pytest.raises(ConfigError, match="is in use by another job"):
        second.take()


def test_who_finds_its_lease_another_ends(s3, monkeypatch):
    monkeypatch.setattr(store_lease, "_RENEW_SECONDS", 0.1)
    objects, lost = ObjectStore(URL, patience=5), []
    first = lease(objects, "one", lost)
    first.take()
    objects.put_text("lease.json", lease(objects, "other").owner.lease())
    deadline = time.monotonic() + 20
    while not lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lost and "has been taken over by process" in lost[0]


@pytest.mark.parametrize("now", ["another's", "nobody's"])
def test_who_was_stopped_for_long_looks_before_it_changes_anything(s3, monkeypatch, now):
    objects, lost = ObjectStore(URL, patience=5), []
    first = lease(objects, "one", lost)
    first.take()
    first.confirm()
    objects.remove("lease.json")
    if now == "another's":
        objects.put_text("lease.json", lease(objects, "other").owner.lease())
    first.confirm()
    assert not lost, "it was renewed a moment ago: nobody takes it over so soon"
    first._confirmed -= 60.0
    first.confirm()
    assert len(lost) == 1 and "changes nothing there" in lost[0]
    first._released.set()


def test_who_has_given_its_lease_back_changes_nothing_any_more(s3):
    """A sender that did not end in time wrote on beside that of the next group of workers."""
    objects = ObjectStore(URL, patience=5)
    first = lease(objects, "one")
    first.take()
    first.give_back()
    with pytest.raises(StoreError, match="this process has given its lease back"):
        first.confirm()
    second = lease(objects, "one")
    second.take()
    with pytest.raises(StoreError, match="this process has given its lease back"):
        first.confirm()
    second.confirm()
    second.give_back()


def test_who_tries_again_asks_first_whether_it_still_may(s3, through_proxy, tmp_path):
    (tmp_path / "file").write_text("late")
    away, asked = [True], []

    def not_any_more():
        asked.append(True)
        away.clear()
        raise StoreError("the run is another job's")

    with through_proxy(lambda method, path: "500" if away and method != "GET" else ""):
        objects = ObjectStore(URL, patience=20)
        objects.allowed = not_any_more
        for deed in (lambda: objects.send(tmp_path / "file", "a"), lambda: objects.put_text("a", "late")):
            away[:] = [True]
            with pytest.raises(StoreError, match="another job's"):
                deed()
        s3.change(f"{URL.partition('bucket/')[2]}/a", b"the other's")
        away[:] = [True]
        with pytest.raises(StoreError, match="another job's"):
            objects.remove("a")
        assert len(asked) == 3 and objects.text("a") == "the other's"


def test_patience_ends(through_proxy):
    with through_proxy(lambda method, path: "500"):
        begun = time.monotonic()
        with pytest.raises(StoreError, match=f"{URL}: reading a failed"):
            ObjectStore(URL, patience=0.5).text("a")
        assert time.monotonic() - begun < 15
