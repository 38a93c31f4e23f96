"""Models of the parity tests, given to tfdist as `tests.parity.models:NAME`.

No bias in front of a BatchNormalization: its exact gradient is 0, the computed one is rounding noise, and Adam turns
noise of any size into steps of full size. That would hide real differences behind a large bound.
"""

from __future__ import annotations

import keras


def conv_bn(num_outputs: int, dropout: float = 0.0) -> keras.Model:
    """Convolutions with synchronised BatchNormalization."""
    return keras.Sequential([
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Conv2D(16, 3, strides=2, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(num_outputs, kernel_regularizer=keras.regularizers.L2(1e-3), dtype="float32"),
    ])


def dense(num_outputs: int) -> keras.Model:
    """Two dense layers: no state, no noise."""
    return keras.Sequential([
        keras.layers.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(num_outputs, dtype="float32"),
    ])
