"""What the backup of a plain fit holds beside the layers: the state of losses, metrics and optimizers that Keras does
not know of.

An optimizer may be built in its first step, and for a part of the model. A new process has to build it for the same
part before its state is restored, so the backup says for which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.artifacts import backup_checks
from tfdist.artifacts.hidden_state import (
    compiled_optimizers,
    hidden_state,
    other_optimizers,
    state_of_losses,
    state_of_optimizers,
    state_of_other_optimizers,
    variables_of_model,
)
from tfdist.artifacts.state import name_of, tf_variable
from tfdist.compat import keras_optimizers, keras_trainer
from tfdist.compat.code_origin import is_of_keras
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say

_BUILT_FOR = "built_for"  # of each compiled optimizer: the indices of its variables among the model's; None: not built
_IDLE = "idle"  # places of other optimizers whose state the backup lacks


class OptimizerBackup:
    """The state beside the layers, and which of it a backup holds. Make it when training begins."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._losses = state_of_losses(model, hidden_state(model))
        self._others = state_of_other_optimizers(model)
        self._at_first = [*variables_of_model(model), *(one for each in self._others for one in each)]
        self._built_at_first = {id(each) for each in compiled_optimizers(model) if each.built}
        # An inner model that was loaded from a file brings its optimizer, which this fit may never use. Those of the
        # user's own classes need not count their steps.
        inside = set(map(id, keras_trainer.compiled_inside(model)))
        self._may_be_idle = {
            place: self._counts(place)
            for place, each in enumerate(other_optimizers(model))
            if id(each) in inside and is_of_keras(each)
        }

    def begin_from(self, backup: str, manifest: Mapping[str, Any]) -> list[int]:
        """Builds the compiled optimizers as they were when the backup was written. Returns the places of the other
        optimizers that it leaves out."""
        weights = self._model.weights
        optimizers = compiled_optimizers(self._model)
        everything = _places(self._model.trainable_variables, weights)
        # An earlier version did not write it.
        built_for = manifest.get(_BUILT_FOR, [everything] * len(optimizers))
        if type(self._model).train_step is keras.Model.train_step:  # builds it so, whatever is frozen by now
            built_for = [everything, *built_for[1:]]
        for each, places in zip(optimizers, built_for, strict=False):
            # With another model, the check of its variables says so.
            if places is not None and not each.built and all(place < len(weights) for place in places):
                each.build([weights[place] for place in places])
        idle = manifest.get(_IDLE)
        if idle is None:
            idle = [place for place, variables in enumerate(self._others) if variables]
            if idle:
                say(
                    f"{backup} was written by a version that saved the compiled optimizer only: the other optimizers"
                    f" of {type(self._model).__name__} ({len(idle)}) keep the values that they have now."
                )
        self._may_be_idle = {place: counts for place, counts in self._may_be_idle.items() if place in idle}
        return idle

    def idle(self) -> list[int]:
        """The places of the other optimizers that nobody has used."""
        return [place for place, counts in self._may_be_idle.items() if self._counts(place) == counts]

    def _counts(self, place: int) -> list[bytes]:
        """Steps, learning rate and the like: they tell whether an optimizer is used."""
        return [each.numpy().tobytes() for each in self._others[place] if each.shape.rank == 0]

    def variables(self, left_out: Sequence[int]) -> dict[str, Any]:
        """key -> variable. left_out: places of other optimizers."""
        known = set(map(id, self._losses))
        compiled = [each for each in state_of_optimizers(self._model) if id(each) not in known]
        others = [each for each in enumerate(self._others) if each[0] not in left_out]
        return {
            **{f"beside/{index:04d}": variable for index, variable in enumerate([*self._losses, *compiled])},
            **{f"other/{place:02d}/{index:04d}": one for place, each in others for index, one in enumerate(each)},
        }

    def fields(self) -> dict[str, Any]:
        """What the manifest says about them."""
        weights, optimizers = self._model.weights, compiled_optimizers(self._model)
        everything = self._model.trainable_variables  # if its own `build` does not note for what it is
        built_for = [
            _places(keras_optimizers.built_for(each) or everything, weights) if each.built else None
            for each in optimizers
        ]
        return {_BUILT_FOR: built_for, _IDLE: self.idle()}

    def refuse_what_cannot_be_restored(self) -> None:
        """Raises ConfigError if the fit has made variables that a new process could not make before its first step."""
        backup_checks.refuse_later_variables(self._model, [*self._at_first, *state_of_optimizers(self._model)])
        weights = self._model.weights
        for each in compiled_optimizers(self._model):
            if each.built and id(each) not in self._built_at_first:
                variables = keras_optimizers.built_for(each)
                if _places(variables, weights) is None:
                    raise ConfigError(
                        f"The optimizer {type(each).__name__} was built after fit had begun, for variables of which"
                        f" the model has only some ({', '.join(map(name_of, variables))}), so that a"
                        " resumed fit could not restore it: build it before fit (by its build(variables)), or train"
                        " without BackupAndRestore."
                    )


def _places(variables: Sequence[Any], weights: Sequence[keras.Variable]) -> list[int] | None:
    """The indices of the variables (of Keras or TensorFlow) among the weights; None if one is not among them."""
    places = {id(tf_variable(each)): place for place, each in enumerate(weights)}
    keys = [id(tf_variable(each)) for each in variables]
    return [places[key] for key in keys] if all(key in places for key in keys) else None
