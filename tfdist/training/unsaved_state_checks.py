"""Finds variables that a step sets, and random numbers that it draws, outside the state of the run. No snapshot holds
them, so a resumed run would silently compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import metrics_held, variables_of_metrics
from tfdist.compat import tensorflow_graphs, tensorflow_xla
from tfdist.compat.keras_layers import keep_message
from tfdist.compat.keras_variables import stored_value
from tfdist.control.exit_codes import ConfigError

# How TensorFlow prints the handle of a variable; it adds a number to the name.
_VARIABLE = re.compile(r'ResourceHandle\(name="([^"]*?)(?:/\d+)?",.* type="tensorflow::Var"')
_OF_THE_PROCESS = "tfdist_"  # the names of variables that are not part of the run's state begin with this
MEND = (
    "make it an attribute of a layer of your own, in its constructor or its build, best with"
    " self.add_weight(trainable=False)"
)
DRAW = "draw with keras.random, as keras.random.normal(shape) instead of tf.random.normal(shape)"
_OF_A_GENERATOR = re.compile("Rng|Stateful")  # operations of a tf.random.Generator, whose state is a variable


def check(model: keras.Model, known: Iterable[Any], deterministic: bool) -> list[str]:
    """Checks a step, at the end of the function being traced. Returns messages for the user about random numbers that
    are different in a resumed run.

    known: the variables that are saved, or set afresh in each step.
    Raises ConfigError if the step sets any other variable, or a lookup table; if `deterministic` (such runs repeat, bit
    for bit), also for such random numbers.
    """
    kinds = kinds_here()
    if names := unsaved(kinds, [*known, *variables_of_metrics(metrics_held(model))]):
        raise ConfigError(
            f"Each step sets {names[0]}, which was not found in the model before it (it belongs to a module, a class or"
            " an --objective, or is created while a layer is called), so no snapshot contains it, and a resumed run"
            f" would compute something else: {MEND}."
        )
    if not (what := drawn(kinds)):
        return []
    if deterministic:
        raise ConfigError(f"--deterministic guarantees that resumed runs repeat, but the step {what}: {DRAW}.")
    return [f"The step {what}: a resumed run draws other numbers than an uninterrupted one. If that matters, {DRAW}."]


def check_on_servers(model: keras.Model, counter: tf.Variable) -> None:
    """Raises ConfigError if a step of a parameter-server worker sets variables before the update, or draws by
    tf.random: the same function is sent to all workers, and each would begin with the same numbers. counter: the
    counter of updates."""
    kinds = kinds_here()
    if names := unsaved(kinds, [counter, *variables_of_metrics(metrics_held(model))]):
        raise ConfigError(
            f"--strategy=parameter_server: each step sets {names[0]}, which a worker would set in its own copy only,"
            " not on the servers: use another strategy, such as multi_worker, or keep it out of the step."
        )
    if what := drawn(kinds):
        raise ConfigError(f"--strategy=parameter_server: the step {what}, and every worker draws the same: {DRAW}.")


def check_compiled(otherwise: str) -> None:
    """Raises ConfigError if XLA compiles the function being traced and it draws by tf.random: XLA ignores seeds, and
    draws the same in every process. otherwise: how to do without XLA."""
    if tensorflow_xla.is_compiled_by_xla() and (what := drawn(kinds_here())):
        raise keep_message(
            ConfigError(
                f"XLA compiles the forward pass, which {what}, and would draw the same on every worker: {DRAW}, or"
                f" {otherwise}."
            )
        )


def kinds_here() -> set[str]:
    """Returns the operation types of the function being traced, so far."""
    return tensorflow_graphs.kinds_of_operations(tf.compat.v1.get_default_graph())[0]


def unsaved(kinds: set[str], known: Iterable[Any]) -> list[str]:
    """Returns, in words, the variables outside `known` and the tables that the function being traced sets so far."""
    written = tensorflow_graphs.written_from_outside(tf.compat.v1.get_default_graph())
    names = [f"the variable {name!r}" for name in names_of(unknown_of(written, known))]
    if any(kind.startswith("LookupTable") and tensorflow_graphs.sets_state(kind) for kind in kinds):
        names.append("a lookup table")
    return names


def unknown_of(handles: Iterable[tf.Tensor], known: Iterable[Any]) -> list[tf.Tensor]:
    """Returns the handles that belong to none of the variables `known`."""
    of_known = {id(handle) for variable in known for handle in _handles(variable)}
    return [handle for handle in handles if id(handle) not in of_known]


def names_of(handles: Iterable[tf.Tensor]) -> list[str]:
    """Returns the names of the handles that belong to variables of the run."""
    shown = [found[1] for found in map(_VARIABLE.search, map(str, handles)) if found]
    return [name for name in shown if not last_part(name).startswith(_OF_THE_PROCESS)]


def last_part(name: str) -> str:
    """Returns the last part of a variable's name, without the scopes in which it was made, such as a layer's."""
    return name.rpartition("/")[2]


def drawn(kinds: set[str]) -> str:
    """Returns a part of a sentence if the traced function draws random numbers whose generator state is not saved,
    else ""."""
    drawing = sorted(kind for kind in kinds if tensorflow_graphs.draws_anew(kind) and not _OF_A_GENERATOR.match(kind))
    return f"draws by tf.random ({', '.join(drawing)}), whose numbers no snapshot contains" if drawing else ""


def _handles(variable: Any) -> list[tf.Tensor]:
    """Returns the handles of a TensorFlow or Keras variable, of all its copies here; none for a sharded variable."""
    value = stored_value(variable) if isinstance(variable, keras.Variable) else variable
    return [] if value is None else [each.handle for each in getattr(value, "values", [value])]
