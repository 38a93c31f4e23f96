"""TFRecord files in an object store that are read from front to back while they come: the same records, in the same
order, as from a folder; none of what is not the object that was listed.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import tensorflow as tf

from tests.stores.faulty_proxy import FAULTS
from tests.stores.s3_server import BUCKET
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import DataError, StartupError
from tfdist.control.own_files import locked
from tfdist.data.sources import stored_streams
from tfdist.data.sources.tfrecord import _Folder
from tfdist.runtime.errors import explain
from tfdist.storage import data_cache, object_copy, object_store

URL = f"s3://{BUCKET}/data"


@pytest.fixture(autouse=True)
def small_pieces(s3, monkeypatch):
    data_cache.data_cache.cache_clear()
    monkeypatch.setattr(object_copy, "_FIRST_PIECE_BYTES", 700)
    monkeypatch.setattr(object_copy, "_LARGEST_PIECE_BYTES", 1500)
    monkeypatch.setattr(stored_streams, "_READ_BYTES", 1000)


def upload(s3, tmp_path, files: list[list[bytes]]) -> _Folder:
    """The same files in a folder, which is returned."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, records in enumerate(files):
        path = folder / f"train-{number:02d}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
        s3.change(f"data/{path.name}", path.read_bytes())
    return _Folder(str(folder))


def stored(cache_dir, limit: float = 0.0) -> _Folder:
    """As a new process would have it."""
    data_cache.data_cache.cache_clear()
    return _Folder(str(data_cache.data_cache(URL, str(cache_dir), limit, copies=True).folder))


def paths(folder: _Folder) -> list[str]:
    return folder.paths({"train": "train-*", "eval": ""}, "train")


def records(folder: _Folder) -> list[bytes]:
    return list(folder.records(paths(folder), "").as_numpy_iterator())


def drawn(seed: int, count: int, sizes: tuple[int, ...] = (0, 1, 30, 400, 2500), most: int = 12) -> list[list[bytes]]:
    """Files with a record or more, of very different sizes and numbers."""
    chance = random.Random(seed)
    return [[chance.randbytes(chance.choice(sizes)) for _ in range(chance.randint(1, most))] for _ in range(count)]


def failure_of(folder: _Folder, begun: threading.Event | None = None) -> tuple[list[bytes], BaseException | None]:
    """(what came before, how it ended). begun: set when four records have come."""
    found = []
    try:
        for record in folder.records(paths(folder), "").as_numpy_iterator():
            found.append(record)
            if begun and len(found) == 4:
                begun.set()
    except tf.errors.OpError as error:
        return found, explain(error, Cluster())
    return found, None


def first_pieces_alone(asked: Counter, let_go: threading.Event) -> Callable[[str, str], str]:
    """What a proxy draws that holds back all of a training file but its first piece. asked: pieces of each file."""

    def draw(method: str, path: str) -> str:
        if method == "GET" and "/data/train-" in path:
            asked[path] += 1
            assert asked[path] == 1 or let_go.wait(60)
        return ""

    return draw


@pytest.mark.parametrize(
    "count",
    [
        3,
        pytest.param(14, marks=pytest.mark.slow),
        *(pytest.param(count, marks=pytest.mark.thorough) for count in (1, 4, 5)),
    ],
)
def test_the_order_is_that_of_a_folder_cold_warm_and_half_warm(s3, tmp_path, count):
    expected = records(upload(s3, tmp_path, drawn(count, count)))
    cold = stored(tmp_path / "cache")
    assert records(cold) == expected
    assert records(cold) == expected, "a second pass"
    s3.empty()  # nothing is fetched any more, but looked at in the cache alone
    assert records(cold) == expected


def test_some_files_are_whole_and_a_stream_goes_on_from_a_position(s3, tmp_path):
    expected = records(upload(s3, tmp_path, drawn(5, 9)))
    folder = stored(tmp_path / "cache")
    found = paths(folder)
    data_cache.cache_of(os.path.dirname(found[0])).bring([found[number] for number in (1, 2, 6)])
    assert list(folder.records(found, "").skip(11).as_numpy_iterator()) == expected[11:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))])
def test_of_many_faults_none_gives_another_record(s3, tmp_path, through_proxy, seed):
    expected = records(upload(s3, tmp_path, drawn(seed, 6)))
    chance = random.Random(seed)

    def draw(method: str, path: str) -> str:
        return chance.choice(FAULTS) if "/train-" in path and chance.random() < 0.2 else ""

    with through_proxy(draw) as proxy:
        number = 0
        while sum(proxy.done.values()) < 10:
            number += 1
            assert records(stored(tmp_path / str(number))) == expected


def test_the_first_records_of_all_four_come_before_any_file_is_whole(s3, tmp_path, through_proxy):
    files = [[bytes([number]) * 300 for _ in range(10)] for number in range(6)]
    expected = records(upload(s3, tmp_path, files))
    asked, let_go = Counter(), threading.Event()
    with through_proxy(first_pieces_alone(asked, let_go)):
        folder = stored(tmp_path / "cache")
        coming = folder.records(paths(folder), "").as_numpy_iterator()
        first = [next(coming) for _ in range(8)]  # two of each come with its first piece
        assert not let_go.is_set() and first == expected[:8]
        assert len(asked) == 4, "the fifth has not been asked for yet"
        let_go.set()
        assert [*first, *coming] == expected


