"""Variables that a fit sets and that nobody knows of: of a module, a class, or made while a layer is called. A backup
does not hold them, and where the forward pass of a worker's own rows sets them, each worker has others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_state, metrics_held, variables_of_metrics
from tfdist.compat import keras_layers, keras_trainer, tensorflow_graphs
from tfdist.compat.keras_random import global_seed_generator
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.keras_fit.variables import of_model
from tfdist.runtime.scopes import ThreadScope
from tfdist.training import step_state

_KEPT_AS = "_tfdist_lost_state"  # on the model itself: a step that was traced is used again by a later fit
_GENERATOR = "StateVar"  # how TensorFlow names the state of a tf.random.Generator, which workers advance alike
_with_backup = ThreadScope()


@dataclasses.dataclass(frozen=True)
class _Found:
    """In the training step of a model that was compiled as `compiled` says."""

    compiled: Any
    lost: Sequence[str]
    drawn: str


@contextlib.contextmanager
def refused(model: keras.Model, is_chief: bool) -> Iterator[None]:
    """Inside, a training step of the model that sets what no backup holds is a ConfigError when it is traced; and at
    once, if it has been."""
    known = model.__dict__.get(_KEPT_AS)
    if known is not None and known.compiled is keras_trainer.compile_identity(model):
        _refuse(known)
    with _with_backup():
        yield
    known = model.__dict__.get(_KEPT_AS)
    if is_chief and known is not None and known.drawn:
        print(
            f"tfdist: the training step {known.drawn}: a fit that is resumed draws others than one that is not. If that"
            f" matters, {step_state.DRAW}.",
            file=sys.stderr,
            flush=True,
        )


def looked_for(model: keras.Model, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The model's training step, which tells what it sets and draws when it is traced."""

    @tf.autograph.experimental.do_not_convert
    def step(data: Any) -> Any:
        logs = train_step(data)
        look(model)
        return logs

    return functools.update_wrapper(step, train_step)


def look(model: keras.Model) -> None:
    """At the end of a training step that is traced. Raises ConfigError, see `refused`."""
    if not _is_of_a_function():
        return
    of_optimizers = [variable for each in keras_trainer.optimizers_of(model) for variable in each.variables]
    metrics = [*model.metrics, *metrics_held(model), *keras_trainer.compiled_metrics(model)]
    without_one = global_seed_generator()
    drawn = [] if without_one is None else [without_one.state]
    kinds = step_state.kinds_here()
    known = [*of_model(model), *of_optimizers, *variables_of_metrics(metrics), *drawn]
    found = _Found(keras_trainer.compile_identity(model), step_state.lost(kinds, known), step_state.drawn(kinds))
    object.__setattr__(model, _KEPT_AS, found)
    if _with_backup.is_here:
        _refuse(found)


def _refuse(found: _Found) -> None:
    if found.lost:
        raise ConfigError(
            f"Each step of this fit sets {found.lost[0]}, which was not found in the model (it is of a module or a"
            " class, or made while a layer is called), so that BackupAndRestore does not hold it, and a fit that is"
            f" resumed would compute something else: {step_state.MEND}, or train without BackupAndRestore."
        )


@contextlib.contextmanager
def refused_in_own_rows(models: Sequence[keras.Model], random_numbers: RandomNumbers) -> Iterator[None]:
    """Around the forward pass of a worker's own rows: that it sets a variable which none of the models holds is a
    ConfigError when it is traced."""
    if not _is_of_a_function():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = {id(handle) for handle in tensorflow_graphs.written_from_outside(graph)}
    yield
    written = [each for each in tensorflow_graphs.written_from_outside(graph) if id(each) not in before]
    if not written:
        return
    known = [variable for model in models for variable in (*model.variables, *hidden_state(model))]
    of_metrics = [one for model in models for one in variables_of_metrics(metrics_held(model))]
    unknown = step_state.unknown_of(written, [*known, *of_metrics, *random_numbers.states])
    if names := [name for name in step_state.names_of(unknown) if name != _GENERATOR]:
        raise keras_layers.keep_message(
            ConfigError(
                f"The model sets the variable {names[0]!r} when it is called, which was not found in it (it is of a"
                " module or a class, or made while a layer is called), so that each worker would have another value"
                f" there, of its own rows: {step_state.MEND}."
            )
        )


def _is_of_a_function() -> bool:
    """Whether a tf.function is traced, and not some other graph of TensorFlow's."""
    return not tf.executing_eagerly() and hasattr(tf.compat.v1.get_default_graph(), "captures")
