"""Gives Keras' BatchNormalization other moments than its own."""

from __future__ import annotations

from collections.abc import Callable

import keras
from keras.src.backend.tensorflow import nn

from tfdist.control.exit_codes import UnsupportedError

MOMENTS = "_moments"  # the method (layer, inputs, mask) -> (mean, variance) that a layer or the class may have replaced
Moments = Callable[..., tuple]

_of_keras: Moments | None = getattr(keras.layers.BatchNormalization, MOMENTS, None)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """All axes but the one of the channels. Relies on `BatchNormalization._reduction_axes`; without it moments over
    several workers cannot be taken.
    """
    axes = layer._reduction_axes
    assert axes is not None, "the layer is built"
    return axes


def takes_keras_moments(layer: keras.Layer) -> bool:
    """Whether it is a BatchNormalization with Keras' own moments, or those that have been put in their place. Relies on
    `BatchNormalization._moments`; without it what derives from the layer is said to mix rows.
    """
    moments = getattr(keras.layers.BatchNormalization, MOMENTS, None)
    return isinstance(layer, keras.layers.BatchNormalization) and getattr(type(layer), MOMENTS, None) is moments


def moving_moments(layer: keras.layers.BatchNormalization, dtype: str) -> tuple:
    """(mean, variance), those that it takes in inference, in the place of a batch's."""
    return keras.ops.cast(layer.moving_mean, dtype), keras.ops.cast(layer.moving_variance, dtype)


def replace_moments(with_mask: Callable[[Moments], Moments], synchronized: Moments) -> None:
    """Makes every BatchNormalization of the process take its moments from `with_mask(Keras' own method)`; what Keras
    itself asks for, if `synchronized=True` and there is no mask, is `synchronized(x, axes, keepdims)`.

    Relies on `BatchNormalization._moments`, and on keras.src's `_compute_moments_sync`, which it calls. Raises
    UnsupportedError if one is gone: statistics would silently come from one worker alone.
    """
    if not hasattr(nn, "_compute_moments_sync") or _of_keras is None:
        raise UnsupportedError(
            f"Keras {keras.__version__} synchronises BatchNormalization in an unknown way: install keras~=3.15."
        )
    nn._compute_moments_sync = synchronized
    keras.layers.BatchNormalization._moments = with_mask(_of_keras)
