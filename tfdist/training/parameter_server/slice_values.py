"""The values that a slice of a synchronous batch sends to the chief (its gradients, and the states that its forward
pass set), and how the chief combines all slices.

Each dtype travels separately: smaller floating-point types as float32, which holds them exactly, every other dtype as
it is. A state that no layer sets in training is neither sent nor written.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DivergedError


class SliceValues:
    """Packs and combines these values. set_places: of the states that layers set; known once a step has been traced."""

    def __init__(self, weights: Sequence[keras.Variable], states: Sequence[keras.Variable]):
        self._weights, self._states = list(weights), list(states)
        self.set_places: set[int] = set()

    def note(self, given: Sequence[tf.Tensor], found: Sequence[tf.Tensor]) -> None:
        """Records which states a forward pass sets, from the states before and after it, while a step is traced."""
        self.set_places |= {place for place, (old, new) in enumerate(zip(given, found, strict=True)) if new is not old}

    def of_states(self, states: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """place -> new value, for the states that layers set."""
        return {place: states[place] for place in sorted(self.set_places)}

    def packed(self, gradients: Sequence[tf.Tensor], states: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Packs the tensors that travel into one flat tensor per dtype."""
        tensors = [*gradients, *self.of_states(states).values()]
        return tuple(
            tf.concat([tf.reshape(tf.cast(tensors[place], dtype), [-1]) for place in places], 0)
            for dtype, places in self._places().items()
        )

    def specs(self) -> tuple[tf.TensorSpec, ...]:
        """The specs of the tensors that `packed` returns."""
        variables = self._variables()
        return tuple(
            tf.TensorSpec([sum(_size(variables[place]) for place in places)], dtype)
            for dtype, places in self._places().items()
        )

    def unpacked(self, flat: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], dict[int, tf.Tensor]]:
        """Returns (gradients, states as in `of_states`) from the result of `packed`."""
        variables = self._variables()
        found: dict[int, tf.Tensor] = {}
        for tensor, places in zip(flat, self._places().values(), strict=True):
            parts = tf.split(tensor, [_size(variables[place]) for place in places])
            found |= {
                place: tf.reshape(part, variables[place].shape) for place, part in zip(places, parts, strict=True)
            }
        tensors = [found[place] for place in range(len(variables))]
        count = len(self._weights)
        return tensors[:count], dict(zip(sorted(self.set_places), tensors[count:], strict=True))

    def combined(self, slices: Sequence[Sequence[np.ndarray]], step: int) -> tuple[np.ndarray, ...]:
        """Returns the sum of the slices' gradients and the mean of their states, in slice order.

        Where all slices agree, a float64 mean has the same bits. Raises DivergedError if integers, or other values
        without a mean, differ.
        """
        return tuple(
            self._combined_of(dtype, places, [arrays[index] for arrays in slices], step)
            for index, (dtype, places) in enumerate(self._places().items())
        )

    def _combined_of(self, dtype: tf.DType, places: list[int], arrays: list[np.ndarray], step: int) -> np.ndarray:
        variables, count = self._variables(), len(self._weights)
        first_state = sum(_size(variables[place]) for place in places if place < count)
        if dtype.is_floating or dtype.is_complex:
            total = np.stack(arrays).sum(axis=0, dtype=arrays[0].dtype)
            total[first_state:] /= len(arrays)
            if dtype == tf.float32:  # the mean of equal numbers equals them up to rounding
                return total
            same = np.all([array == arrays[0] for array in arrays], axis=0)
            same[:first_state] = False
            return np.where(same, arrays[0], total)
        start = first_state
        for place in places:
            stop = start + _size(variables[place])
            if any(not np.array_equal(array[start:stop], arrays[0][start:stop]) for array in arrays):
                raise DivergedError(
                    f"At step {step} the workers came to different values of {variables[place].path} ({dtype.name}):"
                    " --ps_mode=sync continues from the mean of what layers keep of their workers' rows, which only"
                    " floating types have: keep it in float32, count what is the same on all workers, or use"
                    " --workers=1."
                )
            start = stop
        return arrays[0]

    def _variables(self) -> list[keras.Variable]:
        """The variables whose values travel: weights (as gradients), then states."""
        return [*self._weights, *(self._states[place] for place in sorted(self.set_places))]

    def _places(self) -> dict[tf.DType, list[int]]:
        """dtype in which values travel -> places in `_variables`."""
        found: dict[tf.DType, list[int]] = {}
        for place, variable in enumerate(self._variables()):
            dtype = tf.as_dtype(variable.dtype)
            found.setdefault(tf.float32 if dtype.is_floating and dtype.size < 4 else dtype, []).append(place)
        return found


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))
