"""Files past the page cache: the same bytes whatever the file system and the device say to that."""

import errno
import os

import google_crc32c
import numpy as np
import pytest

from tfdist.artifacts.direct_file import DirectFile

CONTENT = np.random.default_rng(0).integers(0, 256, (9 << 20) + 123, np.uint8)
PIECES = np.split(CONTENT, [1, 1, 5000, 3 << 20, 4 << 20, (8 << 20) + 7])


def write(path, direct=True):
    with DirectFile(str(path), direct) as file:
        checksums = [file.append(piece) for piece in PIECES]
        file.flush()
    assert checksums == [google_crc32c.value(piece.tobytes()) for piece in PIECES]
    assert (file.size, file.checksum) == (CONTENT.size, google_crc32c.value(CONTENT.tobytes()))
    assert path.read_bytes() == CONTENT.tobytes()


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_appended_is_in_the_file(tmp_path, direct):
    (tmp_path / "file").write_bytes(b"an older and longer one" * 1_000_000)
    write(tmp_path / "file", direct)


def test_a_file_system_that_refuses(tmp_path, monkeypatch):
    opened, refused = os.open, []

    def without(path, flags, *rest):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", without)
    write(tmp_path / "file")
    assert refused


@pytest.mark.parametrize("how", ["refused", "short"])
def test_a_device_that_wants_other_blocks_or_takes_less(tmp_path, monkeypatch, how):
    writes, written = [], os.write

    def wants(descriptor, content):
        writes.append(len(content))
        if how == "short":
            return written(descriptor, content[: min(len(content), 4096 * 100 + (1 if len(writes) > 3 else 0))])
        if len(writes) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(descriptor, content)

    monkeypatch.setattr(os, "write", wants)
    write(tmp_path / "file")
    assert len(writes) > 3


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(descriptor, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file")
    assert str(tmp_path / "file") not in map(os.path.realpath, _open_files())


def _open_files() -> list[str]:
    return [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]


def test_pages_of_the_cache_are_not_taken(tmp_path):
    """Which is what it is for. On file systems that know no other way they are."""
    path = tmp_path / "file"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has only the page cache")
    before = _cached()
    with DirectFile(str(path), direct=True) as file:
        for _ in range(20):
            file.append(CONTENT)
        file.flush()
    assert _cached() - before < 20 * CONTENT.size // 2


def _cached() -> int:
    """Bytes of files in the page cache."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Cached:"))
