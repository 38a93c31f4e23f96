"""Losses that a model adds in its forward pass over own rows: finds out by trials whether each is a mean or a sum over
rows, and whether it has values for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError
from tfdist.control.user_errors import first_line
from tfdist.keras_fit.example_batch import ExampleBatch, taking
from tfdist.runtime.base import PeerRuntime
from tfdist.training.row_checks.added_losses import added_losses
from tfdist.training.row_checks.model_probe import LossKey, Values
from tfdist.training.row_checks.reductions import Reduction
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.trial_scope import generators_kept


def recorded(layers: Sequence[keras.Layer]) -> dict[LossKey, tf.Tensor]:
    """The losses that are recorded after a forward pass."""
    return {
        LossKey(number, place): loss
        for number, layer in enumerate(layers)
        for place, loss in enumerate(keras_layers.recorded_losses(layer))
    }


class Combination(NamedTuple):
    """How the loss of all rows is made of the losses of each worker's rows."""

    reduction: Reduction  # MEAN or SUM
    values: Values  # ROWS: those of all rows, one after the other; ELSEWHERE: their sum


class Combinations:
    """How to combine the losses of one model, found by trying it with an example."""

    def __init__(self, model: keras.Model, runtime: PeerRuntime, example: ExampleBatch):
        self._model, self._runtime, self._example = model, runtime, example
        self._known: dict[bool, dict[LossKey, Combination]] = {True: {}, False: {}}  # in training, and in evaluation

    def of(
        self, keys: Sequence[LossKey], args: tuple, kwargs: dict, cut: Sequence[bool], training: bool
    ) -> dict[LossKey, Combination]:
        """How to combine each loss that a call with these arguments has recorded.

        cut: for each tensor with rows among the arguments, whether they are those of the batch.

        Raises ConfigError for a loss that is neither a mean nor a sum over rows.
        """
        known = self._known[training]
        if any(key not in known for key in keys):
            known.update(self._tried(args, kwargs, cut, training))
        for key in keys:
            if key not in known:
                layer = keras_layers.all_layers(self._model)[key.layer]
                raise ConfigError(
                    f"The loss number {key.place + 1} that layer {layer.name} adds is not always present, so it is"
                    " unknown whether it is a mean or a sum over rows: add it in every call, or train in one process."
                )
        return {key: known[key] for key in keys}

    def _tried(self, args: tuple, kwargs: dict, cut: Sequence[bool], training: bool) -> dict[LossKey, Combination]:
        if len(args) != 1 or any(isinstance(leaf, tf.Tensor) for name, leaf in kwargs.items() if name != "training"):
            raise ConfigError(
                f"{type(self._model).__name__} adds losses in its call and is called with several arguments, so that"
                " tfdist cannot find out whether they are means or sums over rows: give it one structure of tensors,"
                " or add the losses in compute_loss."
            )
        with tf.init_scope(), generators_kept():
            x = self._example.like(args[0], cut)
            found = self._probed(x, cut, training)
            found = self._runtime.broadcast_object(found, "added losses")  # random losses could give different results
        if isinstance(found, str):
            raise keras_layers.keep_message(ConfigError(found))
        return {
            LossKey(number, place): Combination(Reduction(how), Values(which)) for number, place, how, which in found
        }

    def _probed(self, x: Any, cut: Sequence[bool], training: bool) -> list | str:
        """For each loss [number of a layer, which of its losses, MEAN or SUM, its `Values`]; or a
        sentence that says why this is unknown."""
        take, count = taking(x, cut)
        try:
            layers = keras_layers.all_layers(self._model)
            size = self._runtime.size
            many = self._example.rows(count, count * size)  # x may be this worker's rows only
            proofs = Proofs(self._model, many, -(-many // size))
            found = added_losses(self._model, x, take, count, proofs, "train in one process", training)
            return [[layers.index(one.layer), one.place, one.reduction.value, one.values.value] for one in found]
        except ConfigError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - for example from a model for batches of one size
            return (
                f"{type(self._model).__name__} adds losses in its call, and tfdist could not try it on a few rows"
                f" to find out whether they are means or sums over rows ({type(error).__name__}:"
                f" {first_line(error)[:200]}): add the losses in compute_loss, or train"
                " in one process."
            )