def test_a_stream_that_waits_can_be_stopped(s3, tmp_path, through_proxy):
    upload(s3, tmp_path, [[b"x" * 300] * 10] * 5)
    asked, let_go = Counter(), threading.Event()
    with through_proxy(first_pieces_alone(asked, let_go)):
        folder = stored(tmp_path / "cache")
        begun = time.monotonic()
        assert len(list(folder.records(paths(folder), "").take(1))) == 1
        assert folder.first_record(paths(folder), "") == b"x" * 300
        let_go.set()
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_what_changes_while_it_comes_is_named_and_none_of_it_is_read(s3, tmp_path, through_proxy, change):
    files = [[bytes([number]) * 300 for _ in range(10)] for number in range(3)]
    folder = upload(s3, tmp_path, files)
    expected = records(folder)
    other = b"".join((tmp_path / "folder" / f"train-0{number}").read_bytes() for number in (2,))
    asked, begun = Counter(), threading.Event()

    def draw(method: str, path: str) -> str:
        if method == "GET" and path.endswith("/data/train-01"):
            asked[path] += 1
            if asked[path] == 2:
                assert begun.wait(60)  # else what has come may go with what has failed before it is read
                s3.remove("data/train-01") if change == "gone" else s3.change("data/train-01", other)
        return ""

    with through_proxy(draw):
        found, error = failure_of(stored(tmp_path / "cache"), begun)
    assert found == expected[: len(found)] and len(found) >= 4
    how = "no longer exists" if change == "gone" else "has been changed"
    assert isinstance(error, DataError) and str(error).startswith(f"--data_dir={URL}: train-01 {how}"), error


@pytest.mark.parametrize("size", [300, 3000])
def test_a_store_that_goes_away_is_told(s3, tmp_path, through_proxy, monkeypatch, size):
    """Also where it goes away within a record of which the beginning has come."""
    monkeypatch.setattr(object_store, "PATIENCE_SECONDS", 0.3)
    upload(s3, tmp_path, [[bytes([number]) * size for _ in range(10)] for number in range(3)])
    asked = Counter()

    def draw(method: str, path: str) -> str:
        asked[path] += method == "GET"
        return "500" if method == "GET" and path.endswith("/data/train-01") and asked[path] > 1 else ""

    with through_proxy(draw):
        folder = stored(tmp_path / "cache")
        data_cache.cache_of(os.path.dirname(paths(folder)[0]))._objects.patience = 0.3
        _, error = failure_of(folder)
    assert isinstance(error, StartupError) and "reading train-01 failed" in str(error), error


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda whole: whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:], "is damaged: the record at byte 2844"),
        (lambda whole: whole[:-20], "ends within a record at byte 2844: it was truncated"),
        (lambda whole: whole[:-310], "ends within a record at byte 2844: it was truncated"),
        (lambda whole: b"x" * 999, "is not a TFRecord file, or is damaged at byte 0"),
    ],
    ids=["a bit", "within the data", "within the header", "no records"],
)
def test_a_damaged_file_is_named(s3, tmp_path, damage, sentence):
    upload(s3, tmp_path, [[bytes([number]) * 300 for _ in range(10)] for number in range(2)])
    # The first file, which cannot be whole when it is begun.
    s3.change("data/train-00", damage((tmp_path / "folder" / "train-00").read_bytes()))
    _, error = failure_of(stored(tmp_path / "cache"))
    assert isinstance(error, DataError) and str(error).startswith(f"--data_dir={URL}: train-00 {sentence}"), error


@pytest.mark.slow
def test_two_processes_share_what_comes(s3, tmp_path, through_proxy):
    expected = records(upload(s3, tmp_path, drawn(7, 6)))
    asked, guard = Counter(), threading.Lock()

    def draw(method: str, path: str) -> str:
        with guard:
            asked[path] += method == "GET" and "/data/train-" in path
        return "delay"

    with through_proxy(draw):
        # Each has descriptors of its own, as another process would.
        folders, found = [stored(tmp_path / "cache") for _ in range(2)], {}
        threads = [
            threading.Thread(target=lambda number=number: found.update({number: records(folders[number])}))
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: expected, 1: expected}
    pieces = {f"/{BUCKET}/data/train-{number:02d}": _pieces(tmp_path, number) for number in range(6)}
    assert {path: count for path, count in asked.items() if count} == pieces, "each piece came once"


def _pieces(tmp_path, number: int) -> int:
    left, size = (tmp_path / "folder" / f"train-{number:02d}").stat().st_size, 700
    for count in itertools.count():
        if left <= 0:
            return count
        left, size = left - size, min(2 * size, 1500)
    raise AssertionError


def test_what_another_process_was_fetching_is_read_and_fetched_anew_if_that_ends(s3, tmp_path):
    expected = records(upload(s3, tmp_path, [[bytes([number]) * 300 for number in range(10)]]))
    folder = stored(tmp_path / "cache")
    (path,) = paths(folder)
    copy = data_cache.cache_of(os.path.dirname(path)).copy(path)
    other = locked(copy.lock, fcntl.LOCK_EX)
    copy._part.write_bytes((tmp_path / "folder" / "train-00").read_bytes()[:1000])
    coming = folder.records([path], "").as_numpy_iterator()
    assert [next(coming) for _ in range(3)] == expected[:3]
    os.close(other)  # it was killed
    assert list(coming) == expected[3:]
    assert not copy._part.exists() and copy.is_there()


def test_what_a_killed_process_has_left_is_removed(s3, tmp_path):
    expected = records(upload(s3, tmp_path, drawn(3, 2)))
    cache = data_cache.cache_of(os.path.dirname(paths(stored(tmp_path / "cache"))[0]))
    for name in cache.entries:
        copy = cache.copy(cache.path(name))
        copy._part.write_bytes(b"what was not the beginning")
        copy._part.with_name(copy._part.name.replace(".", ".another", 1)).write_bytes(b"")
    assert records(stored(tmp_path / "cache")) == expected
    assert not list((tmp_path / "cache").rglob("*.part"))
