"""The data of a case as TFRecord files in an object store. case["data_in_store"] says how they are read: copied into a
cache that all workers share ("copies"), in byte ranges ("ranges"), or sequentially while they arrive ("stream"); with
"by_file" each worker streams its own files if all workers get equally many.

If all workers read one stream, the samples are stored such that they arrive in their own order, as in the oracle.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import data, snapshots, stores

KINDS = ("copies", "ranges", "stream", "by_file")
_STREAMS = ("stream", "by_file")
_CLASSES = {"classes": 3, "tokens": 4}
_MOST_FILES = 6
_READ_IN_TURNS = 4  # files of a stream that are interleaved


def conflicts(case: Mapping[str, Any]) -> str:
    """Why the data of a case cannot be in a store; "" if they can."""
    found, model, how = case["data"], case["model"], case["data_in_store"]
    if case["kind"] == "fit":
        return "tfdist.fit takes data in memory"
    if case["runtime"].startswith("parameter_server"):
        return "with parameter servers the chief alone reads"
    if model["inputs"] == "both" or model["head"] == "dict" or "named" in model or found["weights"] != "none":
        return "the records hold one x and one y"
    if "differs" in found:
        return "all workers read the same objects"
    if found.get("mixed"):
        return "a feature has one type"
    if how not in _STREAMS and found["source"] == "dataset":
        return "what can be read at random has its own order"
    return "the oracle knows no windows" if how in _STREAMS and case["options"].get("shuffle", True) else ""


def features(case: Mapping[str, Any]) -> list[str]:
    if "data_in_store" not in case:
        return []
    found = {"copies": [], "ranges": ["option:nocache_data"], "stream": ["option:stored_stream"]}
    if case["data_in_store"] == "by_file":  # read by its worker, or by all if there are too few files
        found["by_file"] = ["option:own_files" if cut(case) > 1 else "option:files_of_all"]
    return ["option:data_in_store", *found[case["data_in_store"]]]


def flags(case: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    """Writes the data, and returns the flags to read them with an empty cache. A collective call."""
    how, place, cache = case["data_in_store"], "", ""
    if runtime.rank == 0:
        place, cache = stores.new_place(case), tempfile.mkdtemp(prefix="tfdist-fuzz-")
        _write(case, place, cache)
    else:
        stores.reach(case)
    place, cache = (snapshots.shared(runtime, text) for text in (place, cache))
    x, y, *_ = data.arrays(case)
    classes = _CLASSES.get(case["model"]["head"])
    return {
        "source": "tfrecord",
        "source_args": f"x=x:{_kind(x)},y=y:{_kind(y)}"
        + (f",classes={classes}" if classes else "")
        + (",stream=True" if how in _STREAMS else "")
        + (",by_file=True" if how == "by_file" else ""),
        "data_dir": place,
        "cache_dir": cache,
        "cache_data": how != "ranges",
    }


def forget(config: Any, runtime: Any) -> None:
    """Removes the cache of a configuration, which nobody reads any more."""
    if runtime.rank == 0 and config.run.cache_dir:
        shutil.rmtree(config.run.cache_dir, ignore_errors=True)


def _kind(values: np.ndarray) -> str:
    shape = ",".join(map(str, values.shape[1:]))
    return f"{values.dtype.name}[{shape}]" if shape else values.dtype.name


def _write(case: Mapping[str, Any], place: str, folder: str) -> None:
    import tensorflow as tf

    from tfdist.storage.object_store import ObjectStore

    chance, files = random.Random(case["seed"]), []
    for split in ("train", "eval"):
        x, y, *_ = data.arrays(case, split)
        for number, rows in enumerate(_files(chance, case, len(y))):
            path = Path(folder) / f"{split}-{number}.tfrecord"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for row in rows:
                    feature = {"x": _feature(x[row]), "y": _feature(y[row])}
                    example = tf.train.Example(features=tf.train.Features(feature=feature))
                    # Else each process orders the features in its own way: a run that is moved finds other files.
                    writer.write(example.SerializeToString(deterministic=True))
            files.append(path)
    ObjectStore(place).send_all((path, path.name) for path in files)
    for path in files:
        path.unlink()


def _feature(values: np.ndarray) -> Any:
    import tensorflow as tf

    if values.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=values.ravel()))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values.ravel()))


def _files(chance: random.Random, case: Mapping[str, Any], size: int) -> Iterator[list[int]]:
    """Yields the samples of each file. The files differ in size, except for "by_file"."""
    if case["data_in_store"] == "by_file":
        yield from _equal_files(case, size)
        return
    stream = case["data_in_store"] == "stream"
    cuts = sorted(chance.sample(range(1, size), chance.randint(1, _MOST_FILES) - 1))
    lengths = [stop - start for start, stop in itertools.pairwise([0, *cuts, size])]
    if not stream:
        starts = itertools.accumulate([0, *lengths])
        yield from (list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False))
        return
    file_of = _in_turns(lengths)
    yield from ([row for row, file in enumerate(file_of) if file == number] for number in range(len(lengths)))


def _in_turns(lengths: list[int]) -> list[int]:
    """Returns the file of each record when files of these lengths are interleaved."""
    import tensorflow as tf

    turns = (
        tf.data.Dataset.from_tensor_slices(lengths)
        .enumerate()
        .interleave(
            lambda file, length: tf.data.Dataset.from_tensors(file).repeat(tf.cast(length, tf.int64)),
            cycle_length=_READ_IN_TURNS,
        )
    )
    return list(turns.as_numpy_iterator())


# -- each worker reads its own files -----------------------------------------------------------------------------------


def _equal_files(case: Mapping[str, Any], size: int) -> list[list[int]]:
    """Splits `size` samples evenly into files: for the training data, of which each worker may read its own files."""
    counts = [count for count in range(1, _MOST_FILES + 1) if size % count == 0]
    count = random.Random(f"{case['seed']}/files").choice(counts[1:] or counts)  # all workers would read a single file
    return [list(range(first, first + size // count)) for first in range(0, size, size // count)]


def cut(case: Mapping[str, Any]) -> int:
    """Returns into how many streams, one for each replica, the training data are cut; 1: all replicas read all data."""
    from tests.fuzz.space import replicas_of

    options, files = case["options"], len(_equal_files(case, case["data"]["size"]))
    replicas = replicas_of(case["runtime"], options)
    is_even = options["global_batch"] % (options["accumulation"] * replicas) == 0
    return replicas if is_even and files % replicas == 0 else 1


def by_file(case: Mapping[str, Any]) -> Iterator[int]:
    """Yields the samples in the order in which a run takes them: each micro-batch has equal parts of the replicas'
    streams. A replica that is at the end of its files starts them again."""
    files, parts = _equal_files(case, case["data"]["size"]), cut(case)
    rows = case["options"]["global_batch"] // (case["options"]["accumulation"] * parts)
    shards = [itertools.cycle(_read(files[replica::parts])) for replica in range(parts)]
    while True:
        for shard in shards:
            yield from itertools.islice(shard, rows)


def _read(files: list[list[int]]) -> list[int]:
    """Returns the samples of some files that are interleaved."""
    left = [iter(file) for file in files]
    return [next(left[file]) for file in _in_turns([len(file) for file in files])]
