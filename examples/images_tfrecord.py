"""Trains on images from TFRecord files, with augmentation. Writes the files first if they do not exist.

    source scripts/environment.sh && python examples/images_tfrecord.py

Expected, in a minute on two cores: an accuracy of at least 0.92 in the evaluation at the end. Further flags are
passed to the workers.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

FOLDER = Path("runs/images_tfrecord/data")
COMMAND = [sys.executable, "-m", "tfdist.launch", "--workers=2", "--"]
FLAGS = [
    "--source=tfrecord",
    f"--data_dir={FOLDER}",
    "--source_args=x=image:image[16,16,1],y=label:int32,classes=10",
    "--augment=shift",
    "--model=cnn",
    "--global_batch=64",
    "--epochs=10",
    "--learning_rate=3e-3",
    "--run_dir=runs/images_tfrecord",
]


def write():
    """Writes PNG images: 1,440 in two files for training, 357 in one file for evaluation."""
    images, labels = load_digits(return_X_y=True)
    images = np.repeat(np.repeat(images.reshape(-1, 8, 8, 1) * 15, 2, axis=1), 2, axis=2).astype("uint8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, rows in {"train-0": range(720), "train-1": range(720, 1440), "eval": range(1440, 1797)}.items():
        with tf.io.TFRecordWriter(str(FOLDER / f"{name}.tfrecord")) as file:
            for row in rows:
                image = tf.train.BytesList(value=[tf.io.encode_png(images[row]).numpy()])
                label = tf.train.Int64List(value=[labels[row]])
                feature = {"image": tf.train.Feature(bytes_list=image), "label": tf.train.Feature(int64_list=label)}
                file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


if __name__ == "__main__":
    if not (FOLDER / "eval.tfrecord").exists():
        write()
    sys.exit(subprocess.run([*COMMAND, *FLAGS, *sys.argv[1:]]).returncode)
