"""TensorFlow's checkpoint files, written from arrays in host memory without copies of them.

They are what tf.train.CheckpointManager would have written of variables with these values: its own tools read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # of a variable's name in a checkpoint, behind its key
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # where tf.train.Checkpoint looks for what is in a checkpoint


def write(folder: str, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """state-STEP.index and its data, and TensorFlow's file `checkpoint` that names them. Raises OSError or
    tf.errors.OpError."""
    prefix, arrays = f"{folder}/state-{step}", {**arrays, "save_counter": np.array(1, np.int64)}
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[*(key + SUFFIX for key in arrays), GRAPH],
            shape_and_slices=[""] * (len(arrays) + 1),
            tensors=[*map(shared, arrays.values()), object_graph(arrays)],
        )
    with open(f"{folder}/checkpoint", "w", encoding="utf-8") as file:
        file.write(pointer(f"state-{step}"))


def pointer(prefix: str) -> str:
    """What TensorFlow's file `checkpoint` says in a folder, so that tf.train.latest_checkpoint finds `prefix` there."""
    return f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'


def shared(array: Any) -> Any:
    """A tensor in the memory of the array where that can be, else the array itself, which TensorFlow copies."""
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except Exception:  # noqa: BLE001 - of either library, for types and layouts that one of them does not know
        return array


def object_graph(keys: Iterable[str]) -> np.ndarray:
    """What tf.train.Checkpoint(model=..., optimizer=..., train=...) would have written: which variable is under which
    key, GROUP/NAME or NAME alone.
    """
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
