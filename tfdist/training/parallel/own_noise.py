"""Random layers between cut layers: each rank sees a part of what one process would see, and must draw different
numbers for it than the other ranks. Ranks along `model` share the states of seed generators, as whole layers require.
With equal draws on the parts, dropout would drop the same units on all ranks, unit k together with k + F / m and so on,
which is another distribution.

Draws with the same dims as in the whole model stay the same on all ranks: for instance one number per row, shared by
all units. So the model is traced before and after it is cut, and the dims of its draws are compared, one draw after the
other. Where they do not tell, the layer is refused with an error.

Legend. F units of a layer, m ranks along `model`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.keras_draws import Dims, seeds_changed
from tfdist.compat.keras_layers import keep_message
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.compat.tensorflow_graphs import draws_anew, kinds_made_here
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.collectives import Group

_ROWS = (840, 1680)  # of two traces: dims that differ between them count rows; divisible by what models may ask for

Sizes = tuple[tuple[int | None, ...], ...]  # of each dim, one size per trace


class Draw(NamedTuple):
    """The dims of a layer's random draw, in each trace."""

    drawn: Sizes | None  # None: not known, as it is not drawn by keras.random
    inputs: Sizes  # dims of the layer's first input, without the first dim
    is_fixed: bool  # whether the seed is an integer: always the same numbers


@dataclass
class Draws:
    """The draws of a model's layers, and the inputs of those that draw by tf.random.

    of_layer: (id of the layer, whether in training) -> its draws in order.
    """

    of_layer: dict[tuple[int, bool], list[Draw]] = field(default_factory=dict)
    by_tensorflow: dict[tuple[int, bool], list[Dims]] = field(default_factory=dict)
    has_failed: bool = False  # the model could not be called


def own_noise(layer: keras.Layer, group: Group, is_part: Callable[[Dims | None], bool] = lambda drawn: True) -> dict:
    """Makes other ranks draw other numbers in a layer whose draws are for a part. is_part: takes the dims of a draw,
    None if they are not known. Returns {}: no variable is cut.

    The states of seed generators stay the same on all ranks.
    """
    inner = layer.call

    def own(seed: tf.Tensor, drawn: Dims | None) -> tf.Tensor:
        return _folded(seed, group.index) if is_part(drawn) else seed

    def call(*args: Any, **options: Any) -> Any:
        with seeds_changed(own, layer):
            return inner(*args, **options)

    layer.call = call
    return {}


def _folded(seed: tf.Tensor, number: int) -> tf.Tensor:
    fold_in = tf.random.experimental.stateless_fold_in  # pyright: ignore[reportAttributeAccessIssue] - not in stubs
    return tf.cast(fold_in(seed, number), seed.dtype)


# -- tracing what is drawn -----------------------------------------------------------------------------------------


def draws_of(model: keras.Model, rows: Any = None) -> Draws:
    """The draws in inference and in training. rows: x of some samples; None: the model's inputs. No collective call."""
    found = Draws()
    layers = keras_layers.all_layers(model)
    for training in (False, True):
        traces: list[Draws] = []
        for count in _ROWS:
            if not traces or traces[0].of_layer:  # else there is nothing to compare
                traces.append(_traced(model, layers, training, count, rows))
        for key in traces[0].of_layer:
            some, others = (each.of_layer.get(key, []) for each in (traces[0], traces[-1]))
            found.of_layer[key] = [_both(one, other) for one, other in zip(some, others, strict=False)]
            found.has_failed |= len(some) != len(others)
        found.by_tensorflow |= traces[0].by_tensorflow
        found.has_failed |= any(each.has_failed for each in traces)
    for layer in layers:  # drop the losses: they are tensors of those graphs
        keras_layers.record_losses(layer, [])
    return found


def _both(one: Draw, other: Draw) -> Draw:
    """Combines a draw of two traces."""

    def zipped(some: Sizes, others: Sizes) -> Sizes:
        return tuple(a + b for a, b in zip(some, others, strict=True)) if len(some) == len(others) else some + others

    drawn = None if one.drawn is None or other.drawn is None else zipped(one.drawn, other.drawn)
    return Draw(drawn, zipped(one.inputs, other.inputs), one.is_fixed)


def _traced(model: keras.Model, layers: Sequence[keras.Layer], training: bool, count: int, rows: Any) -> Draws:
    """Returns the draws of one trace with `count` rows."""
    found = Draws()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(attribute_replaced(layer, "call", _noting(layer, training, found)))
        stack.enter_context(functions_inline())  # a tf.function would keep what it is traced with
        try:
            inputs = keras.tree.map_structure(
                lambda each: tf.TensorSpec([count, *each.shape[1:]], each.dtype), model.input if rows is None else rows
            )
            tf.function(lambda x: model(x, training=training), autograph=False).get_concrete_function(inputs)
        except Exception:  # noqa: BLE001 - whatever the user's code raises
            found.has_failed = True
    return found


