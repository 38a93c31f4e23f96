"""The text source: windows, held-out files, entropies, and what is wrong with a folder."""

from __future__ import annotations

import errno
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.sources import text, text_files
from tfdist.data.sources.load_split import load_split


def load(folder, split="train", length=8, options=""):
    return load_split(
        DataConfig(source="text", data_dir=str(folder), sequence_length=length, source_args=options), split
    )


def windows(split) -> tuple[np.ndarray, np.ndarray]:
    x, y = split.fetch(tf.range(split.size, dtype=tf.int64))
    return x.numpy(), y.numpy()


@pytest.fixture
def folder(tmp_path):
    """200 files of 50 random bytes (no zero among them) in two levels, and things that are no text files."""
    rng = np.random.default_rng(0)
    for i in range(200):
        file = tmp_path / f"part{i % 3}" / f"{i}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(rng.integers(1, 256, 50, np.uint8).tobytes())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"p" * 500)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_bytes(b"h" * 500)
    return tmp_path


def expected_corpus(folder: Path, held_out: bool) -> bytes:
    names = sorted(str(p.relative_to(folder)) for p in folder.glob("part*/*.txt"))
    return b"".join((folder / n).read_bytes() + b"\0" for n in names if text._hashed_out(n) == held_out)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("length", [1, 8, 64])
def test_windows_tile_the_corpus(folder, split, length):
    corpus = np.frombuffer(expected_corpus(folder, split == "eval"), np.uint8)
    found = load(folder, split, length)
    x, y = windows(found)
    assert x.shape == y.shape == (found.size, length) and x.dtype == np.int32
    assert len(corpus) - 1 - length < found.size * length <= len(corpus) - 1  # not one window more would fit
    np.testing.assert_array_equal(x.ravel(), corpus[: x.size])
    np.testing.assert_array_equal(y.ravel(), corpus[1 : x.size + 1])
    assert found.info["bytes"] == len(corpus) and found.info["skipped_files"] == 1


def test_held_out_files_stay_where_they_are(folder):
    before = load(folder, "eval").info
    assert 2 <= before["files"] <= 25 and load(folder, "train").info["files"] == 200 - before["files"]
    text._corpora.cache_clear()
    new = next(f"part0/new{i}.txt" for i in range(1000) if not text._hashed_out(f"part0/new{i}.txt"))
    (folder / new).write_bytes(b"n" * 50)
    assert load(folder, "eval").info["digest"] == before["digest"]


def test_entropy(folder):
    for split in ("train", "eval"):
        p = np.bincount(np.frombuffer(expected_corpus(folder, split == "eval"), np.uint8)) / len(
            expected_corpus(folder, split == "eval")
        )
        expected = -sum(q * np.log(q) for q in p if q)
        for asked in ("train", "eval"):  # either split tells both
            assert load(folder, asked).info[f"{split}_unigram_entropy_nats"] == pytest.approx(expected)


def test_one_file_is_cut_at_95_percent(tmp_path):
    content = bytes(range(1, 251)) * 4
    (tmp_path / "one.log").write_bytes(content)
    train, held_out = (load(tmp_path / "one.log", s) for s in ("train", "eval"))
    assert train.info["bytes"] == 951 and held_out.info["bytes"] == 50  # 1001 with the zero byte
    assert windows(held_out)[0].ravel()[0] == content[951]


def test_eval_pattern_and_max_bytes(folder):
    (folder / "part0" / "valid.md").write_bytes(b"v" * 100)
    held_out = load(folder, "eval", options="eval_pattern=*valid*,pattern=['*.md','*.txt']")
    assert held_out.info["files"] == 1 and set(windows(held_out)[0].ravel()) == {ord("v")}
    cut = load(folder, "train", options="max_bytes=1000")
    assert cut.info["bytes"] == 1000 and load(folder, "eval", options="max_bytes=1000").info["bytes"] == 50
    np.testing.assert_array_equal(windows(cut)[0], windows(load(folder))[0][: cut.size])


