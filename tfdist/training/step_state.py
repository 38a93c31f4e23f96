"""What a step sets and draws beside the state of the run: no snapshot holds it, so that a run that is resumed would
compute something else, and nothing would tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import metrics_held
from tfdist.compat import tensorflow_graphs
from tfdist.compat.keras_variables import stored_value
from tfdist.control.exit_codes import ConfigError

# How TensorFlow shows the handle of a variable, whose name it numbers.
_VARIABLE = re.compile(r'ResourceHandle\(name="([^"]*?)(?:/\d+)?",.* type="tensorflow::Var"')
_OF_THE_PROCESS = "tfdist_"  # with this begin names of variables that are not of the run
_OF_A_GENERATOR = re.compile("Rng|Stateful")  # those that draw from a tf.random.Generator, whose state is a variable


def check(model: keras.Model, known: Iterable[Any], deterministic: bool) -> list[str]:
    """Looks at a step, at the end of the function that is traced. Returns sentences for the user about numbers that are
    others in a run that is resumed.

    known: the variables that are saved, or made anew in each step.
    Raises ConfigError if the step sets another one, or a table; `deterministic` (such runs repeat, bit for bit): also
    for such numbers.
    """
    graph = tf.compat.v1.get_default_graph()
    kinds = tensorflow_graphs.kinds_of_operations(graph)[0]
    of_metrics = [variable for metric in metrics_held(model) for variable in metric.variables]
    _check_set(graph, kinds, [*known, *of_metrics])
    return _of_draws(kinds, deterministic)


def _check_set(graph: tf.Graph, kinds: set[str], known: Iterable[Any]) -> None:
    handles = {id(handle) for variable in known for handle in _handles(variable)}
    lost = [handle for handle in tensorflow_graphs.written_from_outside(graph) if id(handle) not in handles]
    shown = [found[1] for found in map(_VARIABLE.search, map(str, lost)) if found]
    names = [f"the variable {name!r}" for name in shown if not name.startswith(_OF_THE_PROCESS)]
    if any(kind.startswith("LookupTable") and tensorflow_graphs.sets_state(kind) for kind in kinds):
        names.append("a lookup table")
    if names:
        raise ConfigError(
            f"Each step sets {names[0]}, which was not found in the model before it (it is of a module, a class or an"
            " --objective, or made while a layer is called), so that no snapshot holds it, and a run that is resumed"
            " would compute something else: make it an attribute of a layer of your own, in its constructor or its"
            " build, best with self.add_weight(trainable=False)."
        )


def _of_draws(kinds: set[str], deterministic: bool) -> list[str]:
    drawing = sorted(kind for kind in kinds if tensorflow_graphs.draws_anew(kind) and not _OF_A_GENERATOR.match(kind))
    if not drawing:
        return []
    what = f"draws by tf.random ({', '.join(drawing)}), whose numbers no snapshot holds"
    fix = "draw by keras.random, as keras.random.normal(shape) for tf.random.normal(shape)"
    if deterministic:
        raise ConfigError(f"--deterministic promises that runs which are resumed repeat, but the step {what}: {fix}.")
    return [f"The step {what}: a run that is resumed draws others than one that is not. If that matters, {fix}."]


def _handles(variable: Any) -> list[tf.Tensor]:
    """Of one of TensorFlow's or Keras', those of all its copies here; none of one that lies in shards."""
    value = stored_value(variable) if isinstance(variable, keras.Variable) else variable
    return [] if value is None else [each.handle for each in getattr(value, "values", [value])]
