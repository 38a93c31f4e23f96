"""Memory of one device: parameters, gradients, optimizer state, master weights, activations, buffers. In bytes.

ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054) divides over the data-parallel devices: stage 1 the optimizer state
and master weights, stage 2 also the gradients, stage 3 also the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfdist.config import Config, OptimizerConfig, parse_args
from tfdist.config.optimizers import OPTIMIZERS
from tfdist.planner.layout import Layout
from tfdist.planner.pipeline import micro_batches_held
from tfdist.planner.shapes import ModelPart, ModelShape, Weight

_WORKING_TENSORS = 2  # tensors of the largest size that a layer's backward pass holds besides the saved ones
_UPDATE_TENSORS = 2  # temporary tensors of a variable's size in the update rule
# Buckets of gradients in transit, besides the gradients that are kept, by ZeRO stage: one incoming and one outgoing;
# two of each at stage 2, and none at stage 3, where layers take their place.
_BUCKETS = (2, 2, 4, 0)


@dataclass(frozen=True)
class Recipe:
    """Bytes per element of each kind. The defaults are those of Keras: variables, gradients and slots are float32 under
    every policy, and casts to the compute type count as buffers. copy: for the shard that stages 1 and 2 update."""

    parameter: float = 4.0
    gradient: float = 4.0
    slot: float = 4.0
    master: float = 0.0
    copy: float = 0.0


KERAS = Recipe(copy=4.0)


@dataclass(frozen=True)
class States:
    """Bytes on one device that do not depend on the batch."""

    parameters: float
    gradients: float
    optimizer: float
    master: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.master

    def __add__(self, other: States) -> States:
        return States(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.master + other.master,
        )


def shard_states(parameters: float, slots: float, recipe: Recipe, zero: int, devices: int) -> States:
    """Returns the bytes on each of `devices` data-parallel devices, for `parameters` elements with `slots` elements of
    optimizer state."""
    assert zero in (0, 1, 2, 3), zero
    master = recipe.master + (recipe.copy if zero in (1, 2) else 0)
    return States(
        parameters=recipe.parameter * parameters / (devices if zero >= 3 else 1),
        gradients=recipe.gradient * parameters / (devices if zero >= 2 else 1),
        optimizer=recipe.slot * slots / (devices if zero >= 1 else 1),
        master=master * parameters / (devices if zero >= 1 else 1),
    )


def slot_elements(optimizer: OptimizerConfig, weight: Weight) -> int:
    """Returns the elements of optimizer state for a variable, those of its average with --ema included."""
    slots = OPTIMIZERS[optimizer.optimizer].slots(weight.shape, weight.path, _options(optimizer))
    return slots + (weight.elements if optimizer.ema else 0)


@functools.cache
def _options(optimizer: OptimizerConfig) -> dict:
    return {**OPTIMIZERS[optimizer.optimizer].arguments, **parse_args("optimizer_args", optimizer.optimizer_args)}


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device. `peak` is below the sum, because gradients grow while activations are released."""

    parameters: float
    gradients: float
    optimizer: float
    master: float
    activations: float
    buffers: float
    reserved: float
    peak: float
    stage: int  # the pipeline stage that is the fullest

    def items(self) -> dict[str, float]:
        """The amounts under the names that users see."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "master weights": self.master,
            "activations": self.activations,
            "buffers": self.buffers,
            "reserved": self.reserved,
        }


@dataclass(frozen=True)
class Held:
    """Bytes of activations."""

    by_part: list[float]  # held by each part when the backward pass begins
    working: float  # working memory of the largest layer

    @property
    def total(self) -> float:
        return sum(self.by_part)


def memory(model: ModelShape, config: Config, layout: Layout, reserved: float = 0.0, copies: int = 0) -> Memory:
    """Returns the memory of the fullest device of a layout. copies: of tensors in transit, held by the transport."""
    stages = [
        Stage(index, parts, config, layout).memory(reserved, copies)
        for index, parts in enumerate(model.stages(layout.pipe))
    ]
    return max(stages, key=lambda stage: stage.peak)


@dataclass(frozen=True)
class Stage:
    """The parts of one pipeline stage, and how much memory one of its devices needs for them."""

    index: int
    parts: Sequence[ModelPart]
    config: Config
    layout: Layout

    def memory(self, reserved: float, copies: int) -> Memory:
        """Returns the total. `reserved` bytes are taken by others; `copies` as in the function `memory`."""
        layout, parts = self.layout, self.parts
        in_flight = micro_batches_held(self.config.parallel, layout, self.index)
        states, held = self._states(), saved_bytes(parts, layout, in_flight)
        constants = 4.0 * sum(part.repeat * part.constants for part in parts)
        layer = KERAS.parameter * max((layout.elements(part) for part in parts), default=0)
        bucket = self._bucket()
        buckets = transport = 0.0
        if layout.replicas > 1:
            buckets = _BUCKETS[layout.zero] * bucket
            transport = copies * (layer if layout.zero >= 3 else bucket)
        # Stage 3: the layer in use and the one in transit, a gradient as a whole and as received, and the shards that
        # these are gathered from or reduced to.
        gathered = (4 + 3 / layout.replicas) * layer if layout.zero >= 3 else 0.0
        # The update starts only after all gradients were checked, and updated values are sent only after it.
        update = _UPDATE_TENSORS * KERAS.slot * self._largest_weight(layout.shards)
        updating = states.gradients + max(buckets, update)
        # With several micro-batches, sums are kept; each layer's gradient is added to them as soon as it is there.
        accumulated = states.gradients if layout.micro_batches > 1 and layout.zero < 2 else 0.0
        backward = accumulated + self._backward_peak(held, states.gradients, buckets)
        steady = states.parameters + states.optimizer + states.master + constants + transport + gathered + reserved
        return Memory(
            parameters=states.parameters,
            gradients=states.gradients,
            optimizer=states.optimizer,
            master=states.master,
            activations=held.total,
            buffers=constants + transport + buckets + gathered + held.working + self._fixed(),
            reserved=reserved,
            peak=steady + max(updating, backward),
            stage=self.index,
        )

    def _elements(self) -> float:
        return sum(part.repeat * self.layout.elements(part) for part in self.parts)

    def _states(self) -> States:
        total = States(0.0, 0.0, 0.0, 0.0)
        for axis in {axis for part in self.parts for axis in part.elements}:
            parameters = slots = 0.0
            for part in self.parts:
                for weight in part.weights:
                    if weight.axis == axis:
                        parameters += part.repeat * weight.elements / self.layout.divisor(axis)
                        slots += part.repeat * slot_elements(self.config.optimizer, weight) / self.layout.divisor(axis)
            total += shard_states(parameters, slots, KERAS, self.layout.zero, self.layout.shards(axis))
        return total

    def _largest_weight(self, shards: Callable[[str], int] = lambda axis: 1) -> float:
        """Elements of the largest variable, or of its largest shard. shards: axis -> shards of a weight it divides."""
        return max(
            (
                elements / self.layout.divisor(axis) / shards(axis)
                for part in self.parts
                for axis, elements in part.largest_weights.items()
            ),
            default=0,
        )

    def _bucket(self) -> float:
        """Bytes of gradients that travel together: --pack_mb, or a larger variable; at most all gradients."""
        gradient = KERAS.gradient
        asked = max(self.config.strategy.pack_mb * 2**20, gradient * self._largest_weight())
        return min(asked, gradient * self._elements())

    def _fixed(self) -> float:
        return sum(part.repeat * part.fixed / self.layout.model for part in self.parts)

    def _backward_peak(self, held: Held, gradients: float, buckets: float) -> float:
        """The peak of the backward pass, which goes from the last part to the first: gradients appear, activations go.

        Each repetition of a part changes both by the same amount, so the maximum is at the first or at the last
        repetition. gradients: bytes of gradients that are kept.
        """
        layout, fixed = self.layout, self._fixed()
        left, grown, peak = held.total, 0.0, 0.0
        for part, bytes_held in zip(reversed(self.parts), reversed(held.by_part), strict=True):
            working = held.working if layout.recompute else _working_bytes(part, layout)
            gradient = KERAS.gradient * layout.elements(part)
            for first in (True, False):
                released = 0.0 if first else bytes_held * (part.repeat - 1) / part.repeat
                grown += gradient * (1 if first else part.repeat - 1)
                if layout.zero >= 2:  # shards; at stage 2 also the gradients that become shards, whole and as received
                    shown = min((2 if buckets else 1) * grown, gradients + buckets)
                elif layout.micro_batches > 1:
                    shown = gradient
                else:
                    shown = grown + min(grown, buckets)
                peak = max(peak, left - released + shown + working + fixed)
            left -= bytes_held
        return peak


def _working_bytes(part: ModelPart, layout: Layout) -> float:
    return _WORKING_TENSORS * part.largest * layout.micro_batch / layout.model


def saved_bytes(parts: Sequence[ModelPart], layout: Layout, in_flight: float) -> Held:
    """Returns the activations of a stage, which holds those of `in_flight` micro-batches at once.

    With recompute, a block holds only its input, and one block at a time is recomputed (Chen et al. 2016,
    arXiv:1604.06174).
    """

    def whole(part: ModelPart) -> float:
        return (part.saved - part.divided + part.divided / layout.model) * layout.micro_batch

    working = max((_working_bytes(part, layout) for part in parts), default=0.0)
    if not layout.recompute:
        return Held([part.repeat * whole(part) * in_flight for part in parts], working)
    recomputed = max((whole(part) for part in parts if part.block), default=0.0)
    kept = [part.output * layout.micro_batch if part.block else whole(part) for part in parts]
    return Held(
        [part.repeat * bytes_kept * in_flight for part, bytes_kept in zip(parts, kept, strict=True)],
        working + recomputed,
    )
