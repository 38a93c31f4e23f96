"""How the losses that layers add (`add_loss`, activity regularizers) depend on the rows of a batch, found out by trying.

What a model adds for the rows of one worker has to become what one process adds for all rows. No formula can tell how from
the loss alone: `mean` over rows, and what does not depend on them, are to be averaged by rows, `sum` is to be added up, and of
anything else (a maximum, a mean over what a mask leaves, the square of a mean) the parts say nothing about the whole. So each
is computed for single rows and for the same rows together, at values of the weights that the model does not keep.

Then `SumsAsMeans` makes a mean over rows of each sum, where it is added: a sum over n of N rows times N / n. So all that comes
after, recomputation and pipelines for example, has means to deal with and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime

MEAN, SUM = "mean", "sum"
_UNKNOWN, _WEAK, _OTHER = "0 on all rows", "the same on all rows", "other"
ROWS = 4  # that are tried, each alone and all together
_DRAWS = 64  # of what is random
_LEAST_TOLERANCE = 1e-4
_CLEAR = 0.15  # a random mean must be known as well as that
_FIX = "make it keras.ops.mean or keras.ops.sum over the rows (the first dim) of one value for each row"

Key = tuple[int, int]  # (place of a layer among all of the model, which of the losses that it adds in a call of the model)
Take = Callable[[Any, Sequence[int]], Any]


@dataclass(frozen=True)
class AddedLoss:
    """One entry of `model.losses`; weight regularizers, which come after these, are none."""

    layer: keras.Layer
    place: int  # which of the layer's, in the order in which a call of the model adds them
    scales: str  # MEAN, of rows or of none, or SUM


def may_add(model: keras.Model) -> bool:
    """Whether some layer could add a loss. False is certain; layers of the user's own could."""
    return any(layer.activity_regularizer is not None or not _is_of_keras(layer) for layer in model._flatten_layers())


def take_rows(x: Any, rows: Sequence[int]) -> Any:
    """Some rows of a nest of arrays or tensors."""
    return keras.tree.map_structure(lambda leaf: tf.gather(leaf, list(rows)), x)


def added_losses(model: keras.Model, x: Any, take: Take = take_rows, count: int | None = None) -> tuple[AddedLoss, ...]:
    """What `model` adds in training, in the order of `model.losses`; all of its variables and states stay as they are.

    Runs it a few times, not compiled. Not for a model whose layers speak to other workers.

    Args:
      x: rows to try it with, as the model is called with them; the first few will do.
      take: (x, numbers of rows) -> an x of these rows, some of which may come twice.
      count: how many rows there are; None: as the first tensor of `x` says.
    Raises: ConfigError, a sentence, if one is neither a mean nor a sum over rows.
    """
    if not may_add(model):
        return ()
    count = int(keras.tree.flatten(x)[0].shape[0]) if count is None else count
    probe = _Probe(model, x, take, count)
    with probe.watching(), batch_norm.each_alone():
        found = probe.judged(training=True)
        if _OTHER in found.values():  # perhaps for what only training does
            calm = probe.judged(training=False)
            if calm.keys() == found.keys():
                found = {key: calm[key] if found[key] == _OTHER else found[key] for key in found}
        for key, scales in found.items():
            if scales == _UNKNOWN and not probe.depends_on_rows(key):
                found[key] = MEAN
    for (number, place), scales in found.items():
        if scales not in (MEAN, SUM):
            raise ConfigError(_refusal(probe.layers[number], place, scales))
    return tuple(AddedLoss(probe.layers[number], place, found[number, place]) for number, place in sorted(found))


def _refusal(layer: keras.Layer, place: int, scales: str) -> str:
    what = f"The loss number {place + 1} that layer {layer.name} adds"
    if scales == _UNKNOWN:
        return f"{what} is 0 whatever was tried, so that nothing tells whether it is a mean or a sum over rows: {_FIX}, that is not 0 at the start."
    return (f"{what} is neither a mean nor a sum over the rows of a batch (such as a maximum, or a mean over what a mask leaves), so that workers "
            f"and micro-batches, which have some of the rows each, cannot add what one would: {_FIX}, or train with one replica and --accumulation=1.")


