"""Finds out, by trying, how losses that layers add (`add_loss`, activity regularizers) depend on the rows of a batch.

The losses that a model adds for the rows of each worker must combine to the loss that one process adds for all rows.
The value of a loss alone does not tell how. A mean over rows, and a loss that does not depend on rows, must be averaged
by rows; a sum must be added up. For anything else (a maximum, a mean over unmasked rows, the square of a mean) the
parts do not determine the whole. So each loss is computed for single rows and for the same rows together, with
temporary values of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.code_origin import is_of_keras
from tfdist.control.exit_codes import ConfigError
from tfdist.control.user_errors import first_line
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import of_the_chief
from tfdist.training.row_checks import row_gradients
from tfdist.training.row_checks.model_probe import ROWS, LossKey, Probe, Take
from tfdist.training.row_checks.reductions import MEAN, NEITHER, SUM, ZERO, LossValues, Reduction
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.sums_as_means import AddedLoss, SumsAsMeans
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import disturbed

_FIX = "make it keras.ops.mean or keras.ops.sum over the rows (the first dim) of one value for each row"
_OF_REGULARIZER = (
    " (if its activity_regularizer adds it: let that return keras.ops.sum, as Keras divides it by the number of rows)"
)


def may_add(model: keras.Model) -> bool:
    """Returns whether some layer could add a loss. False is certain; any layer of the user's own counts as True."""
    return any(
        layer.activity_regularizer is not None or not is_of_keras(layer) for layer in keras_layers.all_layers(model)
    )


def _adds_as_keras_does(layer: keras.Layer) -> bool:
    """Returns whether what a layer adds is computed by Keras' own code, which is a mean or a sum for any rows."""
    regularizer = layer.activity_regularizer
    return is_of_keras(layer) and (regularizer is None or is_of_keras(regularizer))


def take_rows(x: Any, rows: Sequence[int]) -> Any:
    """Returns some rows of a nest of arrays or tensors."""
    return keras.tree.map_structure(lambda leaf: tf.gather(leaf, list(rows)), x)


def added_losses(
    model: keras.Model,
    x: Any,
    take: Take = take_rows,
    count: int | None = None,
    proofs: Proofs | None = None,
    otherwise: str = "train with one replica and --accumulation=1",
    training: bool = True,
) -> tuple[AddedLoss, ...]:
    """Finds the losses that `model` adds in training (or in evaluation, if not `training`), in the order of
    `model.losses`. All of its variables and states stay unchanged.

    Runs the model a few times, not compiled. Not for a model whose layers communicate with other workers.

    Args:
      x: rows to try the model with, as it is called with them; a few are enough.
      take: (x, numbers of rows) -> an x of these rows; a row may be taken twice.
      count: number of rows; None: as the first tensor of `x` says.
      proofs: of this model, if its graphs are of use elsewhere or its batches have more than a few rows.
      otherwise: advice for the user, as an alternative to fixing the loss.
    Raises: ConfigError if a loss is neither a mean nor a sum over rows.
    """
    if not may_add(model):
        return ()
    count = int(keras.tree.flatten(x)[0].shape[0]) if count is None else count
    proofs = proofs or Proofs(model)
    if proofs.of(x, take, training).adds_nothing:
        return ()
    probe = Probe(model, x, take, count)
    with probe.watching(), batch_norm.each_alone():
        values = LossValues(probe, training)
        found = values.judged()
        # Perhaps because of something that only training does; and a loss that is 0 in evaluation may not be 0 in
        # training.
        if (doubtful := NEITHER if training else ZERO) in found.values():
            other = LossValues(probe, not training).judged()
            if other.keys() == found.keys():  # otherwise the same place may belong to another loss
                found = {key: other[key] if found[key] == doubtful else found[key] for key in found}
        if not all(_adds_as_keras_does(probe.layers[key.layer]) for key in found):
            found = values.tried_apart(found)
            found = values.tried_whole(found, proofs.tried) if proofs.tried > ROWS else found
            found |= dict.fromkeys(_with_mixed_gradients(probe, found) if training else (), NEITHER)
        for key, reduction in found.items():
            if reduction == ZERO and not probe.depends_on_rows(key, training):
                found[key] = MEAN
    for key, reduction in found.items():
        if reduction not in (MEAN, SUM):
            raise ConfigError(_refusal(probe.layers[key.layer], key.place, reduction, otherwise, training))
    return tuple(
        AddedLoss(probe.layers[key.layer], key.place, found[key], probe.values_of(key)) for key in sorted(found)
    )


def _with_mixed_gradients(probe: Probe, found: dict[LossKey, Reduction]) -> list[LossKey]:
    """Returns the losses that are sums or means over rows although their gradients are not."""
    weights = [tf.constant(weight) for weight in disturbed(probe.weights, 0.3)]

    def mixed(losses: dict[LossKey, Reduction]) -> bool:
        try:
            return row_gradients.mix(probe, weights, 0.3, losses)
        except Exception:  # noqa: BLE001 - user code may raise anything; without a gradient nothing is known
            return False

    judged = {key: reduction for key, reduction in found.items() if reduction in (MEAN, SUM)}
    return [key for key, reduction in judged.items() if mixed({key: reduction})] if judged and mixed(judged) else []


def _refusal(layer: keras.Layer, place: int, reduction: Reduction, otherwise: str, training: bool) -> str:
    fix = _FIX if layer.activity_regularizer is None else _FIX + _OF_REGULARIZER
    what = f"The loss number {place + 1} that layer {layer.name} adds{'' if training else ' in evaluation'}"
    if reduction == ZERO:
        return (
            f"{what} is 0 whatever was tried, so it is unknown whether it is a mean or a sum over rows: {fix}, that is"
            " not 0 at the start."
        )
    return (
        f"{what} is neither a mean nor a sum over the rows of a batch (such as a maximum, or a mean over what a mask"
        " leaves), or its gradient is not, so workers and micro-batches, which have some of the rows each, cannot add"
        f" it up: {fix}, or {otherwise}."
    )


def found_by_the_chief(
    runtime: Runtime, model: keras.Model, rows: Callable[[], Any], proofs: Proofs | None = None
) -> SumsAsMeans:
    """Makes `SumsAsMeans`, on every worker, from the result of the chief's `added_losses` for x = `rows()`.

    A collective call, if the model may add losses. Raises ConfigError.
    """
    if not may_add(model):
        return SumsAsMeans(())
    layers = list(keras_layers.all_layers(model))
    with generators_kept():
        found = of_the_chief(runtime, lambda: _as_plain(model, layers, rows(), proofs))
    return SumsAsMeans(
        [AddedLoss(layers[number], place, Reduction(reduction)) for number, place, reduction in found["found"]],
        layers if found["failed"] else (),
        found["failed"],
    )


def _as_plain(model: keras.Model, layers: Sequence[keras.Layer], x: Any, proofs: Proofs | None) -> dict[str, Any]:
    """Returns the result of `added_losses`, or why it failed, in a form that can be sent. Raises ConfigError."""
    try:
        found = added_losses(model, x, proofs=proofs)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - e.g. the model takes batches of one size only; it may add nothing
        return {
            "found": [],
            "failed": f"{type(error).__name__}: {first_line(error)[:200]}",
        }
    return {
        "found": [
            [next(number for number, layer in enumerate(layers) if layer is one.layer), one.place, one.reduction.value]
            for one in found
        ],
        "failed": "",
    }