def test_default_corpus_is_the_standard_library():
    options = "max_bytes=300000"
    train, held_out = (load("", s, 128, options) for s in ("train", "eval"))
    assert train.num_classes == 256 and train.info["bytes"] == 300_000 and held_out.info["bytes"] == 15_000
    assert 2.5 < train.info["train_unigram_entropy_nats"] < 4
    names = [name for name, _ in text._files("", ())]
    assert len(names) > 300 and "json/decoder.py" in names and names == sorted(names)
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    assert (Path(sysconfig.get_path("stdlib")) / names[0]).exists()


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda p: p / "nowhere", "", DataError, "nowhere does not exist"),
        (lambda p: p, "", DataError, "contains no readable text"),
        (lambda p: (p / "a.txt").write_text("short"), "", DataError, "too few for --sequence_length=8"),
        (lambda p: (p / "a.txt").write_text("x" * 99), "eval_pattern=b*", DataError, "0 bytes of text for eval"),
        (lambda p: p, "pattern=3", ConfigError, "must be a file name pattern"),
        (lambda p: p, "patern=*", ConfigError, "has no option 'patern'; it has pattern, eval_pattern, max_bytes"),
    ],
)
def test_bad_folders_and_options(tmp_path, make, options, error, message):
    made = make(tmp_path)
    with pytest.raises(error) as raised:
        load(made if isinstance(made, Path) else tmp_path, options=options)
    assert message in str(raised.value)


def test_unreadable_file_is_counted(folder):
    (folder / "part0" / "broken.txt").symlink_to(folder / "gone.txt")
    text._corpora.cache_clear()
    assert load(folder).info["skipped_files"] == 2


def found_bytes(folder) -> dict[str, tuple[str, set[int]]]:
    """split -> the digest, the bytes"""
    text._corpora.cache_clear()
    splits = {name: load(folder, name) for name in ("train", "eval")}
    return {name: (split.info["digest"], set(windows(split)[0].ravel().tolist())) for name, split in splits.items()}


def test_a_file_is_read_once_whatever_links_lead_to_it(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "in", elsewhere):
        folder.mkdir(parents=True)
    for i in range(1, 41):
        (data / "in" / f"{i}.txt").write_bytes(bytes([i]) * 300)
    (elsewhere / "x.txt").write_bytes(bytes([99]) * 300)
    (data / "to").symlink_to(elsewhere)
    before = found_bytes(data)
    assert before["eval"][1] - {0} and not before["train"][1] & before["eval"][1] - {0}
    assert 99 in before["train"][1] | before["eval"][1]
    (data / "loop").symlink_to(".")
    (data / "in" / "up").symlink_to("..")
    (data / "a").symlink_to("in")
    (data / "a.txt").symlink_to("in/3.txt")
    (data / "to.2").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data)
    (elsewhere / "y.txt").symlink_to("x.txt")
    assert found_bytes(data) == before
    names = [name for name, _ in text._files(str(data), ())]
    assert names == sorted([f"in/{i}.txt" for i in range(1, 41)] + ["to/x.txt"])


def test_a_link_has_its_own_name(tmp_path):
    """As those of volumes of Kubernetes, and of caches: to files of hidden folders, or without a suffix."""
    hidden = tmp_path / "..2024"
    hidden.mkdir()
    (hidden / "a.txt").write_text("a" * 500)
    (hidden / "blob").write_text("b" * 500)
    (tmp_path / "..data").symlink_to("..2024")
    (tmp_path / "a.txt").symlink_to("..data/a.txt")
    (tmp_path / "b.txt").symlink_to("..data/blob")
    (tmp_path / "c.txt").symlink_to("c.txt")  # to itself
    assert [name for name, _ in text._files(str(tmp_path), ())] == ["a.txt", "b.txt", "c.txt"]
    assert load(tmp_path).info["skipped_files"] == 1


def test_a_pipe_is_left_out(folder):
    before = found_bytes(folder)
    os.mkfifo(folder / "part0" / "pipe.txt")
    (folder / "part0" / "link.txt").symlink_to("pipe.txt")
    assert found_bytes(folder) == before
    with pytest.raises(DataError, match="pipe.txt is not a plain file"):
        load(folder / "part0" / "pipe.txt")


def test_a_file_that_cannot_be_read_ends_the_run(folder):
    (folder / "part0" / "broken.txt").symlink_to("/proc/self/mem")  # of which the first byte cannot be read
    text._corpora.cache_clear()
    with pytest.raises(DataError, match=r"part0/broken.txt cannot be read \(Input/output error\)"):
        load(folder)


def test_a_folder_that_cannot_be_read_ends_the_run(folder, monkeypatch):
    (folder / "lost+found").mkdir()
    scan = os.scandir

    def refusing(path):
        if Path(path).name in ("part1", "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(text_files.os, "scandir", refusing)
    text._corpora.cache_clear()
    with pytest.raises(DataError, match=r"folder .*part1 cannot be read \(Permission denied\)"):
        load(folder)
