"""Plain values among the attributes of a model, its layers and its losses (`self.beta = 0.5`), for the backup of a fit.

A callback may change them (KL annealing). A step that runs eagerly computes with the present value, so the backup must
hold it. A compiled step computes with the value that it was traced with, which no backup can restore.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.artifacts import backup_file, callback_values
from tfdist.compat import keras_layers

Values = list[dict[str, Any]]  # for each holder: name of an attribute -> value
Changed = Mapping[str, Mapping[str, Any]]  # place of a holder -> name of an attribute -> value

_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_OF_KERAS = ("stop_training", "stop_evaluating", "stop_predicting", "built", "compiled")  # set by Keras' own loops


def values_of(model: keras.Model) -> Values:
    """The plain public attributes of the model, of all of its layers and of its losses."""
    return [
        {
            name: callback_values.to_plain(value)
            for name, value in vars(holder).items()
            if not name.startswith("_") and name not in _OF_KERAS and _is_plain(value)
        }
        for holder in _holders(model)
    ]


def changed(now: Values, first: Values, known: Collection[tuple[str, str]] = frozenset()) -> dict[str, dict[str, Any]]:
    """Returns the attributes whose value is another one, by the place of their holder. Those that are plain for the
    first time count, those that no longer are do not (`train_function`). known: those that count whatever their value
    is, as `keys` returns them."""
    found = {}
    for place, (values, before) in enumerate(zip(now, first, strict=False)):
        others = {
            name: value
            for name, value in values.items()
            if (str(place), name) in known or repr(value) != repr(before.get(name))
        }
        if others:
            found[str(place)] = others
    return found


def keys(values: Changed) -> set[tuple[str, str]]:
    """(place of the holder, name) of the attributes from `changed`."""
    return {(place, name) for place, held in values.items() for name in held}


def those(values: Values, wanted: Collection[tuple[str, str]]) -> Changed:
    """The values of the wanted attributes, which are as `keys` returns them; those that are missing are left out."""
    return {
        str(place): {name: value for name, value in held.items() if (str(place), name) in wanted}
        for place, held in enumerate(values)
    }


def names(model: keras.Model, values: Changed) -> list[str]:
    """The names of attributes from `changed`, for messages."""
    holders = _holders(model)
    return [f"{type(holders[int(place)]).__name__}.{name}" for place, held in values.items() for name in held]


def restore(model: keras.Model, values: Changed) -> None:
    """Sets the attributes that `changed` returned. Holders that this model does not have are left out."""
    holders = _holders(model)
    for place, held in values.items():
        if int(place) < len(holders):
            for name, value in held.items():
                present = getattr(holders[int(place)], name, None)
                setattr(holders[int(place)], name, callback_values.from_plain(present, value))


def _holders(model: keras.Model) -> Sequence[Any]:
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if isinstance(loss, keras.Loss)]
    return [*keras_layers.all_layers(model), *losses]


def _is_plain(value: Any) -> bool:
    return value is None or (isinstance(value, _PLAIN) and backup_file.is_storable(callback_values.to_plain(value)))
