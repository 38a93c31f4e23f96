"""What a step sets and draws beside the state of the run: no snapshot holds it, so that a run that is resumed would
compute something else, and nothing would tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import metrics_held, variables_of_metrics
from tfdist.compat import tensorflow_graphs
from tfdist.compat.keras_variables import stored_value
from tfdist.control.exit_codes import ConfigError

# How TensorFlow shows the handle of a variable, whose name it numbers.
_VARIABLE = re.compile(r'ResourceHandle\(name="([^"]*?)(?:/\d+)?",.* type="tensorflow::Var"')
_OF_THE_PROCESS = "tfdist_"  # with this begin names of variables that are not of the run
MEND = (
    "make it an attribute of a layer of your own, in its constructor or its build, best with"
    " self.add_weight(trainable=False)"
)
DRAW = "draw by keras.random, as keras.random.normal(shape) for tf.random.normal(shape)"
_OF_A_GENERATOR = re.compile("Rng|Stateful")  # those that draw from a tf.random.Generator, whose state is a variable


def check(model: keras.Model, known: Iterable[Any], deterministic: bool) -> list[str]:
    """Looks at a step, at the end of the function that is traced. Returns sentences for the user about numbers that are
    others in a run that is resumed.

    known: the variables that are saved, or made anew in each step.
    Raises ConfigError if the step sets another one, or a table; `deterministic` (such runs repeat, bit for bit): also
    for such numbers.
    """
    kinds = kinds_here()
    if names := unsaved(kinds, [*known, *variables_of_metrics(metrics_held(model))]):
        raise ConfigError(
            f"Each step sets {names[0]}, which was not found in the model before it (it is of a module, a class or an"
            " --objective, or made while a layer is called), so that no snapshot holds it, and a run that is resumed"
            f" would compute something else: {MEND}."
        )
    if not (what := drawn(kinds)):
        return []
    if deterministic:
        raise ConfigError(f"--deterministic promises that runs which are resumed repeat, but the step {what}: {DRAW}.")
    return [f"The step {what}: a run that is resumed draws others than one that is not. If that matters, {DRAW}."]


def check_on_servers(model: keras.Model, counter: tf.Variable) -> None:
    """Checks what a worker of parameter servers sets in a step, before it updates anything; `counter`: of updates.
    Raises ConfigError."""
    if names := unsaved(kinds_here(), [counter, *variables_of_metrics(metrics_held(model))]):
        raise ConfigError(
            f"--strategy=parameter_server: each step sets {names[0]}, which a worker would set in its own copy only,"
            " not on the servers: use another strategy, such as multi_worker, or make it no part of the step."
        )


def kinds_here() -> set[str]:
    """The types of the operations of the function that is traced, so far."""
    return tensorflow_graphs.kinds_of_operations(tf.compat.v1.get_default_graph())[0]


def unsaved(kinds: set[str], known: Iterable[Any]) -> list[str]:
    """The variables and tables, in words, that the traced function sets so far beside the variables `known`."""
    written = tensorflow_graphs.written_from_outside(tf.compat.v1.get_default_graph())
    names = [f"the variable {name!r}" for name in names_of(unknown_of(written, known))]
    if any(kind.startswith("LookupTable") and tensorflow_graphs.sets_state(kind) for kind in kinds):
        names.append("a lookup table")
    return names


def unknown_of(handles: Iterable[tf.Tensor], known: Iterable[Any]) -> list[tf.Tensor]:
    """The handles that belong to none of the variables `known`."""
    of_known = {id(handle) for variable in known for handle in _handles(variable)}
    return [handle for handle in handles if id(handle) not in of_known]


def names_of(handles: Iterable[tf.Tensor]) -> list[str]:
    """The names of those handles that are of variables of the run."""
    shown = [found[1] for found in map(_VARIABLE.search, map(str, handles)) if found]
    return [name for name in shown if not last_part(name).startswith(_OF_THE_PROCESS)]


def last_part(name: str) -> str:
    """The last part of a variable's name, which begins with the scopes in which it was made, such as a layer's."""
    return name.rpartition("/")[2]


def drawn(kinds: set[str]) -> str:
    """A part of a sentence if the traced function draws random numbers whose generator state nothing saves, else ""."""
    drawing = sorted(kind for kind in kinds if tensorflow_graphs.draws_anew(kind) and not _OF_A_GENERATOR.match(kind))
    return f"draws by tf.random ({', '.join(drawing)}), whose numbers no snapshot holds" if drawing else ""


def _handles(variable: Any) -> list[tf.Tensor]:
    """The handles of a TensorFlow or Keras variable, of all its copies here; none of one that lies in shards."""
    value = stored_value(variable) if isinstance(variable, keras.Variable) else variable
    return [] if value is None else [each.handle for each in getattr(value, "values", [value])]
