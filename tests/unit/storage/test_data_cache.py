"""tfdist/storage/data_cache.py against a real server: what is fetched, by whom, how often, and what may be removed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.stores.faulty_proxy import FAULTS
from tests.stores.s3_server import BUCKET
from tests.stores.webhdfs_server import webhdfs_server
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.storage import object_copy
from tfdist.storage.copies import copies
from tfdist.storage.data_cache import DataCache
from tfdist.storage.front_to_back import FrontToBack
from tfdist.storage.object_store import ObjectStore

URL = f"s3://{BUCKET}/data"
SIZE = 1000


def contents(count: int = 8) -> dict[str, bytes]:
    return {f"train-{number}": random.Random(number).randbytes(SIZE) for number in range(count)}


@pytest.fixture
def data(s3) -> dict[str, bytes]:
    found = contents()
    for name, content in found.items():
        s3.change(f"data/{name}", content)
    return found


def brought(cache: DataCache) -> dict[str, bytes]:
    return {name: Path(path).read_bytes() for name in cache.entries if os.path.exists(path := cache.path(name))}


def bytes_there(cache: DataCache) -> int:
    return sum(copy.size for copy in copies(cache.folder.parent.parent))


@pytest.mark.slow
def test_objects_come_once_however_many_ask(s3, data, through_proxy, tmp_path):
    fetched, lock = Counter(), threading.Lock()

    def draw(method: str, path: str) -> str:
        if method == "GET" and "/data/train" in path:
            with lock:
                fetched[path.rpartition("/")[2]] += 1
        return ""

    with through_proxy(draw):
        # Each has descriptors of its own, as another process would.
        caches = [DataCache(URL, str(tmp_path)) for _ in range(3)]
        threads = [threading.Thread(target=cache.bring, args=(cache.glob("train-*"),)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(brought(cache) == data for cache in caches)
        DataCache(URL, str(tmp_path)).bring(caches[0].glob("*"))
    assert fetched == dict.fromkeys(data, 1)


def test_what_a_killed_process_has_left_is_not_believed(data, tmp_path):
    cache = DataCache(URL, str(tmp_path))
    for name in data:
        (cache.folder / name).write_bytes(b"x" * SIZE)  # of the right size, but nothing says that it came to its end
    cache.bring(cache.glob("*"))
    assert brought(cache) == data
    (cache.folder / "train-3").write_bytes(b"short")
    (cache.folder / "train-4").unlink()
    other = DataCache(URL, str(tmp_path))
    other.bring(other.glob("*"))
    assert brought(other) == data


def test_a_new_version_of_an_object_is_fetched_by_the_next_run(s3, data, tmp_path):
    cache = DataCache(URL, str(tmp_path))
    cache.bring(cache.glob("*"))
    s3.change("data/train-2", b"y" * SIZE)
    with pytest.raises(DataError, match="train-2 has been changed, but another job on this machine still reads"):
        beside = DataCache(URL, str(tmp_path))
        beside.bring(beside.glob("*"))
    assert brought(cache) == data
    for each in (cache, beside):
        os.close(each._in_use)  # they have ended
    other = DataCache(URL, str(tmp_path))
    other.bring(other.glob("*"))
    assert brought(other) == {**data, "train-2": b"y" * SIZE}


@pytest.mark.parametrize("change", ["removed", "another size", "the same size"])
@pytest.mark.parametrize("how", ["all", "next"])
def test_an_object_that_is_not_the_one_that_was_listed_is_named(s3, data, tmp_path, change, how):
    cache = DataCache(URL, str(tmp_path))
    if change == "removed":
        s3.remove("data/train-5")
    else:
        s3.change("data/train-5", b"z" * (SIZE if change == "the same size" else SIZE + 1))
    what = "no longer exists" if change == "removed" else "has been changed"
    with pytest.raises(DataError, match=f"--data_dir={URL}: train-5 {what} since this run began"):
        if how == "all":
            cache.bring(cache.glob("*"))
        else:
            FrontToBack(cache, 4).whole(cache.path("train-5"), [])


def test_an_object_that_changes_while_it_is_fetched_is_named(s3, data, through_proxy, tmp_path):
    def draw(method: str, path: str) -> str:
        if method == "GET" and path.endswith("/data/train-5"):
            s3.change("data/train-5", b"z" * SIZE)
        return ""

    with through_proxy(draw):
        cache = DataCache(URL, str(tmp_path))
        for _ in range(2):
            with pytest.raises(DataError, match="train-5 has been changed since this run began"):
                cache.bring([cache.path("train-5")])


def test_the_version_of_an_object_of_a_webhdfs_server_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    with webhdfs_server() as server:
        objects = ObjectStore(server.url)
        objects.put_text("train-0", "one")
        cache = DataCache(server.url, str(tmp_path))
        cache.bring(cache.glob("*"))
        assert brought(cache) == {"train-0": b"one"} and cache.entries["train-0"].version


def test_what_needs_more_room_than_is_allowed_is_refused(data, tmp_path):
    cache = DataCache(URL, str(tmp_path), limit=4.5 * SIZE)
    cache.bring(cache.glob("train-[0-3]"))
    with pytest.raises(ConfigError, match="--cache_gb=4.5e-06, but the data read from .* raise it, or read"):
        cache.bring(cache.glob("train-[4-5]"))  # of another split, say
    with pytest.raises(DataError, match=f"--data_dir={URL}: none is missing"):
        cache.bring([cache.path("none")])


def test_what_was_used_longest_ago_makes_room_and_nothing_that_is_needed(s3, data, tmp_path):
    for number in range(8):
        s3.change(f"other/train-{number}", b"o" * SIZE)
    needed = DataCache(f"s3://{BUCKET}/other", str(tmp_path), limit=5 * SIZE)
    needed.bring(needed.glob("train-[0-1]"))
    cache = DataCache(URL, str(tmp_path), limit=5 * SIZE)
    paths = cache.glob("train-*")
    files = FrontToBack(cache, 4)
    for at, path in enumerate(paths):
        files.whole(path, [], paths[: max(at - 1, 0)])
        assert Path(path).read_bytes() == data[os.path.basename(path)]
        assert bytes_there(cache) <= 5 * SIZE
    assert set(brought(cache)) == {"train-5", "train-6", "train-7"}
    assert set(brought(needed)) == {"train-0", "train-1"}


@pytest.mark.parametrize("growing", [True, False])
def test_a_copy_counts_until_its_record_does(data, tmp_path, monkeypatch, growing):
    """Else others that come meanwhile are given its room, and all together take more than is allowed."""
    cache, counted, told = DataCache(URL, str(tmp_path), limit=4.5 * SIZE), [], object_copy.written_whole

    def slowly(path):
        counted.append(sum(cache._coming.values()))
        return told(path)

    monkeypatch.setattr(object_copy, "written_whole", slowly)
    for path in cache.glob("train-*"):
        cache.copy(path).bring(wait=True, growing=growing)
    assert counted == [SIZE] * len(data) and bytes_there(cache) <= 4.5 * SIZE


def test_those_ahead_come_meanwhile(data, tmp_path):
    cache = DataCache(URL, str(tmp_path))
    paths = cache.glob("train-*")
    FrontToBack(cache, 4).whole(paths[0], paths[1:4])
    deadline = time.monotonic() + 30
    while set(brought(cache)) != {"train-0", "train-1", "train-2", "train-3"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_of_many_faults_none_makes_a_half_object_believed(data, through_proxy, tmp_path, seed):
    chance = random.Random(seed)
    with through_proxy(lambda method, path: chance.choice(FAULTS) if chance.random() < 0.3 else "") as proxy:
        number = 0
        while sum(proxy.done.values()) < 25:
            number += 1
            cache = DataCache(URL, str(tmp_path / str(number)))
            cache.bring(cache.glob("*"))
            assert brought(cache) == data


def test_hidden_names_and_names_outside_are_none(s3, tmp_path):
    for name in (".hidden", "../outside", "folder/.state/a", "folder/a", "a"):
        s3.change(f"data/{name}", b"x")
    cache = DataCache(URL, str(tmp_path))
    assert set(cache.entries) == {"folder/a", "a"}
    assert cache.glob("*") == [cache.path("a")] and cache.glob("folder/*") == [cache.path("folder/a")]
