"""The text source: language modeling on the bytes of any text files.

The files of a split, in the order of their relative paths, each followed by one zero byte, form one long array of
bytes, held in memory once. Sample i is the window of T + 1 bytes that starts at byte i * T (T = --sequence_length):
x = its first T bytes, y = its last T, so each byte of the corpus but the first is predicted exactly once. A rest of
the corpus that fills no window is not used. x, y int32 [T] in 0..255.

--data_dir is a folder (searched recursively) or one file. Without it the corpus is the source code of the running
Python's standard library, without site-packages, tests and generated tables: 10 MB of real text on every machine.
(Another Python version means another corpus: compare `info["digest"]` between workers.)

Symbolic links are followed. Each file is read once, however many links lead to it: under its own path if that is in
the folder, else under that of a link. Links to nothing and empty files are skipped; a file that exists but cannot be
read ends the run.

About 5 % of the files are held out for evaluation, chosen by the SHA-256 of their paths, so that a file stays in its
split when others are added. If that leaves a split without a window (few files, or one), the last 5 % of the bytes are
held out.

Options: pattern: one or a list of file name patterns, for example pattern=['*.txt','*.md']; eval_pattern: files whose
relative path matches are held out, and no others; max_bytes: use only so many bytes of the training corpus, and a
twentieth of that for evaluation (0: all).
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import hashlib
import math
import os
import posixpath
import sysconfig
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.sources.source_facts import BYTES
from tfdist.data.sources.split import SPLITS, Sample, Split, on_host, read_options
from tfdist.data.sources.text_files import plain_files
from tfdist.storage.data_cache import cache_of

PATTERNS = (
    "*.txt",
    "*.md",
    "*.rst",
    "*.tex",
    "*.html",
    "*.py",
    "*.js",
    "*.ts",
    "*.c",
    "*.h",
    "*.cc",
    "*.cpp",
    "*.go",
    "*.rs",
    "*.java",
)
# Missing on some machines (tests), other people's code (packages), or tables rather than text (the last two).
STANDARD_LIBRARY_SKIPS = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
    "encodings",
)
HELD_OUT = 0.05
SEPARATOR = b"\0"
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def load(config: DataConfig, split: str) -> Split:
    """Loads a split. info: files, bytes, digest of this split; unigram entropies of both (nats a byte); skipped_files.

    Raises DataError if the folder does not exist, or a split has too little text for one window.
    """
    options = read_options(config, {"pattern": None, "eval_pattern": None, "max_bytes": 0})
    patterns = [_patterns(name, options[name]) for name in ("pattern", "eval_pattern")]
    corpora = _corpora(config.data_dir, *patterns, options["max_bytes"], config.sequence_length)
    corpus, length = corpora[split], config.sequence_length
    data = on_host(corpus.data)

    def fetch(indices: tf.Tensor) -> Sample:
        window = tf.cast(tf.gather(data, indices[:, None] * length + tf.range(length + 1, dtype=tf.int64)), tf.int32)
        return window[:, :-1], window[:, 1:]

    info = {"files": corpus.files, "bytes": len(corpus.data), "digest": corpus.digest, "skipped_files": corpus.skipped}
    info |= {f"{name}_unigram_entropy_nats": corpora[name].unigram_entropy for name in SPLITS}
    spec = (tf.TensorSpec([length], tf.int32),) * 2
    return Split(
        f"text/{split}",
        (len(corpus.data) - 1) // length,
        spec,
        fetch,
        BYTES,
        info,
        cheap=True,
        contents=lambda: [int(corpus.digest, 16) % 2**32],
    )


@dataclass(frozen=True)
class Corpus:
    """The bytes of one split. data: uint8 [bytes]; skipped: number of empty files and dead links, in both splits."""

    data: np.ndarray
    files: int
    skipped: int

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Nats per byte: the loss of the best model that knows only how often each byte occurs."""
        p = np.bincount(self.data, minlength=BYTES) / len(self.data)
        return float(-(p[p > 0] * np.log(p[p > 0])).sum())

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data.tobytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=1)  # both splits are requested, one after the other
def _corpora(data_dir: str, pattern: tuple, eval_pattern: tuple, max_bytes: int, length: int) -> dict[str, Corpus]:
    cache = cache_of(data_dir)
    where = f"--data_dir={cache.url if cache else data_dir}" if data_dir else "the standard library"
    texts, skipped = {}, 0
    for relative, path in _files(data_dir, pattern):
        text = _read(path)
        if text:
            texts[relative] = text
        else:
            skipped += 1
    if not texts:
        raise DataError(
            f"{where} contains no readable text in files like {', '.join(pattern or PATTERNS[:4])}: check the folder,"
            " or set --source_args=pattern=..."
        )
    held_out = {name for name in texts if (_matches(name, eval_pattern) if eval_pattern else _hashed_out(name))}
    chosen = {name: [t for n, t in texts.items() if (n in held_out) == (name == "eval")] for name in SPLITS}
    data = {name: _joined(parts) for name, parts in chosen.items()}
    if not eval_pattern and min(len(d) for d in data.values()) <= length:
        whole = _joined(list(texts.values()))
        cut = len(whole) - int(len(whole) * HELD_OUT)
        data = {"train": whole[:cut], "eval": whole[cut:]}
        chosen = dict.fromkeys(SPLITS, list(texts))
    if max_bytes:
        data = {"train": data["train"][:max_bytes], "eval": data["eval"][: max(max_bytes // 20, length + 1)]}
    parts: dict[Any, Any] = dict(data)
    for name, part in parts.items():
        if len(part) <= length:
            raise DataError(
                f"{where} has {len(part)} bytes of text for {name}, too few for --sequence_length={length}: add text,"
                " or lower it."
            )
    return {name: Corpus(part, len(chosen[name]), skipped) for name, part in parts.items()}


def _files(data_dir: str, pattern: tuple) -> list[tuple[str, str]]:
    """Returns (relative path with /, path) of every file that matches, sorted by the former."""
    if cache := cache_of(data_dir):
        cache.must_copy("--source=text")
        found = [name for name in cache.entries if _matches(posixpath.basename(name), pattern or PATTERNS)]
        paths = [os.path.join(data_dir, name) for name in found]
        cache.bring(paths)
        return sorted(zip(found, paths, strict=True))
    if data_dir and not os.path.exists(data_dir):
        raise DataError(f"--data_dir={data_dir} does not exist: give a folder of text files or one file.")
    if data_dir and os.path.isfile(data_dir):
        return [(posixpath.basename(data_dir), data_dir)]
    if data_dir and not os.path.isdir(data_dir):
        raise DataError(f"--data_dir={data_dir} is not a plain file: give a folder of text files or one file.")
    skips = () if data_dir else STANDARD_LIBRARY_SKIPS
    root = data_dir or sysconfig.get_path("stdlib")
    accepted = pattern or (PATTERNS if data_dir else ("*.py",))
    return plain_files(
        root,
        accepts=lambda name: _matches(name, accepted),
        enters=lambda name: name not in skips and not name.startswith("."),
    )


def _read(path: str) -> bytes:
    """Returns the text of a file; empty if the file does not exist, for example at a dead link."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in _NOT_THERE:
            return b""
        raise DataError(
            f"{path} cannot be read ({error.strerror}): make it readable, or keep it out of what --source=text reads."
        ) from None


def _joined(parts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(part + SEPARATOR for part in parts), np.uint8)


def _hashed_out(relative: str) -> bool:
    first = int.from_bytes(hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()[:8], "big")
    return first < math.floor(HELD_OUT * 2**64)


def _matches(name: str, patterns: tuple) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(name: str, value: object) -> tuple[str, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    patterns = tuple(item for item in values if isinstance(item, str))
    if len(patterns) < len(values):
        raise ConfigError(
            f"--source_args: {name}={value!r} must be a file name pattern or a list of them, for example "
            f"{name}=['*.txt','*.md']."
        )
    return patterns
