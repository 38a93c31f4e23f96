"""The content of a snapshot: the variables of a run by key, their copies in host memory, and the host's own generators.

Keys are positions ("model/0003", "optimizer/0001", "train/step"), not names: Keras numbers layer names by what was
built earlier in the process. The names are stored in addition, for messages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_generators, hidden_variables
from tfdist.control.exit_codes import CheckpointError
from tfdist.runtime.base import Runtime
from tfdist.runtime.host import host_view
from tfdist.runtime.weight_check import Held, is_compared

Shape = list[int | None] | None  # with None for what is not fixed
Table = dict[str, tuple[str, Shape, str]]  # key -> (name, shape, dtype)
COMPARED = ("model/", "hidden/")  # keys of variables that are the same on all workers


def collect(model: keras.Model, optimizer: keras.Optimizer, train: Mapping[str, Any]) -> dict[str, Any]:
    """key -> variable: all of the model's (weights, moving statistics, seed generators), those in its layers that Keras
    does not know of, all of the optimizer's (slots, iterations, moving averages), and `train` (step, loss scale) under
    "train/"."""
    # model.variables includes the seed generators, which tf.train.Checkpoint(model=model) silently leaves out.
    return {
        **model_variables(model),
        **hidden(model),
        **{f"generator/{index:04d}": variable for index, variable in enumerate(hidden_generators(model))},
        **{f"optimizer/{index:04d}": variable for index, variable in enumerate(_once(optimizer.variables))},
        **{f"train/{name}": variable for name, variable in train.items()},
    }


def model_variables(model: keras.Model) -> dict[str, Any]:
    """key -> variable of the model alone."""
    return {f"model/{index:04d}": variable for index, variable in enumerate(_once(model.variables))}


def hidden(model: keras.Model) -> dict[str, Any]:
    """key -> variable in a layer of the model that Keras does not know of."""
    return {f"hidden/{index:04d}": variable for index, variable in enumerate(hidden_variables(model))}


class WholeState:
    """The state of a run in which every worker holds all of it. training/parallel/sharded_state.py is its counterpart
    for sharded state.
    """

    def __init__(self, variables: Mapping[str, Any]):
        self.variables = variables

    def table(self) -> Table:
        return table(self.variables)

    def to_host(
        self, wanted: bool = True, into: Mapping[str, np.ndarray] | None = None, only: str | tuple[str, ...] = ""
    ) -> dict[str, np.ndarray]:
        """key -> a copy in host memory, of keys that begin with `only` (a prefix or several); {} unless `wanted` here.

        into: an earlier result that is no longer needed.
        """
        return (
            to_host({key: variable for key, variable in self.variables.items() if key.startswith(only)}, into)
            if wanted
            else {}
        )

    def held(self) -> list[Held]:
        """The model's weights and states, for runtime/weight_check.py."""
        return [
            Held(name_of(variable), tf_variable(variable))
            for key, variable in self.variables.items()
            if key.startswith(COMPARED) and is_compared(variable)
        ]

    def first_of_stage(self) -> int:
        """The first rank that holds the same parts of the model: the chief."""
        return 0

    def check(self, stored: Mapping[str, tuple]) -> None:
        """Raises CheckpointError if a stored table does not fit."""
        check(self.table(), stored)

    def fitted(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Converts the stored arrays to the form that `assign` takes."""
        return arrays

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        assign(self.variables, arrays)


def to_host(variables: Mapping[str, Any], into: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """key -> a copy in host memory that later steps do not change. Call between steps.

    into: an earlier result whose memory is reused: most of the time of a copy goes to memory that is new to the
    process.
    """
    return {key: _copy(tf_variable(variable), (into or {}).get(key)) for key, variable in variables.items()}


def _copy(variable: tf.Variable, into: np.ndarray | None) -> np.ndarray:
    value = host_view(variable)
    if into is None or (into.shape, into.dtype) != (value.shape, value.dtype):
        return value.copy()
    np.copyto(into, value)
    return into


def assign(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Gives every variable its array. Raises CheckpointError, before anything is changed, if the two do not fit."""
    check_arrays(table(variables), arrays)
    for key, variable in variables.items():
        tf_variable(variable).assign(arrays[key])


# Parts of keys of the state of training/parallel/compression.py: errors not sent yet, and a basis for them.
CARRIED, BASIS = "compression_error_", "compression_basis_"


def _is_of_compression(key: str) -> bool:
    return CARRIED in key or BASIS in key


def carried_by_others(stored: Mapping[str, Any], described: Mapping[str, tuple]) -> set[str]:
    """The stored keys of a compression of gradients that are not in `described`."""
    return {key for key in stored if _is_of_compression(key) and key not in described}


def check_arrays(described: Mapping[str, tuple], arrays: Mapping[str, np.ndarray]) -> None:
    """Raises CheckpointError naming the first array that does not fit a table of variables."""
    check(described, {key: (array.shape, tf.as_dtype(array.dtype).name) for key, array in arrays.items()})


def check(described: Mapping[str, tuple], stored: Mapping[str, tuple]) -> None:
    """Compares a table of variables with the stored one, key -> (shape, dtype). A variable whose shape is not fixed
    takes whatever its shape allows.

    Raises CheckpointError naming the first mismatch.
    """
    missing, unexpected = sorted(set(described) - set(stored)), sorted(set(stored) - set(described))
    if (missing or unexpected) and all(map(_is_of_compression, (*missing, *unexpected))):
        here, there = ("none", "some") if unexpected else ("some", "none")
        raise CheckpointError(
            f"--compression carries errors of gradients from step to step: there are {there} in the checkpoint, and"
            f" {here} here. Use the --compression of the run that wrote it"
            + ("; --allow_config_change continues without them." if unexpected else ".")
        )
    if missing or unexpected:
        lacks = (
            f"lacks {len(missing)} variables of this run (for example {described[missing[0]][0]})" if missing else ""
        )
        more = f"has {len(unexpected)} that this run lacks (for example {unexpected[0]})" if unexpected else ""
        raise CheckpointError(
            f"The checkpoint is of another model or optimizer: it {' and '.join(filter(None, (lacks, more)))}. Use the"
            " model and optimizer of the run that wrote it, or another folder."
        )
    for key, (name, shape, dtype) in described.items():
        here, there = tf.TensorShape(shape), tf.TensorShape(stored[key][0])
        if not here.is_compatible_with(there) or stored[key][1] != dtype:
            raise CheckpointError(
                f"The checkpoint does not fit: {name} is {dtype} {here} here, {stored[key][1]} {there} there: use the"
                " model flags of the run that wrote it."
            )


def table(variables: Mapping[str, Any]) -> Table:
    """key -> (name, shape, dtype), for the manifest and for messages."""
    return {
        key: (name_of(variable), shape_of(variable), tf_variable(variable).dtype.name)
        for key, variable in variables.items()
    }


def shape_of(variable: Any) -> Shape:
    """The shape with which a variable was made. It may leave dims open (None), or all of it."""
    shape = tf.TensorShape(tf_variable(variable).shape)
    return None if shape.rank is None else shape.as_list()


def chiefs_arrays(
    runtime: Runtime, described: Mapping[str, tuple], arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the chief's arrays on every worker. A collective call.

    described: the table of the variables that are to take them. arrays: {} on the other workers.
    """
    # The others do not know the sizes of these: they are sent as a message, which says what it contains.
    unsized = {
        key
        for key, (_, shape, dtype) in described.items()
        if dtype == tf.string.name or not tf.TensorShape(shape).is_fully_defined()
    }
    keys = sorted(described.keys() - unsized)
    own = arrays or {key: np.zeros(described[key][1], described[key][2]) for key in keys}
    found = dict(zip(keys, runtime.broadcast([own[key] for key in keys]), strict=True))
    if unsized:
        found |= runtime.broadcast_object({key: array for key, array in arrays.items() if key in unsized})
    return found


def generator_states() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, as JSON."""
    legacy: Any = np.random.get_state()  # a dict only on request
    name, keys, position, has_gauss, cached = legacy
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), position, has_gauss, cached]}


def restore_generator_states(states: Mapping[str, Any]) -> None:
    """The inverse of `generator_states`; a generator whose state is missing stays as it is."""
    if "python" in states:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(map(int, internal)), gauss))
    if "numpy" in states:
        name, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, cached))


def name_of(variable: Any) -> str:
    """The path of a Keras variable, or the name of a TensorFlow variable."""
    # Uses only the path: the value of a variable on another pipeline stage must not be accessed.
    return variable.path if isinstance(variable, keras.Variable) else variable.name


def tf_variable(variable: Any) -> Any:
    """The TensorFlow variable inside a Keras variable, or the given variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _once(variables: Sequence) -> list:
    return list({id(variable): variable for variable in variables}.values())
