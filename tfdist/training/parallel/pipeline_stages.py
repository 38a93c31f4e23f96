"""Pipeline parallelism: puts parts of a model on the stages of the `pipe` axis, and runs micro-batches through them.

The micro-batches are those of --accumulation. A whole step is one graph on each stage. Its actions (pipe_schedule.py)
run one after another, ordered by control dependencies; a stage receives activations from the previous stage and
gradients from the next, in an order that suits all stages. A stage frees the variables that it does not use. A variable
that two stages use (a tied embedding) is on both, and they sum its gradient, so that the copies stay equal.

Losses that layers add are differentiated on the stage that adds them, together with the gradients from later stages;
weight regularizers are differentiated with the first part that uses the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras_tensors import functional_of, inputs_in_order
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.dtypes import as_summands, zero_summands
from tfdist.training.parallel import segments as cutting
from tfdist.training.parallel.gathered import forbid_use
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.pipe_schedule import Receipt, Schedule, receipts
from tfdist.training.parallel.pipeline_parts import first_users
from tfdist.training.parallel.pipeline_state import ForwardPass, StageState
from tfdist.training.parallel.segments import Segment
from tfdist.training.parallel.tensor import static_dims


class Pipeline:
    """A model spread over the stages of the runtime's mesh; from now on the model's call passes through all stages.

    `width`: the last dim of the model's outputs on this rank, which has only a part of them if tensor.py cuts the
    logits.
    """

    def __init__(
        self,
        runtime: MeshRuntime,
        model: keras.Model,
        parts: Sequence[Sequence[Segment]],
        schedule: Schedule,
        update: MeshUpdate,
        width: int,
    ):
        self._width = width
        self.group = runtime.group("pipe")
        self.parts, self.model, self._functional = parts, model, functional_of(model)
        self.schedule, self.receipts = schedule[self.group.index], receipts(schedule)[self.group.index]
        self.sources, self.storage = update.sources, update.storage_variables()  # see segments.recompute
        self._regularized = first_users(parts, model.trainable_variables)
        self._ties = [
            runtime.for_copies(runtime.group_of([self.group.ranks[stage] for stage in update.stages[id(variable)]]))
            for variable in update.trainable
        ]
        for variable in model.trainable_variables:
            if self.group.index not in update.stages[id(variable)]:
                forbid_use(variable, f"{variable.path} is on another stage of the pipeline.")
        model.call = self._call

    # -- forward only: evaluation -----------------------------------------------------------------------------------

    def _call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """The model's call: one input and one output, each in any structure."""
        return self._as_given(self._forward_only(self._one_tensor(inputs), training))

    def _forward_only(self, inputs: tf.Tensor, training: bool | None) -> tf.Tensor:
        last = len(self.parts) - 1
        x = inputs
        sent: list[tf.Tensor] = []
        for number, part in enumerate(self.parts):
            if self._is_mine(number):
                x = self._receive(number, "evaluate", inputs) if number else inputs
                x = _run(part, x, training, self.storage)
                if number < last:
                    sent.append(self._send(number, "evaluate", x))
        if not self._is_mine(last):
            x = tf.zeros([inputs.shape[0], *self.model.output_shape[1:-1], self._width], self.model.outputs[0].dtype)
        with tf.control_dependencies(sent):
            x = tf.identity(x)
        x.set_shape([inputs.shape[0], *x.shape[1:]])
        return self.group.broadcast(x, self.group.ranks[last % self.group.size])

    # -- forward and backward: training -----------------------------------------------------------------------------

    def __call__(
        self,
        batches: Sequence[tuple],
        begin: Callable[[int, int], None],
        total: Callable[..., tuple[tf.Tensor, tf.Tensor]],
        added: Callable[..., tuple[tf.Tensor, tf.Tensor]],
        sums: int,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns (gradients of this stage's variables, sums of all micro-batches), as a model on one device has them.

        Args:
          batches: (x, y, w) of each micro-batch; x is used on the first stage only, y on the last stage only.
          begin: called before each forward pass with the numbers of its micro-batch and part, to seed dropout masks.
          total: (outputs, y, w, losses that the last part adds) -> (the loss to differentiate, float32 [sums]).
          added: the same for another part: (w, losses that the part adds) -> the same pair.
        """
        state = StageState(zero_summands(self.sources()), tf.zeros([sums]))
        batches = [(self._one_tensor(x), y, w) for x, y, w in batches]
        for action, before in zip(self.schedule, self.receipts, strict=True):
            number = action.chunk * self.group.size + self.group.index
            with tf.control_dependencies(state.after):
                for receipt in before:
                    state.received[receipt] = self._receive_for_training(state, receipt, batches[receipt.micro])
                if action.forward:
                    begin(action.micro, number)
                    self._forward(state, number, action.micro, batches[action.micro], total, added)
                else:
                    self._backward(state, number, action.micro)
        gradients = [tie.all_reduce(gradient) for tie, gradient in zip(self._ties, state.gradients, strict=True)]
        with tf.control_dependencies([*state.sent, *state.after]):
            return gradients, self.group.all_reduce(state.sums)

    def _forward(
        self, state: StageState, number: int, micro: int, batch: tuple, total: Callable, added: Callable
    ) -> None:
        received = state.received.pop(Receipt(True, micro, number - 1), None)
        x = tf.identity(batch[0]) if received is None else received
        is_last, losses = number == len(self.parts) - 1, []
        with tf.GradientTape() as tape:
            if number:
                tape.watch(x)
            y = _run(self.parts[number], x, True, self.storage, losses)
            losses += [variable.regularizer(variable) for variable in self._regularized[number]]
            loss = None  # the loss to differentiate on this stage
            if is_last or losses:
                loss, sums = total(self._as_given(y), *batch[1:], losses) if is_last else added(batch[2], losses)
                state.sums += sums
        state.passes[number, micro] = ForwardPass(tape, x, y, loss)
        state.after = [y] if loss is None else [y, loss]
        if not is_last:
            state.sent.append(self._send(number, "forward", y))

    def _backward(self, state: StageState, number: int, micro: int) -> None:
        tape, x, y, loss = state.passes.pop((number, micro))
        targets, upstream = ([], []) if loss is None else ([loss], [tf.ones_like(loss)])
        if number < len(self.parts) - 1:
            targets, upstream = [y, *targets], [state.received.pop(Receipt(False, micro, number + 1)), *upstream]
        sources = self.sources()
        wanted = [*sources, *([x] if number else [])]
        found = tape.gradient(targets, wanted, upstream, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        of_sources = [tf.convert_to_tensor(gradient) for gradient in as_summands(found[: len(sources)], sources)]
        state.gradients = [a + b for a, b in zip(state.gradients, of_sources, strict=True)]
        # `upstream` as well: maybe nothing depends on it (frozen layers, stop_gradient), but the stage that sends it
        # waits until it is received.
        state.after = [*state.gradients, *upstream]
        if number:
            of_input = tf.convert_to_tensor(found[-1])
            state.sent.append(self._send(number, "backward", of_input))
            state.after.append(of_input)

    def _receive_for_training(self, state: StageState, receipt: Receipt, batch: tuple) -> tf.Tensor:
        if receipt.forward:
            return self._receive(receipt.part + 1, "forward", batch[0])
        number = receipt.part - 1
        return self._receive(number, "backward", state.passes[number, receipt.micro].output)

    # -- the model's input and output: a tensor, or a structure around one ---------------------------------------------

    def _one_tensor(self, inputs: Any) -> tf.Tensor:
        (tensor,) = inputs_in_order(self._functional, inputs)
        return tensor

    def _as_given(self, output: tf.Tensor) -> Any:
        return cutting.outputs_as_given(self._functional, [output])

    # -- between stages ---------------------------------------------------------------------------------------------

    def _is_mine(self, number: int) -> bool:
        return number % self.group.size == self.group.index

    def _send(self, number: int, kind: str, x: tf.Tensor) -> tf.Tensor:
        """Sends x to the next part, or, backward, to the part before. The result is for control dependencies."""
        sender, receiver = (
            self.group.ranks[part % self.group.size]
            for part in (number, number - 1 if kind == "backward" else number + 1)
        )
        return self.group.pair(sender, receiver, f"{kind} {number}").put_or_take(x, sender, static_dims(x), x.dtype)

    def _receive(self, number: int, kind: str, like: tf.Tensor) -> tf.Tensor:
        """Receives from the part before (`like` has the batch size), or, backward, the next (`like` has the shape)."""
        before = number + 1 if kind == "backward" else number - 1
        receiver, sender = (self.group.ranks[part % self.group.size] for part in (number, before))
        spec = self.parts[number][0].part.input
        shape, dtype = (
            (static_dims(like), like.dtype)
            if kind == "backward"
            else ([like.shape[0], *spec.shape[1:]], tf.as_dtype(spec.dtype))
        )
        return self.group.pair(sender, receiver, f"{kind} {before}").put_or_take(None, sender, shape, dtype)


def _run(
    part: Sequence[Segment],
    x: tf.Tensor,
    training: bool | None,
    storage: Mapping[int, keras.Variable],
    added: list[tf.Tensor] | None = None,
) -> tf.Tensor:
    """Runs a part, which takes one tensor and returns one."""
    return cutting.run(part, {part[0].takes[0]: x}, training, storage, added)[part[-1].gives[0]]
