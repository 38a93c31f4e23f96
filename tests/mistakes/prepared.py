"""Folders that cases find: a finished run, records, texts. They are made once, and copied for each case."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.mistakes import modules

RUN = [*modules.TRAIN, "--steps=6", "--save_every=3", "--export=keras"]


def write_data(folder: Path) -> None:
    """Writes records/ and texts/. Imports and uses TensorFlow, so it must run in a process of its own."""
    import numpy as np
    import tensorflow as tf

    for name in ("records", "texts"):
        (folder / name).mkdir()
    random = np.random.default_rng(0)
    for file in ("train-0", "train-1", "eval-0"):
        with tf.io.TFRecordWriter(str(folder / "records" / f"{file}.tfrecord")) as writer:
            for _ in range(20):
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=random.normal(size=6))),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[random.integers(3)])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    for name in "ab":
        (folder / "texts" / f"{name}.txt").write_text("To be, or not to be, that is the question.\n" * 40)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
