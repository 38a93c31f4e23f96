"""Variables that a fit sets but that no object of the model holds: those of a module or a class, or made while a layer
is called. A backup does not contain them, and if the forward pass over own rows sets them, they differ between workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import (
    hidden_state,
    metric_variables,
    metrics_held,
    variables_of_metrics,
    variables_of_model,
)
from tfdist.compat import keras_layers, keras_trainer, tensorflow_graphs
from tfdist.compat.kept_attributes import kept_on
from tfdist.compat.keras_random import states_beside
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say
from tfdist.keras_fit.loops import Loop
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.training import unsaved_state_checks

_GENERATOR = "StateVar"  # TensorFlow's name for the state of a tf.random.Generator, which workers advance alike
_LOOPS = (Loop.TRAIN, Loop.TEST)  # whose steps are checked


@dataclasses.dataclass(frozen=True)
class _Found:
    """What was found in a step."""

    unsaved: Sequence[str]
    drawn: str


class _Backup:
    """Checks of steps while a fit with a backup runs in this thread."""

    def __init__(self, model: keras.Model, tells: bool):
        self._tells, self._has_warned = tells, False
        # Variables that are made later cannot have been restored.
        self.held = {id(each) for each in variables_of_model(model)}

    def ask(self, found: _Found) -> None:
        """Raises ConfigError for state that the backup does not hold; logs once if a resumed fit would draw other
        numbers."""
        if found.unsaved:
            raise ConfigError(
                f"Each step of this fit sets {found.unsaved[0]}, which was found neither in the model nor in its losses"
                " and metrics before it (it belongs to a module or a class, or is created in the first step), so"
                " BackupAndRestore does not save it, and a resumed fit would compute something else: make it an"
                " attribute of the model, a layer, or the loss, in its constructor (build layers that only training"
                " uses before fit), or train without BackupAndRestore."
            )
        if found.drawn and self._tells and not self._has_warned:
            self._has_warned = True
            say(
                f"the step {found.drawn}: a resumed fit draws other numbers than an uninterrupted one. If that matters,"
                f" {unsaved_state_checks.DRAW}."
            )


_backups: list[_Backup] = []  # nested


def _findings(model: keras.Model) -> dict[str, _Found]:
    """The findings by step, kept while the model stays compiled as it is: a later fit uses a traced step again."""
    return kept_on(model, "_tfdist_unsaved_state", dict[str, _Found], keras_trainer.compile_identity(model))


@contextlib.contextmanager
def refused(model: keras.Model, is_chief: bool) -> Iterator[None]:
    """Context manager in which a step of the model that sets state outside the backup raises ConfigError when it is
    traced, or at once if it already has been."""
    backup = _Backup(model, is_chief)
    known = list(_findings(model).values())
    for found in known:
        backup.ask(found)
    _backups.append(backup)
    with contextlib.ExitStack() as stack:
        stack.callback(_backups.pop)
        if not known:  # functions that Keras has traced without us are not checked yet
            for loop in _LOOPS:
                if getattr(model, loop.function_name, None) is not None:
                    stack.enter_context(attribute_replaced(model, loop.function_name, None))
        yield


def looked_for(model: keras.Model, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a training or evaluation step of the model, to check what it sets and draws when it is traced."""

    @tf.autograph.experimental.do_not_convert
    def looking(data: Any) -> Any:
        logs = step(data)
        _look(model, step.__name__)
        return logs

    return functools.update_wrapper(looking, step)


def _look(model: keras.Model, step: str) -> None:
    """Checks a step at the end of its trace. Raises ConfigError, see `refused`."""
    if not _is_of_a_function():
        return
    backup = _backups[-1] if _backups else None
    of_optimizers = [variable for each in keras_trainer.optimizers_of(model) for variable in each.variables]
    held = variables_of_model(model)
    if backup is not None:
        held = [each for each in held if id(each) in backup.held]
    kinds = unsaved_state_checks.kinds_here()
    unsaved = unsaved_state_checks.unsaved(kinds, [*held, *of_optimizers, *metric_variables(model), *states_beside()])
    found = _findings(model)[step] = _Found(unsaved, unsaved_state_checks.drawn(kinds))
    if backup is not None:
        backup.ask(found)


@contextlib.contextmanager
def refused_in_own_rows(models: Set[keras.Model], random_numbers: RandomNumbers) -> Iterator[None]:
    """Context manager around the forward pass over own rows: setting a variable that none of the models holds raises
    ConfigError when the pass is traced."""
    if not _is_of_a_function():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = {id(handle) for handle in tensorflow_graphs.written_from_outside(graph)}
    yield
    written = [each for each in tensorflow_graphs.written_from_outside(graph) if id(each) not in before]
    unknown = unsaved_state_checks.unknown_of(written, (variable for model in models for variable in model.variables))
    if not unknown:  # the usual case: the rest needs a walk through all layers
        return
    hidden = [variable for model in models for variable in hidden_state(model)]
    of_metrics = [one for model in models for one in variables_of_metrics(metrics_held(model))]
    unknown = unsaved_state_checks.unknown_of(unknown, [*hidden, *of_metrics, *random_numbers.states])
    if names := [
        name for name in unsaved_state_checks.names_of(unknown) if unsaved_state_checks.last_part(name) != _GENERATOR
    ]:
        raise keras_layers.keep_message(
            ConfigError(
                f"The model sets the variable {names[0]!r} when it is called, which was not found in it (it belongs to"
                " a module or a class, or is created while a layer is called), so each worker would have its own value"
                f" there, from its own rows: {unsaved_state_checks.MEND}."
            )
        )


def _is_of_a_function() -> bool:
    """Whether a tf.function is being traced, and not some other graph of TensorFlow's."""
    return not tf.executing_eagerly() and hasattr(tf.compat.v1.get_default_graph(), "captures")
