"""Writes TensorFlow's checkpoint files from arrays in host memory, without copying these.

The files are the same that tf.train.CheckpointManager would have written for variables with these values, so
TensorFlow's own tools read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tfdist.artifacts.direct_file import DirectFile
from tfdist.artifacts.manifest import CRC
from tfdist.compat.checkpoint_index import Box, Written, index
from tfdist.compat.leveldb_table import number
from tfdist.compat.tensorflow_checksums import masked

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # suffix of a variable's name in a checkpoint, after its key
_COUNTER = "save_counter"  # of tf.train.Checkpoint; here always 1
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # where tf.train.Checkpoint looks for the content of a checkpoint


@dataclass(frozen=True)
class Entry:
    """An array under its name in a checkpoint, or the content of a box of an array of `shape`."""

    name: str
    array: np.ndarray
    shape: tuple[int, ...] | None = None  # None: the array's own
    box: Box | None = None


def write(folder: str, step: int, arrays: Mapping[str, np.ndarray], direct: bool) -> dict[str, dict[str, Any]]:
    """Writes state-STEP.index and its data, and TensorFlow's file `checkpoint` that names them. Returns the result of
    `write_files`. Raises OSError.
    """
    entries = [Entry(key + SUFFIX, array) for key, array in arrays.items()]
    written = write_files(f"{folder}/state-{step}", [*entries, *description(arrays)], direct)
    with open(f"{folder}/checkpoint", "w", encoding="utf-8") as file:
        file.write(pointer(f"state-{step}"))
    return written


def description(keys: Iterable[str]) -> list[Entry]:
    """The entries that tf.train.Checkpoint expects in addition to the arrays of these keys."""
    return [
        Entry(_COUNTER + SUFFIX, np.array(1, np.int64)),
        Entry(GRAPH, _object_graph([*keys, _COUNTER])),
    ]


def write_files(prefix: str, entries: Sequence[Entry], direct: bool) -> dict[str, dict[str, Any]]:
    """Writes the checkpoint `prefix`, byte for byte as SaveV2 would; flushes its data to the disk.

    direct: bypass the page cache (direct_file.py). Returns name -> size and CRC-32C of the data file, in the form of a
    manifest: of the intended content, not of what is read back. Raises OSError.
    """
    path = f"{prefix}.data-00000-of-00001"
    with DirectFile(path, direct) as file:
        written = [_append(file, entry) for entry in entries]
        file.flush()
    with open(f"{prefix}.index", "wb") as index_file:
        index_file.write(index(written))
    return {os.path.basename(path): {"bytes": file.size, CRC: f"{file.checksum:08x}"}}


def _append(file: DirectFile, entry: Entry) -> Written:
    array, offset = np.asarray(entry.array), file.size
    shape = array.shape if entry.shape is None else entry.shape
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind in "OSU":
        dtype, checksum = tf.string, _append_texts(file, [_encoded(text) for text in array.reshape(-1).tolist()])
    else:
        dtype = tf.as_dtype(array.dtype)
        checksum = file.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    number = dtype.as_datatype_enum
    return Written(entry.name, number, tuple(shape), entry.box, offset, file.size - offset, checksum)


def _append_texts(file: DirectFile, texts: Sequence[bytes]) -> int:
    """Appends the texts' lengths, the checksum of the lengths, the texts. Returns the checksum of all, where each
    length counts as a number of four bytes, or of eight."""
    lengths = b"".join(len(text).to_bytes(4 if len(text) < 1 << 32 else 8, "little") for text in texts)
    checksum = google_crc32c.value(lengths)
    crc = masked(checksum).to_bytes(4, "little")
    for content in (b"".join(number(len(text)) for text in texts) + crc, *texts):
        file.append(np.frombuffer(content, np.uint8))
    for content in (crc, *texts):
        checksum = google_crc32c.extend(checksum, content)
    return checksum


def _encoded(text: Any) -> bytes:
    if not isinstance(text, bytes | str):
        raise TypeError(f"an array of objects contains a {type(text).__name__}: only strings can be in a checkpoint.")
    return text if isinstance(text, bytes) else text.encode()


def pointer(prefix: str) -> str:
    """The text of TensorFlow's file `checkpoint`, by which tf.train.latest_checkpoint finds `prefix` in a folder."""
    return f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'


def _object_graph(keys: Iterable[str]) -> np.ndarray:
    """The object graph that tf.train.Checkpoint(model=..., optimizer=..., train=...) would have written: it says which
    variable is under which key, GROUP/NAME or NAME alone."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    root, groups = graph.nodes.add(), {"": 0}
    for key in keys:
        group, _, name = key.partition("/") if "/" in key else ("", "", key)
        if group not in groups:
            groups[group] = len(graph.nodes)
            root.children.add(node_id=groups[group], local_name=group)
            graph.nodes.add()
        graph.nodes[groups[group]].children.add(node_id=len(graph.nodes), local_name=name)
        graph.nodes.add().attributes.add(name="VARIABLE_VALUE", full_name=key, checkpoint_key=key + SUFFIX)
    return np.array(graph.SerializeToString(), object)
