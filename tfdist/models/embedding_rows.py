"""Makes Embedding layers read single rows of their tables.

Keras' Embedding reads its whole table and then gathers from it. That costs nothing as long as nobody changes single
rows of the variable. But once somebody has, as plain SGD does with the gradient of a table, TensorFlow copies the table
at every such read: 128 MB in each step for 2,000,000 rows of 16. With --precision the whole table is cast as well.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, keras_variables
from tfdist.compat.tensorflow_replicas import of_this_replica
from tfdist.models import missing_rows


def read_rows(model: keras.Model) -> None:
    """Makes every Embedding of the model, at any depth, read only the rows that it looks up.

    The results are the same bits.
    """
    for layer in keras_layers.all_layers(model):
        if type(layer) is keras.layers.Embedding and not layer.lora_enabled and layer.quantization_mode is None:
            _read_rows(layer)


def _read_rows(layer: Any) -> None:
    whole = layer.call

    def call(inputs: tf.Tensor) -> tf.Tensor:
        if not isinstance(inputs, tf.Tensor):  # sparse, ragged
            return whole(inputs)
        rows = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        rows = missing_rows.from_the_front(rows, layer.input_dim)
        table = of_this_replica(keras_variables.value_without_autocast(layer.embeddings))
        return tf.cast(tf.gather(table, rows), layer.compute_dtype)

    layer.call = call
