"""The synthetic source: samples of any shape and number, made from their index, for benchmarks.

task=image: x float32 [*shape], noise plus a brightness that depends on the class (so that there is something to learn);
y int32 in 0..classes-1. task=text: x, y int32 [T], T = --sequence_length: uniform random tokens 0..vocab-1, and the
same tokens shifted by one.

A sample depends only on its split and index, and is the same in every process.
Options: task, shape, classes, samples (in training), eval_samples, vocab; fixed=True makes the first batches once and
returns them forever, so that the input costs nothing (parameter servers take no notice of it).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.data import order
from tfdist.data.sources.source_facts import SYNTHETIC
from tfdist.data.sources.split import Sample, Split, on_host, read_options

NOISE_OFFSETS = 65_536  # number of different sections of one noise array


def load(config: DataConfig, split: str) -> Split:
    """Loads a split as described above. Raises ConfigError for an invalid option."""
    options = read_options(config, SYNTHETIC)
    task, shape, length = options["task"], options["shape"], config.sequence_length
    if task not in ("image", "text"):
        raise ConfigError(f"--source_args: task={task} must be image or text.")
    if not isinstance(shape, tuple) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ConfigError(
            f"--source_args: shape={shape!r} must be a tuple of positive integers, for example shape=(32,32,3) or"
            " shape=(10,)."
        )
    outputs_option = "classes" if task == "image" else "vocab"
    outputs = options[outputs_option]
    if not 1 <= outputs <= 2**24:
        raise ConfigError(f"--source_args: {outputs_option}={outputs} must be from 1 to {2**24}.")
    seed = 1 if split == "eval" else 0
    if task == "image":
        fetch = _images(shape, outputs, seed)
        spec = (tf.TensorSpec(shape, tf.float32), tf.TensorSpec([], tf.int32))
    else:
        fetch, spec = _tokens(length, outputs, seed), (tf.TensorSpec([length], tf.int32),) * 2
    size = options["eval_samples"] if split == "eval" else options["samples"]
    return Split(f"synthetic/{split}", size, spec, fetch, outputs, cheap=True, fixed=options["fixed"], contents=list)


def _images(shape: tuple[int, ...], classes: int, seed: int) -> Callable[[tf.Tensor], Sample]:
    length = math.prod(shape)
    with tf.device("/cpu:0"):
        noise = on_host(tf.random.stateless_normal([length + NOISE_OFFSETS], (seed, 20)))

    def fetch(indices: tf.Tensor) -> Sample:
        seeds = order.element_seeds(indices, seed)
        labels = order.uniform_int(seeds, 0, classes)
        offsets = order.uniform_int(seeds, 1, NOISE_OFFSETS)
        row = tf.TensorSpec([length], tf.float32)
        x = tf.map_fn(lambda at: noise[at : at + length], offsets, fn_output_signature=row)
        brightness = 2.0 * (tf.cast(labels, tf.float32) + 0.5) / classes - 1.0
        return tf.reshape(x + brightness[:, None], [-1, *shape]), labels

    return fetch


def _tokens(length: int, vocab: int, seed: int) -> Callable[[tf.Tensor], Sample]:
    def fetch(indices: tf.Tensor) -> Sample:
        counters = indices[:, None] * (length + 1) + tf.range(length + 1, dtype=tf.int64)
        seeds = order.element_seeds(tf.reshape(counters, [-1]), seed)
        window = tf.reshape(order.uniform_int(seeds, 0, vocab), [-1, length + 1])
        return window[:, :-1], window[:, 1:]

    return fetch
