"""Replaces the moments with which Keras' BatchNormalization computes."""

from __future__ import annotations

from collections.abc import Callable

import keras
from keras.src.backend.tensorflow import nn

from tfdist.control.exit_codes import UnsupportedError

MOMENTS = "_moments"  # method (layer, inputs, mask) -> (mean, variance), which can be replaced in a layer or the class
Moments = Callable[..., tuple]

_of_keras: Moments | None = getattr(keras.layers.BatchNormalization, MOMENTS, None)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """All axes except the channels. Relies on `BatchNormalization._reduction_axes`; without it moments over several
    workers cannot be computed.
    """
    axes = layer._reduction_axes
    assert axes is not None, "the layer is built"
    return axes


def takes_keras_moments(layer: keras.Layer) -> bool:
    """Whether the layer is a BatchNormalization with Keras' own moments, or with those that `replace_moments` has
    installed. Relies on `BatchNormalization._moments`; without it the layer is reported to mix rows.
    """
    moments = getattr(keras.layers.BatchNormalization, MOMENTS, None)
    is_one = isinstance(layer, keras.layers.BatchNormalization)
    return is_one and moments is not None and getattr(type(layer), MOMENTS, None) is moments


def moving_moments(layer: keras.layers.BatchNormalization, dtype: str) -> tuple:
    """Returns the (mean, variance) that the layer uses in inference, in place of those of a batch."""
    return keras.ops.cast(layer.moving_mean, dtype), keras.ops.cast(layer.moving_variance, dtype)


def replace_moments(with_mask: Callable[[Moments], Moments], synchronized: Moments) -> None:
    """Makes every BatchNormalization of the process compute its moments with `with_mask(Keras' own method)`. Where
    Keras itself synchronizes (`synchronized=True` and no mask), it calls `synchronized(x, axes, keepdims)`.

    Relies on `BatchNormalization._moments`, and on keras.src's `_compute_moments_sync`, which it calls. Raises
    UnsupportedError if one of them is gone: statistics would silently come from one worker only.
    """
    if not hasattr(nn, "_compute_moments_sync") or _of_keras is None:
        raise UnsupportedError(
            f"Keras {keras.__version__} synchronizes BatchNormalization in an unknown way: install keras~=3.15."
        )
    nn._compute_moments_sync = synchronized
    keras.layers.BatchNormalization._moments = with_mask(_of_keras)
