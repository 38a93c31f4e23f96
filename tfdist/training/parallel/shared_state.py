"""Refuses what several parts of a pipeline share and a layer sets in its forward pass: moving statistics, a counter, a
weight, a tensor that it keeps.

Each stage would set a copy of its own, and several parts on one stage process micro-batches in another order than one
device does. Variables that no forward pass sets may be shared: tables, frozen layers. A seed generator that several
parts draw from is state, too: one device draws different numbers for each part, but stages would draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_generators, hidden_variables
from tfdist.compat.keras_tensors import functional_of
from tfdist.compat.tensorflow_graphs import is_made_of_values, taken_from_before
from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.assigned_weights import refuse_assigned, refuse_rules_with_state
from tfdist.training.parallel.segments import Segment, run
from tfdist.training.row_checks.calm_layers import has_own_code
from tfdist.training.row_checks.trial_scope import trace


def refuse_shared(
    model: keras.Model, parts: Sequence[Sequence[Segment]], stages: int, flag: str, micro_batch: int
) -> None:
    """Makes it a ConfigError if a layer sets a variable that several parts use; part p is on stage p mod `stages`.
    State is refused at once, so that all workers raise the error and none waits for another; a trainable weight is
    refused while the step is traced.
    """
    variables: dict[int, Any] = {}
    users: dict[int, set[int]] = {}
    for number, part in enumerate(parts):
        for segment in part:
            for variable in (*segment.part.variables, *hidden_variables(segment.part)):
                variables[id(variable)] = variable
                users.setdefault(id(variable), set()).add(number)
    is_state = False
    for key, variable in variables.items():
        if len(users[key]) > 1:
            refuse_assigned(model, [variable], flag, _why_and_fix(sorted(users[key]), stages))
            is_state |= isinstance(variable, tf.Variable) or not variable.trainable
    if is_state:
        x = keras.tree.map_structure(
            lambda tensor: tf.TensorSpec([micro_batch, *tensor.shape[1:]], tensor.dtype), functional_of(model).input
        )
        trace(model, lambda x: model(x, training=True), x)


def refuse_hidden(model: keras.Model, flag: str) -> None:
    """Refuses state that a layer keeps unknown to Keras, and changes, with a ConfigError: snapshots take such state
    from the first stage, where it may never change."""
    if hidden_generators(model):
        raise ConfigError(
            f"{flag}, but a layer draws from a tf.random.Generator, which advances on its own stage only: draw with"
            " keras.random, or use data= instead."
        )
    refuse_rules_with_state(
        model, flag, "changes on its own stage only: let it compute from the weights only, or use data= instead"
    )
    refuse_assigned(
        model,
        hidden_variables(model),
        flag,
        "changes on its own stage only, as Keras does not track it: create it with self.add_weight(trainable=False)",
    )


def refuse_kept(model: keras.Model, parts: Sequence[Sequence[Segment]], flag: str, micro_batch: int) -> None:
    """Raises ConfigError if a part computes with a tensor that a layer has kept in an earlier part: stages pass on one
    tensor, and several parts on one stage process micro-batches in another order."""
    if not has_own_code(model):
        return

    def forward(x: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        for part in parts:
            given = tf.identity(x)  # what x carries beside its values is not passed on
            before = len(graph.get_operations())
            x = run(part, {part[0].takes[0]: given}, True, {})[part[-1].gives[0]]
            for tensor in taken_from_before(graph, before):
                if tensor is not given and is_made_of_values(tensor):
                    raise ConfigError(
                        f"{flag}, but {part[0].gives[0]} or what follows it takes the tensor {tensor.name}, which a"
                        " layer of an earlier part has kept, and stages pass on one tensor only: let a layer keep none"
                        " for others, or use data= instead."
                    )

    x = model.inputs[0]
    trace(model, forward, tf.TensorSpec([micro_batch, *x.shape[1:]], x.dtype))


def _why_and_fix(users: Sequence[int], stages: int) -> str:
    where = sorted({part % stages for part in users})
    if len(where) > 1:
        why = f"stages {_listed(where)} would each do in their own copy"
    else:
        chunks = _listed([part // stages for part in users])
        why = f"chunks {chunks} of stage {where[0]} would do in another order than one device"
    return f"{why}: give each block its own layer, or use data= instead"


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
