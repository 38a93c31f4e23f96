"""Recomputation instead of storage: activation checkpointing (Chen et al. 2016, arXiv:1604.06174).

`recomputed` runs a function of tensors and variables and keeps only its inputs; the backward pass runs the function a
second time. With tf.recompute_grad and keras.remat the second run draws other dropout masks, because the first has
advanced the seed generators. Here the state (seeds, moving statistics) enters and leaves as values, so that both passes
see the same state, and it advances only once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras_layers import current_call, keep_message
from tfdist.compat.keras_random import states_beside
from tfdist.compat.keras_tensors import taken_apart
from tfdist.compat.keras_variables import autocast_dtype, autocast_to
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.compat.tensorflow_graphs import (
    draws_anew,
    has_gradient,
    is_made_of_variables,
    kinds_made_here,
    sets_state,
    taken_from_before,
)
from tfdist.control.exit_codes import ConfigError

Bind = Callable[[list[tf.Tensor], bool, tf.Tensor], list[tuple[keras.Variable, tf.Tensor]]]
OnGradients = Callable[[list[tf.Tensor]], None]


def recomputed(
    function: Callable[..., Any],
    inputs: Any,
    parameters: Sequence[keras.Variable],
    states: Sequence[keras.Variable],
    owner: keras.Layer,
    bind: Bind | None = None,
    on_gradients: OnGradients | None = None,
) -> Any:
    """Returns `function(inputs)`, and keeps only `inputs` for the backward pass.

    Args:
      inputs: any nest; gradients flow through its tensors, everything else is passed on unchanged.
      parameters: the trainable variables that the function uses; their gradients are computed as usual.
      states: the other variables that the function uses or changes. Only changed ones are written.
      owner: the layer that receives the losses that are added inside the function.
      bind: (values of `parameters`, whether this is the second pass, the tensor that starts the pass: an input or an
        upstream gradient) -> (variable, value) pairs that hold inside the function. Default: the parameters themselves;
        gathered.py assembles whole variables from shards here.
      on_gradients: receives the gradients of `parameters` when the backward pass is traced.
    Returns: what function returns, a nest of tensors.
    """
    states = [*states, *states_beside()]
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    made = _Recomputed(function, inputs, parameters, states, bind, on_gradients)
    results = made.run(owner)
    _refuse_what_comes_out_otherwise(kinds_made_here(graph, before), owner)
    given = (*made.leaves, *made.starts, *made.values)
    _refuse_what_comes_in_otherwise(taken_from_before(graph, before), given, owner)
    for place, end in zip(made.changed, results[len(results) - len(made.changed) :], strict=True):
        states[place].assign(end)
    outputs = len(results) - len(made.changed) - made.losses
    for loss in results[outputs : outputs + made.losses]:
        type(owner).add_loss(owner, loss)  # not the instance's, which may scale losses: that was done inside
    return made.put_together(results[:outputs])


def _refuse_what_comes_out_otherwise(kinds: set[str], owner: keras.Layer) -> None:
    """Raises ConfigError for operations whose results would differ in the second pass, and with them the gradient."""
    if any(map(draws_anew, kinds)):
        what = (
            "draws by tf.random or a tf.random.Generator, which would give other numbers then: draw with keras.random"
        )
    elif any(map(sets_state, kinds)):
        what = (
            "sets a tf.Variable that Keras does not track, twice in each step then: create it with"
            " self.add_weight(trainable=False)"
        )
    else:
        return
    raise _refusal(owner, what)


def _refuse_what_comes_in_otherwise(taken: Sequence[tf.Tensor], given: Sequence[Any], owner: keras.Layer) -> None:
    """Raises ConfigError for tensors that would get no gradient, as they are no arguments of the call."""
    known = set(map(id, given))
    for tensor in taken:
        if id(tensor) not in known and is_made_of_variables(tensor):
            raise _refusal(
                owner,
                f"takes the tensor {tensor.name} otherwise than as an argument of its call (another layer has kept it,"
                " or it is in an object), so that it would get no gradient: pass it as an argument",
            )


def _refusal(owner: keras.Layer, what: str) -> Exception:
    return keep_message(
        ConfigError(
            "--recompute and --zero=3 recompute layers in the backward pass, but the block that ends with layer"
            f" {owner.name} {what}, or drop the flag."
        )
    )


class _Recomputed:
    """One recomputed call. Its tensors are the inputs, followed by the parameters; its results are the outputs, the
    losses and the changed states."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Any,
        parameters: Sequence[keras.Variable],
        states: Sequence[keras.Variable],
        bind: Bind | None,
        on_gradients: OnGradients | None,
    ):
        self.function, self.parameters, self.states = function, parameters, states
        self.bind, self.on_gradients = bind, on_gradients
        self.leaves, self.put_inputs_together = taken_apart(inputs)
        # Keras knows neither in the backward pass.
        self.compute_dtype, self.call_again = autocast_dtype(), current_call()
        # Not rounded: a layer inside rounds to its own compute dtype anyway, and values that are written back must not
        # be rounded.
        with autocast_to(None):
            self.starts = [tf.convert_to_tensor(state.value) for state in states]
            self.values = [tf.convert_to_tensor(parameter.value) for parameter in parameters]
        self.put_together: Callable[[Sequence[tf.Tensor]], Any] = lambda tensors: None
        self.losses = 0
        self.changed: list[int] = []  # places of the states to which the function gives another value

    def run(self, owner: keras.Layer) -> list[tf.Tensor]:
        @tf.custom_gradient
        def run(*tensors: tf.Tensor):
            results = self.compute(tensors, False, tensors[0])

            def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> list[tf.Tensor | None]:
                if variables:
                    names = ", ".join(variable.name for variable in variables)
                    raise _refusal(
                        owner, f"uses variables that are none of its layers' ({names}): let a layer hold them"
                    )
                return self.gradient(tensors, upstream[: len(results) - len(self.changed)])

            return results, gradient

        results: Any = run(*self.leaves, *self.values)
        return list(results) if isinstance(results, list | tuple) else [results]

    def compute(self, tensors: Sequence[tf.Tensor], is_second: bool, first: tf.Tensor) -> list[tf.Tensor]:
        given = self.put_inputs_together(tensors[: len(self.leaves)])
        values = list(tensors[len(self.leaves) :])
        with autocast_to(None):  # so that Keras' scope does not round the values
            scope = keras.StatelessScope(list(zip(self.states, self.starts, strict=True)), collect_losses=True)
        before = [scope.get_current_value(state) for state in self.states]
        with autocast_to(self.compute_dtype):
            for update in (
                zip(self.parameters, values, strict=True) if self.bind is None else self.bind(values, is_second, first)
            ):
                scope.add_update(update)
            again = self.call_again() if is_second else contextlib.nullcontext()
            # A tf.function of a layer would keep the first forward pass's tensors.
            with functions_inline(), again, scope:
                outputs, put_together = taken_apart(self.function(given))
        if not is_second:
            self.put_together, self.losses = put_together, len(scope.losses)
        ends = [scope.get_current_value(state) for state in self.states]
        self.changed = [place for place, (start, end) in enumerate(zip(before, ends, strict=True)) if end is not start]
        results = [*outputs, *scope.losses, *(ends[place] for place in self.changed)]
        return [tf.convert_to_tensor(result) for result in results]

    def gradient(self, tensors: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        there = [gradient for gradient in upstream if gradient is not None]  # a mask has none within tf.cond
        with tf.control_dependencies(there):  # do not recompute earlier than needed
            second = [tf.identity(tensor) for tensor in tensors]
        if self.bind is not None:  # `bind` itself decides when
            second[len(self.leaves) :] = [tf.identity(tensor) for tensor in tensors[len(self.leaves) :]]
        floats = [place for place, tensor in enumerate(second) if has_gradient(tensor)]
        with tf.GradientTape() as tape:
            tape.watch([second[place] for place in floats])
            results = self.compute(second, True, there[0])
        pairs = [
            (result, g) for result, g in zip(results, upstream, strict=False) if has_gradient(result) and g is not None
        ]
        gradients = tape.gradient(
            [result for result, _ in pairs],
            [second[place] for place in floats],
            [g for _, g in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        found = dict(zip(floats, gradients, strict=True))
        result = [tf.convert_to_tensor(found[place]) if place in found else None for place in range(len(second))]
        if self.on_gradients is not None:
            self.on_gradients([gradient for gradient in result[len(self.leaves) :] if gradient is not None])
        return result
