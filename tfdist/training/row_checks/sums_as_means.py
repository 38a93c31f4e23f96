"""Turns each sum over rows that a layer adds as a loss into a mean, at the place where it is added: multiplies a sum
over n of N rows by N / n. So all later code, for example recomputation and pipelines, deals with means only.
added_losses.py has found out which losses are sums.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError
from tfdist.training.dtypes import at_least_float32
from tfdist.training.row_checks.model_probe import Values
from tfdist.training.row_checks.reductions import SUM, Reduction


@dataclass(frozen=True)
class AddedLoss:
    """One loss that a layer adds: an entry of `model.losses`, without the weight regularizers that follow these."""

    layer: keras.Layer
    place: int  # number among the layer's losses, in the order in which a call of the model adds them
    reduction: Reduction  # MEAN (also for a loss that does not depend on rows) or SUM
    values: Values = Values.AS_MANY  # of which the loss is the sum


class SumsAsMeans:
    """Makes layers, within `counting`, multiply each SUM by (rows of the whole batch) / (rows of the part with which
    the model is called).
    """

    def __init__(self, added: Sequence[AddedLoss], unknown: Sequence[keras.Layer] = (), reason: str = ""):
        """unknown: layers about which nothing could be found out, for a `reason`; a loss that one of these adds raises
        ConfigError.
        """
        self._now = threading.local()  # replicas of one process are threads
        of_layer: dict[int, tuple[keras.Layer, list[Reduction]]] = {}
        for one in added:
            of_layer.setdefault(id(one.layer), (one.layer, []))[1].append(one.reduction)
        for layer, reductions in of_layer.values():
            if SUM in reductions:
                layer.add_loss = self._counting(layer.add_loss, id(layer), reductions)
        for layer in unknown:
            layer.add_loss = self._refusing(layer.add_loss, layer.name, reason)

    @contextlib.contextmanager
    def counting(self, factor: tf.Tensor | float) -> Iterator[None]:
        """Context manager for forward passes of the model and their backward passes, which may repeat the forward
        passes. factor: N / n."""
        self._now.factor, self._now.places = factor, {}
        try:
            yield
        finally:
            self._now.factor = None

    def _counting(self, plain: Callable, layer: int, reductions: Sequence[Reduction]) -> Callable:
        def add_loss(loss: Any) -> None:
            factor = getattr(self._now, "factor", None)
            if factor is None:
                plain(loss)
                return
            for term in map(at_least_float32, keras.tree.flatten(loss)):  # otherwise the product could overflow
                place = self._now.places.get(layer, 0)
                self._now.places[layer] = (place + 1) % len(reductions)  # every call of the model adds equally many
                plain(term * tf.cast(factor, term.dtype) if reductions[place] == SUM else term)

        return add_loss

    def _refusing(self, plain: Callable, name: str, reason: str) -> Callable:
        def add_loss(loss: Any) -> None:
            if getattr(self._now, "factor", None) is not None:
                sentence = (
                    f"Layer {name} adds a loss, but whether that is a mean or a sum over rows could not be determined"
                    f" with batches of 1 and 4 rows ({reason}): let the model take batches of any size, or train with"
                    " one replica and --accumulation=1."
                )
                raise keras_layers.keep_message(ConfigError(sentence))
            plain(loss)

        return add_loss
