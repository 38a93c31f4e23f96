"""Records of TFRecord files in an object store, each file read from front to back: by TensorFlow's own reader if the
whole file is in the cache when its turn comes, else from the part downloaded so far. The order is the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_data
from tfdist.compat.tensorflow_checksums import FRAME_BYTES, HEADER_BYTES
from tfdist.data.reading import as_is
from tfdist.data.sources.records import as_objects, checked, data_bytes
from tfdist.data.sources.whole_records import whole_records
from tfdist.storage.data_cache import DataCache
from tfdist.storage.front_to_back import FrontToBack

_AHEAD = 4  # files that are fetched while those before them are read
_OPENED = 3  # open files, as a multiple of those read in turns: tf.data opens others ahead of their turn
_PAUSE_SECONDS = 0.002  # until the next check how much of a file has arrived
_READ_BYTES = 1 << 21  # of a file, at a time, if that holds a record


def stored_records(cache: DataCache, paths: list[str], compression: str, cycle: int) -> tf.data.Dataset:
    """Returns the records of some files, of which `cycle` are read in turns. paths: those of the local copies."""
    files = FrontToBack(cache, at_a_time=cycle)
    numbers = tf.data.Dataset.range(len(paths))
    read_whole = whole_records([cache.size(path) for path in paths], lambda number: cache.named(paths[number]))
    ahead_of_their_turn = _whole_files(files, paths, cycle, compression, read_whole)
    at_once = numbers.interleave(ahead_of_their_turn, cycle, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if compression:
        return at_once

    def all_there() -> np.bool:
        return np.bool(all(cache.copy(path).is_there() for path in paths))

    # In one thread, which waits for no file before its turn. Otherwise the first records would come later, and a
    # stopped stream would wait for bytes that nobody needs.
    in_turns = numbers.interleave(_growing_files(cache, files, paths, cycle, read_whole), cycle)

    def one_pass(_) -> tf.data.Dataset:
        whole = tf.ensure_shape(tf.numpy_function(all_there, [], tf.bool, stateful=False), [])
        none, all_of_them = tf.constant(0, tf.int64), tf.constant(-1, tf.int64)
        first, then = tf.where(whole, none, all_of_them), tf.where(whole, all_of_them, none)
        return in_turns.take(first).concatenate(at_once.take(then))

    return tf.data.Dataset.range(1).flat_map(as_is(one_pass))


def _whole_files(files: FrontToBack, paths: list[str], cycle: int, compression: str, read_whole: Callable) -> Callable:
    """Returns a function: number of a file -> its records, read by TensorFlow."""
    compression_type: Any = compression

    def bring(number: np.ndarray) -> bytes:
        return files.whole(paths[number], *_around(paths, int(number), _OPENED * cycle)).encode()

    def records(number: tf.Tensor) -> tf.data.Dataset:
        path = tf.ensure_shape(tf.numpy_function(bring, [number], tf.string, stateful=False), [])
        return tf.data.TFRecordDataset(path, compression_type) if compression else read_whole(number, path)

    return as_is(records)


def _growing_files(
    cache: DataCache, files: FrontToBack, paths: list[str], cycle: int, read_whole: Callable
) -> Callable:
    """Returns a function: number of a file -> its records, read by TensorFlow if it is whole, else as they arrive."""
    names = tf.constant(paths, tf.string)
    sizes = tf.constant([cache.size(path) for path in paths], tf.int64)

    def begin(number: np.ndarray) -> np.bool:
        return np.bool(files.begin(paths[number], *_around(paths, int(number), 2 * cycle)))

    def read_on(number: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.int64]:
        found, after = records_so_far(cache, files, paths[number], int(offset))
        return as_objects(found), np.int64(after)

    def records(number: tf.Tensor) -> tf.data.Dataset:
        def step(offset: tf.Tensor, _) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
            found, after = tf.numpy_function(read_on, [number, offset], [tf.string, tf.int64], stateful=False)
            return tf.ensure_shape(after, []), (tf.ensure_shape(found, [None]), offset < sizes[number])

        def so_far(_) -> tf.data.Dataset:
            looks = tensorflow_data.paused(tf.data.Dataset.range(tf.int64.max), _PAUSE_SECONDS)
            found = looks.scan(tf.constant(0, tf.int64), as_is(step)).take_while(
                as_is(lambda _, before_end: before_end)
            )
            return found.flat_map(as_is(lambda records, _: tf.data.Dataset.from_tensor_slices(records)))

        there = tf.cast(tf.ensure_shape(tf.numpy_function(begin, [number], tf.bool, stateful=False), []), tf.int64)
        whole = tf.data.Dataset.range(there).flat_map(as_is(lambda _: read_whole(number, names[number])))
        return tf.data.Dataset.range(1 - there).flat_map(as_is(so_far)).concatenate(whole)

    return as_is(records)


def first_of(cache: DataCache, paths: list[str]) -> bytes | None:
    """Returns the first record of some uncompressed files. Fetches no more files than needed."""
    with contextlib.closing(FrontToBack(cache, at_a_time=1)) as files:
        for path in paths:
            files.begin(path, [])
            at = 0
            while at < cache.size(path):
                found, at = records_so_far(cache, files, path, at)
                if found:
                    return found[0]
                time.sleep(_PAUSE_SECONDS)
    return None


def records_so_far(cache: DataCache, files: FrontToBack, path: str, start: int) -> tuple[list[bytes], int]:
    """Returns the next records of a file that was begun, as far as they have arrived, and the offset after them. Raises
    DataError (also for a damaged file or one that is no TFRecord file), StartupError, ConfigError.
    """
    size, named, found = cache.size(path), cache.named(path), []
    if start == size:
        return found, start
    if not (data := files.read(path, start, min(FRAME_BYTES, size - start), _READ_BYTES)):
        return found, start
    at, length = 0, data_bytes(named, size, start, data[:HEADER_BYTES])
    if len(data) < FRAME_BYTES + length:
        data = files.read(path, start, FRAME_BYTES + length, max(FRAME_BYTES + length, _READ_BYTES))
    while (end := at + FRAME_BYTES + length) <= len(data):
        found.append(checked(path, start + at, data[at + HEADER_BYTES : end], length, cache.named))
        at = end
        if len(data) - at < FRAME_BYTES:
            break
        length = data_bytes(named, size, start + at, data[at : at + HEADER_BYTES])
    return found, start + at


def _around(paths: list[str], at: int, opened: int) -> tuple[list[str], list[str]]:
    """Returns the files to read after a file, and those no longer read once it is begun as the last of `opened`."""
    count = len(paths)
    ahead = [paths[(at + 1 + each) % count] for each in range(min(_AHEAD, count - 1))]
    over = paths[(at - opened) % count]
    return ahead, [] if count <= opened or over in (paths[at], *ahead) else [over]
