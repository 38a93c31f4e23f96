"""Batch normalization of images in one operation, if its statistics are over this replica's own samples.

Keras 3 composes it of moments, a division and a multiplication, each of which reads the whole tensor. TensorFlow's
FusedBatchNormV3 (cuDNN's kernel on GPUs) reads it twice forward and once more backward, as tf.keras did.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_batch_norm, keras_layers

_LEAST_EPSILON = 1.001e-5  # on GPUs, which older versions of cuDNN required; Keras' ResNets have exactly this epsilon


def fuse_batch_norm(model: keras.Model) -> None:
    """Makes every BatchNormalization of the model over [B, H, W, C], at any depth, one operation in training. The
    results are the same up to rounding; evaluation and saved files do not change.

    Not for layers that sum over replicas. Layers whose variables are not float32, which the operation needs, stay.
    """
    for layer in _fusable(model):
        _fuse(layer)


def is_fused(model: keras.Model) -> bool:
    """Returns whether `fuse_batch_norm` has changed a layer of the model."""
    return any("call" in vars(layer) for layer in _fusable(model))


def _fusable(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    least = _LEAST_EPSILON if tf.config.list_logical_devices("GPU") else 0.0
    return [
        layer
        for layer in keras_layers.all_layers(model)
        if type(layer) is keras.layers.BatchNormalization
        and layer.built
        and layer.variable_dtype == "float32"
        and not layer.renorm
        and layer.epsilon >= least
        and keras_batch_norm.reduction_axes(layer) == [0, 1, 2]
    ]


def _fuse(layer: Any) -> None:
    composed = layer.call

    def call(inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        if (
            not training
            or not layer.trainable
            or mask is not None
            or not isinstance(inputs, tf.Tensor)
            or inputs.dtype == tf.float64
        ):
            return composed(inputs, training=training, mask=mask)
        channels = inputs.shape[-1]
        gamma = tf.convert_to_tensor(layer.gamma.value) if layer.scale else tf.ones([channels])
        beta = tf.convert_to_tensor(layer.beta.value) if layer.center else tf.zeros([channels])
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=gamma, offset=beta, mean=tf.zeros([0]), variance=tf.zeros([0]), epsilon=layer.epsilon
        )
        # The operation returns the variance with n - 1 as divisor; Keras averages the variance with divisor n.
        n = tf.cast(tf.size(inputs) // channels, tf.float32)
        variance *= (n - 1.0) / n
        for average, batch in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            average.assign(average * layer.momentum + batch * (1.0 - layer.momentum))
        return tf.cast(y, layer.compute_dtype)

    layer.call = call
