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

from tfdist.compat.keras_layers import again_in_this_call, keep_message
from tfdist.compat.keras_variables import autocast_dtype, autocast_to
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.compat.tensorflow_graphs import draws_anew, kinds_made_here, sets_state
from tfdist.control.exit_codes import ConfigError
from tfdist.training.seeds import states_beside

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
    results = made.run()
    _refuse_what_comes_out_otherwise(kinds_made_here(graph, before), owner)
    for place, end in zip(made.changed, results[len(results) - len(made.changed) :], strict=True):
        states[place].assign(end)
    outputs = len(results) - len(made.changed) - made.losses
    for loss in results[outputs : outputs + made.losses]:
        owner.add_loss(loss)
    return tf.nest.pack_sequence_as(made.structure, results[:outputs])


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
    raise keep_message(
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
        self.function, self.inputs, self.parameters, self.states = function, inputs, parameters, states
        self.bind, self.on_gradients = bind, on_gradients
        self.leaves = tf.nest.flatten(inputs)
        self.places = [place for place, leaf in enumerate(self.leaves) if tf.is_tensor(leaf)]
        # Keras knows neither in the backward pass.
        self.compute_dtype, self.again_in_this_call = autocast_dtype(), again_in_this_call()
        # Not rounded: a layer inside rounds to its own compute dtype anyway, and values that are written back must not
        # be rounded.
        with autocast_to(None):
            self.starts = [tf.convert_to_tensor(state.value) for state in states]
            self.values = [tf.convert_to_tensor(parameter.value) for parameter in parameters]
        self.structure, self.losses = None, 0
        self.changed: list[int] = []  # places of the states to which the function gives another value

    def run(self) -> list[tf.Tensor]:
        @tf.custom_gradient
        def run(*tensors: tf.Tensor):
            results = self.compute(tensors, False, tensors[0])
            return results, lambda *upstream: self.gradient(tensors, upstream[: len(results) - len(self.changed)])

        results: Any = run(*(self.leaves[place] for place in self.places), *self.values)
        return list(results) if isinstance(results, list | tuple) else [results]

    def compute(self, tensors: Sequence[tf.Tensor], is_second: bool, first: tf.Tensor) -> list[tf.Tensor]:
        filled = list(self.leaves)
        for place, tensor in zip(self.places, tensors[: len(self.places)], strict=True):
            filled[place] = tensor
        values = list(tensors[len(self.places) :])
        with autocast_to(None):  # so that Keras' scope does not round the values
            scope = keras.StatelessScope(list(zip(self.states, self.starts, strict=True)), collect_losses=True)
        before = [scope.get_current_value(state) for state in self.states]
        in_the_call = self.again_in_this_call() if is_second else contextlib.nullcontext()
        with in_the_call, autocast_to(self.compute_dtype):
            for update in (
                zip(self.parameters, values, strict=True) if self.bind is None else self.bind(values, is_second, first)
            ):
                scope.add_update(update)
            with functions_inline(), scope:  # a tf.function of a layer would keep the first forward pass's tensors
                self.structure = self.function(tf.nest.pack_sequence_as(self.inputs, filled))
        self.losses = len(scope.losses)
        ends = [scope.get_current_value(state) for state in self.states]
        self.changed = [place for place, (start, end) in enumerate(zip(before, ends, strict=True)) if end is not start]
        results = [*tf.nest.flatten(self.structure), *scope.losses, *(ends[place] for place in self.changed)]
        return [tf.convert_to_tensor(result) for result in results]

    def gradient(self, tensors: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        with tf.control_dependencies(upstream):  # do not recompute earlier than needed
            second = [tf.identity(tensor) for tensor in tensors]
        if self.bind is not None:  # `bind` itself decides when
            second[len(self.places) :] = [tf.identity(tensor) for tensor in tensors[len(self.places) :]]
        floats = [place for place, tensor in enumerate(second) if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch([second[place] for place in floats])
            results = self.compute(second, True, upstream[0])
        pairs = [(result, g) for result, g in zip(results, upstream, strict=False) if result.dtype.is_floating]
        gradients = tape.gradient(
            [result for result, _ in pairs],
            [second[place] for place in floats],
            [g for _, g in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        found = dict(zip(floats, gradients, strict=True))
        result = [tf.convert_to_tensor(found[place]) if place in found else None for place in range(len(second))]
        if self.on_gradients is not None:
            self.on_gradients([gradient for gradient in result[len(self.places) :] if gradient is not None])
        return result
