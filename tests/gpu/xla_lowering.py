"""Checks without a GPU whether XLA can lower for GPUs what --jit_compile compiles.

XLA lowers a function to HLO for a platform that the process lacks, if the weights are arguments of the function. So the
forward and backward pass of a command line's model are written with `stateless_call`, as a Keras user would do.
"""

from __future__ import annotations

import collections
import re

import keras
import tensorflow as tf

from tests.gpu.combinations import as_on_gpu, job_of
from tfdist.build import batch_spec

_OPERATION = re.compile(r"= \S+ ([a-z][a-z0-9-]*)\(")


def lowered(command_line: tuple[str, ...]) -> collections.Counter[str]:
    """Returns how often each kind of HLO operation occurs. Raises TensorFlow's error if it cannot be lowered."""
    with job_of(command_line) as job:
        model = job.model
        with as_on_gpu(in_scope=False):
            spec = batch_spec(job.config, job.train_split, job.plan, 0)

        def gradients(weights: list[tf.Tensor], states: list[tf.Tensor], x, y, w) -> tuple:
            with tf.GradientTape() as tape:
                tape.watch(weights)
                outputs, after, added = model.stateless_call(weights, states, x, training=True, return_losses=True)
                scores = job.objective(outputs, y, w)
                loss = tf.add_n([tf.reduce_sum(scores.losses * scores.weights), *added])
            return tape.gradient(loss, weights), after

        specs = [
            [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        ]
        arguments = [*specs, *keras.tree.map_structure(lambda leaf: _with_rows(leaf, job.plan.micro_batch), spec)]

        def of_flat(*flat: tf.Tensor) -> tuple:  # the compiler's representation is made of flat arguments only
            return gradients(*keras.tree.pack_sequence_as(arguments, flat))

        compiled = tf.function(of_flat, jit_compile=True, autograph=False)
        hlo = compiled.experimental_get_compiler_ir(*keras.tree.flatten(arguments))(stage="hlo", platform_name="GPU")
    return collections.Counter(_OPERATION.findall(hlo))


def through_text(x_spec: tf.TensorSpec, num_outputs: int) -> keras.Model:
    """A model that XLA cannot lower."""
    x = keras.Input(x_spec.shape)
    text = keras.layers.Lambda(lambda t: tf.strings.to_number(tf.strings.as_string(t)), output_shape=x.shape[1:])(x)
    return keras.Model(x, keras.layers.Dense(num_outputs)(keras.layers.Flatten()(text)))


def _with_rows(spec: tf.TensorSpec, rows: int) -> tf.TensorSpec:
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)