class _Probe:
    """A model that is run on a few rows without leaving a trace in it."""

    def __init__(self, model: keras.Model, x: Any, take: Take, count: int):
        self.model, self.layers = model, list(model._flatten_layers())
        self.rows = [number % count for number in range(ROWS)]
        self.x, self._take = x, take
        self.weights = [variable.numpy() for variable in model.trainable_variables]
        self.states = [variable.numpy() for variable in model.non_trainable_variables]
        types = {tf.as_dtype(layer.compute_dtype) for layer in self.layers if layer.compute_dtype}
        self.tolerance = max([_LEAST_TOLERANCE, *(8 * float(np.finfo(each.as_numpy_dtype).eps) if each != tf.bfloat16 else 2**-4 for each in types if each.is_floating)])
        self._added: list[tuple[Key, tf.Tensor]] = []
        self._calm = False

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, what layers add comes here, and Keras' own layers do not draw random numbers nor look at other rows."""
        kept = [(variable, variable.numpy()) for variable in tf.train.TrackableView(self.model).descendants() if isinstance(variable, tf.Variable)]
        changed: list[tuple[keras.Layer, str]] = []
        try:
            for number, layer in enumerate(self.layers):
                layer.add_loss = self._recorder(number)
                changed.append((layer, "add_loss"))
                if getattr(layer, "_call_has_training_arg", False) and "call" not in vars(layer) and all(map(_is_of_keras, layer._flatten_layers())):
                    layer.call = _not_training(layer.call)
                    changed.append((layer, "call"))
            yield
        finally:
            for layer, name in changed:
                delattr(layer, name)
            for variable, value in kept:
                variable.assign(value)

    def _recorder(self, number: int) -> Callable[[Any], None]:
        def add_loss(loss: Any) -> None:
            for each in keras.tree.flatten(loss):
                place = sum(key[0] == number for key, _ in self._added)
                self._added.append(((number, place), each))

        return add_loss

    def _run(self, x: Any, weights: Sequence[np.ndarray], draw: int, training: bool) -> list[tuple[Key, tf.Tensor]]:
        states = [value + draw if variable.path.endswith("seed_generator_state") else value
                  for variable, value in zip(self.model.non_trainable_variables, self.states, strict=True)]
        self._added = []
        self.model.stateless_call([*map(tf.constant, weights)], [*map(tf.constant, states)], x, training=training)
        return self._added

    def values(self, x: Any, weights: Sequence[np.ndarray], draw: int, training: bool) -> dict[Key, float]:
        return {key: float(loss) for key, loss in self._run(x, weights, draw, training)}

    def depends_on_rows(self, key: Key) -> bool:
        """Whether it is made of the rows at all; if not it is what weights, or nothing, give."""
        with tf.Graph().as_default() as graph:
            x = keras.tree.map_structure(lambda leaf: tf.compat.v1.placeholder(leaf.dtype, leaf.shape), self._take(self.x, self.rows))
            inputs = {leaf.op for leaf in keras.tree.flatten(x)}
            waiting = [loss.op for at, loss in self._run(x, self.weights, 0, True) if at == key and getattr(loss, "graph", None) is graph]
            seen = set(waiting)
            while waiting:
                operation = waiting.pop()
                if operation in inputs:
                    return True
                more = {tensor.op for tensor in operation.inputs} - seen
                seen |= more
                waiting += more
        return False

    # -- judging what it adds --------------------------------------------------------------------------------------

    def judged(self, training: bool) -> dict[Key, str]:
        """Of each added loss MEAN, SUM, or why it is neither."""
        found: dict[Key, str] = {}
        for weights, disturb in ((self.weights, 0.0), (_disturbed(self.weights, 0.3), 0.0), (_disturbed(self.weights, 1.0), 1.0)):
            judged = self._judged(weights, disturb, training)
            for key, scales in judged.items():
                before = found.get(key, _UNKNOWN)
                settled = {scales, before} - {_UNKNOWN, _WEAK} or ({_WEAK} & {scales, before}) or {_UNKNOWN}
                found[key] = settled.pop() if len(settled) == 1 else _OTHER
            if not {_UNKNOWN, _WEAK} & set(found.values()):
                break
        return {key: MEAN if scales == _WEAK else scales for key, scales in found.items()}

    def _judged(self, weights: Sequence[np.ndarray], disturb: float, training: bool) -> dict[Key, str]:
        x = keras.tree.map_structure(lambda leaf: _sound(leaf, disturb), self._take(self.x, self.rows))
        batches = [[place] for place in range(ROWS)] + [list(range(ROWS)), [0, 0, 1]]
        batches = [self._take(x, batch) for batch in batches]

        def look(draw: int) -> list[dict[Key, float]]:
            return [self.values(batch, weights, draw, training) for batch in batches]

        first, again = look(0), self.values(batches[ROWS], weights, 1, training)
        keys = first[ROWS].keys()
        if any(one.keys() != keys for one in first):
            return dict.fromkeys(keys, _OTHER)
        result = {key: _verdict([one[key] for one in first], self.tolerance) for key in keys}
        random = [key for key in keys if again.get(key) != first[ROWS][key] and result[key] == _OTHER]
        if random:
            draws = [first, *(look(draw) for draw in range(1, _DRAWS))]
            result |= {key: _verdict_of_draws(np.array([[one[key] for one in draw] for draw in draws])) for key in random}
        return result


