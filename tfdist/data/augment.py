"""Augmentation of training samples, and how it is attached to a split.

An augmentation is a function `fn(x, y, seeds) -> (x, y)` on several samples. x and y are nests with leading dim n;
seeds is int32 [n, 2], one seed per sample, derived only from (run seed, position). So a sample is augmented in the same
way at any number of workers, and differently in each epoch. The result for a sample must not depend on how many samples
come together, or on which: where that is cheaper, one call gets several micro-batches of a replica. An augmentation
that mixes samples (mixup) is detected by a trial, and refused if batches are divided (workers, --accumulation). With
--row_mixing=replica, or on one device, it gets one whole micro-batch (training/row_checks/mixing_augmentation.py).
It is traced in a tf.data map and must be stateless: draw from `order.uniform(seeds, k)`, or sample by sample with
`tf.map_fn` and `tf.image.stateless_*(..., seed=seed)`.
AutoGraph is off there: decorate the function with @tf.function if it has Python branches on tensors.
It may change shapes (the model must then be built for the new ones). Images are [n, H, W, C].

The built-in augmentations move images in x, and not y: a target with places (masks, images, boxes: two dims or more) is
refused. A function of your own may call them for each: with the same seeds, `flip(x, None, seeds)[0]` and
`flip(masks, None, seeds)[0]` move alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import tensorflow_graphs
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data import order
from tfdist.data.augmentation_names import AUGMENTATIONS
from tfdist.data.sources.split import Sample, Split, is_spatial
from tfdist.plugins import check_takes, own_code, resolve
from tfdist.runtime.host import known_dims

Augmentation = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple]


def load_augmentation(name: str) -> Augmentation | None:
    """Returns the augmentation called `name` (a registered name or package.module:function), or None for "none".

    Raises ConfigError for an unknown name or a function with other arguments. The returned function raises it if the
    user's code fails.
    """
    if name == "none":
        return None
    function = resolve("augment", name, AUGMENTATIONS)
    if name in AUGMENTATIONS:
        return function
    check_takes(
        "augment",
        name,
        function,
        ("x", "y", "seeds"),
        "an augmentation is a function (x, y, seeds) of several samples that returns (x, y), and draws from seeds,"
        " int32 [n, 2], one per sample (tfdist/data/augment.py)",
    )

    def augmentation(x: tf.Tensor, y: tf.Tensor, seeds: tf.Tensor) -> tuple:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = len(graph.get_operations()) if graph else 0
        with own_code("augment", name), _without_variables(name):
            result = function(x, y, seeds)
        if graph:
            _check_stateless(name, tensorflow_graphs.kinds_made_here(graph, before))
        return result

    return augmentation


@contextlib.contextmanager
def _without_variables(name: str) -> Iterator[None]:
    """Context manager: names the augmentation, and a fix, if it makes a variable; TensorFlow's message does neither."""
    try:
        yield
    except ValueError as error:
        if "singleton tf.Variables" not in str(error):
            raise
        raise ConfigError(
            f"--augment={name} creates a variable (of a Keras layer, perhaps) each time it is traced: create it outside"
            " of the function, and draw from `seeds` only, not with the layer."
        ) from None


def _check_stateless(name: str, kinds: set[str]) -> None:
    """Raises ConfigError if `kinds`, the types of an augmentation's operations, draw random numbers or set state."""
    drawing = sorted(filter(tensorflow_graphs.draws_anew, kinds))
    setting = sorted(filter(tensorflow_graphs.sets_state, kinds))
    if drawing or setting:
        does = f"draws by {drawing[0]}" if drawing else f"sets a variable ({setting[0]}, as keras.random does)"
        raise ConfigError(
            f"--augment={name} {does}, so samples would change with the number of workers, or when a run is resumed:"
            " draw only from its `seeds`, as with tf.map_fn and tf.random.stateless_*(..., seed=seed)."
        )


def augmented_fetch(split: Split, augment: Augmentation | None, seed: int) -> Callable[[tf.Tensor, tf.Tensor], Sample]:
    """Returns a function (indices, positions in the data order, both int64 [n]) -> augmented samples. Cropping is left
    to the source if it can crop while decoding.
    """

    def fetch(indices: tf.Tensor, positions: tf.Tensor) -> Sample:
        if augment is None:
            return split.fetch(indices)
        seeds = order.element_seeds(positions, seed)
        if augment is random_resized_crop and split.fetch_cropped is not None:
            return split.fetch_cropped(indices, seeds)
        return apply(augment, split.fetch(indices), seeds, split.name)

    return fetch


