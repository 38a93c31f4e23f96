"""Decodes stored images (JPEG, PNG, GIF, BMP) to one size: center crop for evaluation, random crop for training.

Both functions return float32 [n, size, size, channels] in 0..1 and decode single images, in parallel within the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

CENTER = 0.875  # part of the shorter side that the center crop keeps: 224 of 256 for ImageNet


def decode(encoded: tf.Tensor, size: int, channels: int) -> tf.Tensor:
    """string [n] -> images: the shorter side is resized to size / CENTER, the central square of `size` is kept."""

    def one(data: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(data, channels, expand_animations=False)
        shape = tf.cast(tf.shape(image)[:2], tf.float32)
        crop = tf.cast(tf.round(tf.reduce_min(shape) * CENTER), tf.int32)
        top, left = tf.unstack((tf.shape(image)[:2] - crop) // 2)
        return _resized(image[top : top + crop, left : left + crop], size, channels)

    return _each(one, encoded, size, channels)


def decode_cropped(encoded: tf.Tensor, seeds: tf.Tensor, size: int, channels: int) -> tf.Tensor:
    """string [n], int32 [n, 2] -> images: a random crop of 8 to 100 % of the area, aspect 3/4 to 4/3, half of them
    mirrored.

    Szegedy et al. 2014, arXiv:1409.4842. Only the crop of a JPEG is decoded.
    """

    def one(args: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        data, seed = args

        def jpeg() -> tf.Tensor:
            return tf.io.decode_and_crop_jpeg(data, _crop_box(tf.io.extract_jpeg_shape(data), seed), channels)

        def other() -> tf.Tensor:
            image = tf.io.decode_image(data, channels, expand_animations=False)
            top, left, height, width = tf.unstack(_crop_box(tf.shape(image), seed))
            return image[top : top + height, left : left + width]

        image = tf.cond(tf.io.is_jpeg(data), jpeg, other)
        return tf.image.stateless_random_flip_left_right(_resized(image, size, channels), seed + 1)

    return _each(one, (encoded, seeds), size, channels)


def _crop_box(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """int32 [4]: top, left, height, width."""
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seed,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], extent[:2]], 0)


def _resized(image: tf.Tensor, size: int, channels: int) -> tf.Tensor:
    image = tf.ensure_shape(tf.image.resize(image, [size, size]), [size, size, channels])
    return image / 255.0


def _each(one: Callable, elements: tf.Tensor | tuple, size: int, channels: int) -> tf.Tensor:
    return tf.map_fn(one, elements, fn_output_signature=tf.TensorSpec([size, size, channels], tf.float32))
