"""The state that a pipeline stage carries from action to action."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfdist.training.parallel.pipe_schedule import Receipt


class ForwardPass(NamedTuple):
    """The forward pass of a micro-batch through a part."""

    tape: tf.GradientTape
    input: tf.Tensor
    output: tf.Tensor
    own: tf.Tensor | None  # the loss to differentiate on this stage


class StageState:
    """The tensors that a stage holds during one step."""

    def __init__(self, gradients: list[tf.Tensor], sums: tf.Tensor):
        self.gradients, self.sums = gradients, sums
        self.passes: dict[tuple[int, int], ForwardPass] = {}  # of (part, micro-batch), until the backward pass
        self.received: dict[Receipt, tf.Tensor] = {}  # until it is used
        self.after: list[tf.Tensor] = []  # tensors that the next action waits for
        self.sent: list[tf.Tensor] = []  # sends, which only the end of the step waits for