def apply(augment: Augmentation, sample: Sample, seeds: tf.Tensor, name: str) -> Sample:
    """Returns the samples with x and y augmented and their weights, if any, unchanged.

    Raises DataError on a wrong return value.
    """
    x, y = sample[:2]
    result = augment(x, y, seeds)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(f"--augment: the function returned {type(result).__name__} for {name}: it must return (x, y).")
    for value in tf.nest.flatten(result):
        if not isinstance(value, tf.Tensor):
            raise DataError(
                f"--augment: the function returned {type(value).__name__} for {name}: x and y must be tensors."
            )
    for tensor in tf.nest.flatten(result):
        if tensor.shape.rank == 0 or not tensor.shape[:1].is_compatible_with(seeds.shape[:1]):
            raise DataError(
                f"--augment: the function returned {tensor.shape} for {seeds.shape[0]} samples of {name}: x and y must"
                " keep a row for each sample."
            )
        if not tensor.shape[1:].is_fully_defined():
            raise DataError(
                f"--augment: the function lost the shape of {name} ({tensor.shape}): end it with tf.ensure_shape."
            )
    return (*result, *sample[2:])


def flip(x: tf.Tensor, y: tf.Tensor, seeds: tf.Tensor) -> tuple:
    """Mirrors half of the images, left to right, at random."""
    _check_images("flip", x, y)
    return tf.where(order.uniform(seeds, 0)[:, None, None, None] < 0.5, tf.reverse(x, [2]), x), y


def shift(x: tf.Tensor, y: tf.Tensor, seeds: tf.Tensor) -> tuple:
    """Moves each image by -1, 0 or 1 pixels both ways, filling with zeros. For digits, which must not be mirrored."""
    _check_images("shift", x, y)
    return _pad_and_crop(x, seeds, 1), y


def flip_crop(x: tf.Tensor, y: tf.Tensor, seeds: tf.Tensor) -> tuple:
    """Mirrors, pads with 4 zeros and crops to the old size, as usual for CIFAR (He et al. 2015, arXiv:1512.03385)."""
    _check_images("flip_crop", x, y)
    x, _ = flip(x, y, seeds)
    return _pad_and_crop(x, seeds, 4), y


def random_resized_crop(x: tf.Tensor, y: tf.Tensor, seeds: tf.Tensor) -> tuple:
    """A crop of 8 to 100 % of the area and aspect ratio 3/4 to 4/3, resized to the old size, mirrored half of the time.

    The usual augmentation for ImageNet (Szegedy et al. 2014, arXiv:1409.4842). Images that are stored larger than they
    are used are cropped while decoding instead (`Split.fetch_cropped`), but not those of a stream. Returns float32.
    """
    _check_images("random_resized_crop", x, y)
    height, width = known_dims(x.shape[1:])[:2]
    area = 0.08 + 0.92 * order.uniform(seeds, 1)
    root_aspect = tf.exp((order.uniform(seeds, 2) - 0.5) * math.log(4 / 3))  # sqrt of the width-to-height ratio
    scale_y = tf.minimum(tf.sqrt(area * width / height) / root_aspect, 1.0)
    scale_x = tf.minimum(tf.sqrt(area * height / width) * root_aspect, 1.0)
    top = order.uniform(seeds, 3) * (1.0 - scale_y)
    left = order.uniform(seeds, 4) * (1.0 - scale_x)
    boxes = tf.stack([top, left, top + scale_y, left + scale_x], axis=1)
    x = tf.image.crop_and_resize(x, boxes, tf.range(tf.shape(x)[0]), [height, width])
    return flip(x, y, seeds)


def _pad_and_crop(x: tf.Tensor, seeds: tf.Tensor, pad: int) -> tf.Tensor:
    """Moves each image by -pad..pad pixels: gathers rows, then columns, of the padded images."""
    height, width = x.shape[1], x.shape[2]
    padded = tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
    rows = order.uniform_int(seeds, 5, 2 * pad + 1)[:, None] + tf.range(height)
    columns = order.uniform_int(seeds, 6, 2 * pad + 1)[:, None] + tf.range(width)
    return tf.gather(tf.gather(padded, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)


def _check_images(name: str, x: tf.Tensor, y: Any) -> None:
    if not isinstance(x, tf.Tensor) or x.shape.rank != 4:
        raise DataError(
            f"--augment={name} is for batches of images [n, height, width, channels], not for "
            f"{getattr(x, 'shape', type(x).__name__)}: use --augment=none."
        )
    for target in tf.nest.flatten(y):
        if isinstance(target, tf.Tensor) and target.shape.rank and is_spatial(target.shape[1:]):
            raise DataError(
                f"--augment={name} moves what x shows, but not what y says of it (shape {target.shape[1:]} a sample):"
                " write an augmentation of your own that moves both, or x alone (tfdist/data/augment.py)."
            )
