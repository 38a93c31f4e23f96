"""Mixed precision: the Keras policy, and the dynamic loss scale of float16.

Keras' own LossScaleOptimizer tests each worker's *local* gradients, so an overflow on one worker makes workers
disagree about skipping. Here the *reduced* gradients decide, which are the same everywhere.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.config import PrecisionConfig

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}

# Below this scale even gradients of 1.0 underflow, so the cause is not the scale: the model produces NaN.
SMALLEST_SCALE = 2.0**-14


def set_policy(precision: PrecisionConfig) -> None:
    """Sets Keras' global dtype policy; call before the model is built. Variables stay float32."""
    keras.config.set_dtype_policy(POLICIES[precision.precision])


class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), with the rules of Keras'
    LossScaleOptimizer: halved on overflow, doubled after `growth_steps` good steps in a row.

    With float32 and bfloat16 (`dynamic` False) the scale is the constant 1 and has no variables.
    Create it inside the runtime's scope; call `update` outside of `Runtime.run`.
    """

    def __init__(self, precision: PrecisionConfig):
        self.dynamic = precision.precision == "float16"
        self.growth_steps = precision.loss_scale_growth_steps
        self.variables: dict[str, tf.Variable] = {}
        if self.dynamic:
            same_everywhere = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self._scale = tf.Variable(
                tf.constant(precision.loss_scale_initial, tf.float32),
                trainable=False,
                name="loss_scale",
                aggregation=same_everywhere,
            )
            self._good_steps = tf.Variable(
                tf.constant(0, tf.int64), trainable=False, name="loss_scale_good_steps", aggregation=same_everywhere
            )
            self.variables = {"loss_scale": self._scale, "loss_scale_good_steps": self._good_steps}

    def value(self) -> tf.Tensor:
        """float32 []: the factor by which the loss is multiplied before the backward pass."""
        return tf.identity(self._scale) if self.dynamic else tf.constant(1.0)

    def update(self, finite: tf.Tensor) -> None:
        """Adjusts the scale after a step. finite: bool [], whether all reduced gradients were finite."""
        if not self.dynamic:
            return
        good_steps = tf.identity(self._good_steps)
        grow = tf.equal(good_steps, self.growth_steps - 1)
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        self._scale.assign(self.value() * factor)
        self._good_steps.assign(
            tf.where(tf.logical_and(finite, tf.logical_not(grow)), good_steps + 1, tf.zeros_like(good_steps))
        )
