"""The fraction of tokens' choices that a mixture of experts drops, as a metric beside those of the objective.

A layer whose name ends in `_router_dropped` passes on the part of each token's choices that found no place, [B, T, 1]
(models/experts.py). Its last input is recorded here, for the objective, which is called after the model.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.tensorflow_graphs import is_seen_from
from tfdist.training.objectives import Objective, Scores

METRIC = "dropped_fraction"


def with_dropped(objective: Objective, model: keras.Model) -> Objective:
    """Returns `objective` with the metric `dropped_fraction`: the dropped part of all tokens' choices of experts, as
    the mean over blocks. Returns the objective itself if the model has no experts."""
    noted: dict[str, tf.Tensor] = {}
    routers = [
        layer for layer in keras_layers.all_layers(model, include_self=False) if layer.name.endswith("_router_dropped")
    ]
    for layer in routers:
        _note(layer, noted)

    def with_metric(outputs: Any, y: Any, w: tf.Tensor) -> Scores:
        scores = objective(outputs, y, w)
        # If only specs are asked for, there are no values of this graph, but perhaps some of another graph.
        graph, count = scores.losses.graph, tf.shape(w)[0]  # an evaluation may have cut off padding: the last rows
        here = [_like(value[:count], scores.losses) for value in noted.values() if is_seen_from(value, graph)]
        dropped = tf.add_n(here) / len(here) if here else tf.zeros_like(scores.losses)
        return scores._replace(metrics={**scores.metrics, METRIC: dropped})

    return with_metric if routers else objective


def _note(layer: keras.Layer, noted: dict[str, tf.Tensor]) -> None:
    inner = layer.call

    def call(x: tf.Tensor) -> tf.Tensor:
        noted[layer.name] = x
        return inner(x)

    layer.call = call


def _like(dropped: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    """Brings [B, T, 1] to the shape of the losses, [B, T] or [B]."""
    return tf.reduce_mean(tf.reshape(dropped, tf.concat([tf.shape(losses), [-1]], 0)), -1)