def _verdict(values: Sequence[float], tolerance: float) -> str:
    """`values`: of each row, of all of them, and of rows 0, 0, 1."""
    rows, whole, three = np.array(values[:ROWS]), values[ROWS], values[ROWS + 1]
    scale = max(map(abs, values))
    if not np.isfinite(scale) or scale == 0:
        return _UNKNOWN  # what is not finite says as little
    total, of_three = rows.sum(), 2 * rows[0] + rows[1]
    if max(abs(whole - total), abs(three - of_three)) <= tolerance * scale:
        return SUM
    if max(abs(whole - total / ROWS), abs(three - of_three / 3)) <= tolerance * scale:
        return _WEAK if np.ptp(rows) <= tolerance * scale else MEAN
    return _OTHER


def _verdict_of_draws(draws: np.ndarray) -> str:
    """The same of what is random, [draws, values]: of its means, if they are known well enough to tell."""
    means, errors = draws.mean(0), draws.std(0) / np.sqrt(len(draws))
    for scales, parts in ((SUM, 1), (MEAN, ROWS)):
        expected, uncertain = means[:ROWS].sum() / parts, np.hypot(errors[ROWS], np.linalg.norm(errors[:ROWS]) / parts)
        if abs(means[ROWS] - expected) <= 4 * uncertain and uncertain <= _CLEAR * abs(expected):
            return scales
    return _OTHER


def _disturbed(weights: Sequence[np.ndarray], by: float) -> list[np.ndarray]:
    """Other weights: an initial 0 can hide what a loss depends on."""
    random = np.random.default_rng(0)
    return [(weight + by * random.normal(size=weight.shape) * (np.std(weight.astype(np.float64)) or 0.1)).astype(weight.dtype) for weight in weights]


def _sound(leaf: Any, disturb: float) -> tf.Tensor:
    """A tensor without NaN, and, with `disturb`, with other values in each row, if it holds numbers at all."""
    leaf = tf.convert_to_tensor(leaf)
    if not leaf.dtype.is_floating:
        return leaf
    values = tf.where(tf.math.is_finite(leaf), leaf, tf.zeros_like(leaf))
    noise = tf.constant(np.random.default_rng(1).normal(size=leaf.shape), leaf.dtype)
    return values + disturb * noise * (tf.math.reduce_std(values) + tf.cast(values.shape.rank is not None, leaf.dtype))


def _is_of_keras(layer: keras.Layer) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"


def _not_training(call: Callable) -> Callable:
    return lambda *arguments, **options: call(*arguments, **{**options, "training": False})


def found_by_the_chief(runtime: Runtime, model: keras.Model, rows: Callable[[], Any]) -> tuple[AddedLoss, ...]:
    """`added_losses` of the chief, with x = `rows()`, on every worker. A collective, if the model may add losses. Raises ConfigError."""
    if not may_add(model):
        return ()
    told, layers = b"", list(model._flatten_layers())
    if runtime.rank == 0:
        try:
            found = added_losses(model, rows())
            told = json.dumps([[next(number for number, layer in enumerate(layers) if layer is one.layer), one.place, one.scales] for one in found]).encode()
        except ConfigError as error:
            told = json.dumps(str(error)).encode()
    length = runtime.broadcast([np.array(len(told), np.int64)])[0]
    told = json.loads(runtime.broadcast([np.frombuffer(told.ljust(int(length)), np.uint8)])[0].tobytes())
    if isinstance(told, str):
        raise ConfigError(told)
    return tuple(AddedLoss(layers[number], place, scales) for number, place, scales in told)


# -- sums as means -----------------------------------------------------------------------------------------------------


class SumsAsMeans:
    """Layers that, within `counting`, multiply each SUM by rows of the whole batch / rows of the part that the model is called with."""

    def __init__(self, added: Sequence[AddedLoss]):
        self._now = threading.local()  # replicas of one process are threads
        of_layer: dict[int, tuple[keras.Layer, list[str]]] = {}
        for one in added:
            of_layer.setdefault(id(one.layer), (one.layer, []))[1].append(one.scales)
        for layer, scales in of_layer.values():
            if SUM in scales:
                layer.add_loss = self._counting(layer.add_loss, id(layer), scales)

    @contextlib.contextmanager
    def counting(self, factor: tf.Tensor | float) -> Iterator[None]:
        """Within it are one forward pass of the model, or several, and their backward passes, which may make them again."""
        self._now.factor, self._now.places = factor, {}
        try:
            yield
        finally:
            self._now.factor = None

    def _counting(self, plain: Callable, layer: int, scales: Sequence[str]) -> Callable:
        def add_loss(loss: Any) -> None:
            factor = getattr(self._now, "factor", None)
            for each in keras.tree.flatten(loss) if factor is not None else ():
                place = self._now.places.get(layer, 0)
                self._now.places[layer] = (place + 1) % len(scales)  # every call of the model adds as many
                if each.dtype in (tf.float16, tf.bfloat16):
                    each = tf.cast(each, tf.float32)  # noqa: PLW2901 - the product could be too large
                plain(each * tf.cast(factor, each.dtype) if scales[place] == SUM else each)
            if factor is None:
                plain(loss)

        return add_loss