def _noting(layer: keras.Layer, training: bool, found: Draws) -> Callable:
    inner, key = layer.call, (id(layer), training)

    def call(*args: Any, **options: Any) -> Any:
        inputs = _dims_of_first(args, options)

        def note(drawn: Dims | None, is_fixed: bool = True) -> None:
            sizes = None if drawn is None else tuple((dim,) for dim in drawn)
            found.of_layer.setdefault(key, []).append(Draw(sizes, tuple((dim,) for dim in inputs), is_fixed))

        def unchanged(seed: tf.Tensor, drawn: Dims | None) -> tf.Tensor:
            note(drawn, False)
            return seed

        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        with seeds_changed(unchanged, layer, note):
            result = inner(*args, **options)
        if any(map(draws_anew, kinds_made_here(graph, before))):
            found.by_tensorflow.setdefault(key, []).append(inputs)
        return result

    return call


def _dims_of_first(args: tuple, options: dict[str, Any]) -> Dims:
    tensors = [leaf for leaf in keras.tree.flatten((args, options)) if isinstance(leaf, tf.Tensor | keras.KerasTensor)]
    return tuple(tensors[0].shape)[1:] if tensors else ()


# -- deciding ------------------------------------------------------------------------------------------------------


def own_noise_on_parts(model: keras.Model, whole: Draws, cut: Draws, group: Group, known: Set[int]) -> None:
    """Makes layers draw different numbers on each rank where dims of draws differ between the cut and the whole model.
    known: ids of layers that have rules of their own.

    Raises ConfigError for a layer for which this cannot be decided.
    """
    if whole.has_failed and any(map(keras_layers.own_seed_generators, keras_layers.all_layers(model))):
        raise ConfigError(
            f"--mesh cuts layers of {model.name}, but it cannot be called with {_ROWS[0]} rows, so what its random"
            " layers draw is not known: let it take any number of rows, or give the workers to data=."
        )
    for layer in keras_layers.all_layers(model):
        if id(layer) in known:
            continue
        pairs, inputs = [], []
        for key in ((id(layer), False), (id(layer), True)):
            before, after = whole.of_layer.get(key, []), cut.of_layer.get(key, [])
            if len(before) != len(after) and not cut.has_failed:
                _refuse(layer, f"draws {len(before)} times, and then {len(after)} times for a part of its input")
            pairs += zip(before, after, strict=False)
            inputs += zip(whole.by_tensorflow.get(key, ()), cut.by_tensorflow.get(key, ()), strict=False)
        if any(one != other for one, other in inputs):
            _refuse(layer, "draws by tf.random, the same numbers on every worker for its part")
        if pairs:
            own_noise(layer, group, _rule(layer, pairs))


def _rule(layer: keras.Layer, pairs: Sequence[tuple[Draw, Draw]]) -> Callable[[Dims | None], bool]:
    """Returns the `is_part` argument of own_noise. pairs: (in the whole model, in the cut model)."""
    if any(cut.is_fixed and _differ(whole, cut) for whole, cut in pairs):
        _refuse(layer, "draws with a whole number as seed, the same numbers on every worker for its part")
    parts = [cut.drawn for whole, cut in pairs if _differ(whole, cut)]
    others = [cut.drawn for whole, cut in pairs if not _differ(whole, cut)]
    for whole, cut in pairs:
        if not _differ(whole, cut) and not _is_shared_by_units(whole, cut):
            _refuse(layer, f"draws {_words(cut.drawn)} numbers whatever part of its input it sees")
    if not parts or not others:
        return lambda drawn: bool(parts)
    if any(_may_be_equal(one, other) for one in parts for other in others):
        _refuse(layer, f"draws {_words(parts[0])} numbers for a part, and as many for something whole")
    return lambda drawn: any(_fits(drawn, each) for each in parts)


def _differ(whole: Draw, cut: Draw) -> bool:
    return whole.inputs != cut.inputs if cut.drawn is None else whole.drawn != cut.drawn


def _is_shared_by_units(whole: Draw, cut: Draw) -> bool:
    """Whether a draw with unchanged dims is right on a part: it has one number for all units, and varies only along
    rows and dims that are whole."""
    if whole.inputs == cut.inputs or cut.drawn is None:
        return True
    kept = {one for one, other in zip(whole.inputs, cut.inputs, strict=False) if one == other}
    return all(_size(dim) in (None, 1) or dim in kept for dim in cut.drawn[1:]) and (
        len(cut.drawn) != 1 or cut.drawn[0] not in whole.inputs
    )


def _size(dim: tuple[int | None, ...]) -> int | None:
    """The size of a dim if it is the same in all traces; None if the dim counts rows."""
    return dim[0] if len({*dim}) == 1 else None


def _may_be_equal(one: Sizes | None, other: Sizes | None) -> bool:
    """Whether the two may have equal dims for some number of rows."""
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        None in (_size(a), _size(b)) or a == b for a, b in zip(one, other, strict=True)
    )


def _fits(dims: Dims | None, pattern: Sizes | None) -> bool:
    """Whether dims may match a pattern in which rows are any number."""
    if dims is None or pattern is None:
        return dims is pattern
    return len(dims) == len(pattern) and all(
        None in (dim, _size(each)) or dim == _size(each) for dim, each in zip(dims, pattern, strict=True)
    )


def _words(dims: Sizes | None) -> str:
    return " x ".join("rows" if _size(dim) is None else str(_size(dim)) for dim in dims or ()) or "some"


def _refuse(layer: keras.Layer, what: str) -> None:
    raise keep_message(
        ConfigError(
            f"--mesh cuts the layers around {layer.name}, which {what}: draw in a layer that is called only there, with"
            " keras.random, and in the shape of its input (or one number for all units, as (rows, 1)), or give the"
            " workers to data=."
        )
    )
