"""Whether what a model returns for a row depends on the other rows of its batch, found out by trying.

A layer that takes the mean over the rows of its batch, say, takes it over the rows of one worker or micro-batch:
another number than one process would have, and nothing tells. (BatchNormalization is synchronised and no such layer.)
Where the model's graph does not prove that it has nothing to do with them (row_proof.py), the model is called with some
rows, and again with some of them in the same places and all others replaced by copies of one of these: its outputs for
those rows must not change. The same shapes run the same kernels, so that rounding changes nothing.
Nor may it change where the row stands elsewhere among fewer: a layer that divides by the number of rows of its batch
divides by those of a worker. There rounding is allowed for. Rows of different sizes show what begins above some value,
and gradients what is mixed on their way back (row_gradients.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_layers, tensorflow_random
from tfdist.compat.keras_tensors import mask_of
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime
from tfdist.training import row_gradients
from tfdist.training.added_losses import take_rows
from tfdist.training.calm_layers import holds_own_function, is_of_keras
from tfdist.training.loss_probe import ROWS, Probe, Take, generators_kept
from tfdist.training.row_proof import Proofs
from tfdist.training.trial_values import differ, disturbed, shortened, sound, spread

_TOLERANCE = 1e-5  # of the largest output
_ROUNDED = 1e-3  # the same, where other shapes may run other kernels; of half precision the tolerance of the probe


class Attempt(NamedTuple):
    """By how much weights are disturbed, how much of the rows is kept, how much noise is added to them, and whether
    rows are of different sizes then. by_halves: whether every other row stays, or the first or the last alone."""

    disturbed: float
    kept: float
    noise: float
    spread: bool
    training: bool
    by_halves: bool

    @property
    def moves(self) -> bool:
        """Whether rows are moved, too, and are as many as in a whole batch, and gradients are looked at: once is
        enough."""
        return 0.0 < self.disturbed < 1.0 and not self.spread


_ATTEMPTS = [
    Attempt(*how, training, by_halves=(number + training) % 2 == 1)
    for number, how in enumerate(
        ((0.0, 1.0, 0.0, False), (0.3, 1.0, 1.0, False), (0.3, 1.0, 1.0, True), (1.0, 0.0, 1.0, False))
    )
    for training in (False, True)
]
_SMALLEST, _LARGEST = 1e-3, 1e3  # of rows of different sizes


def may_mix(model: keras.Model) -> bool:
    """Whether a model could look at other rows than its own. False for what is made of nothing but layers of Keras,
    none of which works along the rows."""
    layers = keras_layers.all_layers(model)
    if any(_is_suspect(layer) for layer in layers):
        return True
    return any(not isinstance(each, keras.Layer) for layer in layers for each in getattr(layer, "operations", ()))


def _is_suspect(layer: keras.Layer) -> bool:
    return not is_of_keras(layer) or _works_along_rows(layer) or holds_own_function(layer)


def _works_along_rows(layer: keras.Layer) -> bool:
    axes = [getattr(layer, name, None) for name in ("axis", "axes")]
    along = any(axis is not None and 0 in keras.tree.flatten(axis) for axis in axes)
    return along or isinstance(layer, keras.layers.MelSpectrogram) or _mixes_always(layer)


def _mixes_always(layer: keras.Layer) -> bool:
    """What no try with a few rows shows: pairs that are drawn at random, and the scales of float8, which come from the
    largest number of all rows, of this step and those before."""
    draws_pairs = isinstance(layer, (keras.layers.MixUp, keras.layers.CutMix))
    return draws_pairs or getattr(layer, "quantization_mode", None) == "float8"


class Share(NamedTuple):
    """Which of the attempts a worker makes: as many workers as there are attempts can make one each."""

    index: int
    number: int


_ALL = Share(0, 1)


def mixes(
    model: keras.Model,
    x: Any,
    take: Take = take_rows,
    count: int | None = None,
    share: Share = _ALL,
    proofs: Proofs | None = None,
) -> bool:
    """Whether the outputs of `model` for a row, in inference or in training, change with the other rows.

    Runs it a few times, not compiled, where its graph does not prove that they do not; all of its variables and states
    stay as they are. False where it draws random numbers that cannot be repeated (of NumPy's and Python's generators),
    which tells nothing.

    Args:
      proofs: of this model, if its graphs are of use elsewhere or its batches have more than a few rows.
      Others: as for `added_losses`.
    """
    if any(_mixes_always(layer) for layer in keras_layers.all_layers(model)):
        return True
    count = int(keras.tree.flatten(x)[0].shape[0]) if count is None else count
    proofs, attempts = proofs or Proofs(model), _ATTEMPTS[share.index :: share.number]
    attempts = [attempt for attempt in attempts if not proofs.of(x, take, attempt.training).apart]
    if not attempts:
        return False
    probe = Probe(model, x, take, count)
    with probe.watching(), batch_norm.each_alone():
        return any(
            _one_tells(list(alike), probe, disturbed(probe.weights, by), proofs.tried)
            for by, alike in itertools.groupby(attempts, lambda attempt: attempt.disturbed)
        )


def _one_tells(attempts: Sequence[Attempt], probe: Probe, weights: Sequence[np.ndarray], many: int) -> bool:
    """Of attempts with the same weights, which are on the device once, and no longer than these last."""
    there = [tf.constant(weight) for weight in weights]
    return any(_tells(attempt, probe, there, many) for attempt in attempts)


def _tells(attempt: Attempt, probe: Probe, weights: Sequence[tf.Tensor], many: int) -> bool:
    """Whether it tells that rows are mixed. What fails with a few rows, or outside of a graph, is tried with as many as
    a batch has, and in a graph, as it will be trained; so is what draws from TensorFlow's global generator, which can
    be repeated in a graph alone. What fails there, too, tells nothing: it cannot be trained.
    """
    # As they are, all rows that there are: what one of them alone holds, such as a token, may change the others.
    few = many if attempt.moves else max(ROWS, min(many, probe.count)) if not attempt.noise else ROWS
    for number, in_graph in dict.fromkeys([(few, False), (many, False), (many, True)]):
        try:
            return _told(attempt, probe, weights, number, in_graph)
        except Exception:  # noqa: BLE001, S112 - of the user's own making
            continue
    return False


def _told(attempt: Attempt, probe: Probe, weights: Sequence[tf.Tensor], number: int, in_graph: bool) -> bool:
    """The same with so many rows."""
    kept = [range(0, number, 2), range(1, number, 2)] if attempt.by_halves else [range(1), range(number - 1, number)]

    def outputs(places: list[int], draw: int = 0) -> list[np.ndarray]:
        x = probe.take(rows, places)

        def compute() -> list[tf.Tensor]:
            leaves = keras.tree.flatten(probe.outputs(x, weights, draw, attempt.training, attempt.disturbed))
            return [*leaves, *(mask for leaf in leaves if (mask := mask_of(leaf)) is not None)]

        if in_graph:
            with tensorflow_random.seeded_graphs(2 * _ATTEMPTS.index(attempt) + draw):  # each draws others
                # Not called itself: TensorFlow would warn of functions that are traced again and again.
                found: Any = tf.function(compute, autograph=False).get_concrete_function()()
        else:
            found = compute()
        leaves = [leaf for leaf in found if leaf.shape.rank and leaf.shape[0] == len(places)]
        return [tf.cast(leaf, tf.float64).numpy() for leaf in leaves]

    x, tolerance = probe.some_rows(number), max(_ROUNDED, probe.tolerance)
    draw = None if attempt.moves else 2 * attempt.spread + attempt.training
    rows = keras.tree.map_structure(lambda leaf: sound(leaf, attempt.kept, attempt.noise, draw), x)
    if attempt.spread:
        sizes = np.geomspace(_SMALLEST, _LARGEST, number)
        rows = keras.tree.map_structure(lambda leaf: shortened(spread(leaf, sizes), number), rows)
        return _depends_on_others(outputs, outputs(list(range(number))), number, kept, tolerance)
    together = outputs(list(range(number)))
    return _depends_on_others(outputs, together, number, kept) or (
        attempt.moves
        and (
            _depends_on_its_place(outputs, together, number, tolerance)
            or (attempt.training and _gradients_tell(probe, weights, attempt.disturbed))
        )
    )


def _gradients_tell(probe: Probe, weights: Sequence[tf.Tensor], off: float) -> bool:
    """One that has none for a few rows tells nothing."""
    try:
        return row_gradients.mix(probe, weights, off)
    except Exception:  # noqa: BLE001 - of the user's own making
        return False


def _depends_on_others(
    outputs: Callable[[list[int]], list[np.ndarray]],
    together: list[np.ndarray],
    number: int,
    kept: Iterable[Sequence[int]],
    of_row: float | None = None,
) -> bool:
    """Whether the output for one of the rows that are kept, in turn these or those, is another where all others are
    copies of the first of them.

    of_row: the tolerance in parts of what is largest in the row itself, where rows are of different sizes.

    Raises _Unrepeatable where it would be another one in any case.
    """
    found = any(
        differ(one[place], other[place], *(of_row, one[place]) if of_row else (_TOLERANCE, one))
        for places in kept
        for one, other in zip(
            together, outputs([row if row in places else places[0] for row in range(number)]), strict=True
        )
        for place in places
    )
    if not found:
        return False
    # Only where something differs: most models do not mix rows.
    repeated = outputs(list(range(number)))
    if any(differ(a, b, _TOLERANCE) for a, b in zip(together, repeated, strict=True)):
        raise _Unrepeatable
    return True


class _Unrepeatable(Exception):
    """The model draws other random numbers each time."""


def _depends_on_its_place(
    outputs: Callable[..., list[np.ndarray]], together: list[np.ndarray], number: int, tolerance: float
) -> bool:
    """Whether the output for a row is another where it stands elsewhere, among fewer; of a model that draws no random
    numbers, which are of a place."""
    places = [number - 1, 0]
    moved = outputs(places)
    if len(moved) != len(together) or not any(
        differ(a[places], b, tolerance, a) for a, b in zip(together, moved, strict=True)
    ):
        return False
    redrawn = outputs(list(range(number)), 1)
    return not any(differ(a, b, _TOLERANCE) for a, b in zip(together, redrawn, strict=True))


def refuse(runtime: Runtime, model: keras.Model, rows: Callable[[], Any], proofs: Proofs | None = None) -> None:
    """Raises ConfigError on all workers if one finds that it mixes x = `rows()`. A collective, if it may."""
    if may_mix(model) and found_together(runtime, model, rows, proofs=proofs):
        fix = (
            "take statistics over rows with keras.layers.BatchNormalization, train on one device with"
            " --accumulation=1, or let such layers mix the rows of their micro-batch with --row_mixing=replica"
        )
        raise ConfigError(sentence(model, fix))


def found_together(
    runtime: Runtime,
    model: keras.Model,
    rows: Callable[[], Any],
    take: Take = take_rows,
    count: int | None = None,
    proofs: Proofs | None = None,
) -> bool:
    """Whether one of the workers, which share the attempts, finds that it mixes x = `rows()`. A collective.

    A model that cannot be tried is not said to: what fails with another number of rows cannot be spread, and says so
    itself.
    """
    workers = min(runtime.size, len(_ATTEMPTS))
    share = Share(workers - 1 - runtime.rank, workers)  # the fewest for the chief, which has more to do
    found = False
    with generators_kept():
        x = rows() if share.index >= 0 else None
        with contextlib.suppress(Exception):  # of the user's own making
            found = share.index >= 0 and mixes(model, x, take, count, share, proofs)
    return bool(runtime.all_gather(np.array([found], np.int64)).any())


def sentence(model: keras.Model, fix: str) -> str:
    """That refuses it. fix: what the user can do."""
    layers = keras_layers.all_layers(model, include_self=False)
    own = [layer.name for layer in layers if _is_suspect(layer)]
    looked_at = f" (look at {', '.join(own[:5])})" if own else ""
    return (
        f"What {type(model).__name__} {model.name} returns for a row depends on the other rows of its batch, on their"
        f" number or on its place among them, or its gradient does{looked_at}, but workers and micro-batches have some"
        " of the rows each, so"
        f" that they would compute something else than one process: {fix}."
    )
