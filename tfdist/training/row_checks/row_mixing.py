"""Finds out whether a model mixes rows: whether its output for a row depends on the other rows of its batch.

For example, a layer that takes the mean over the rows of its batch would take it over the rows of one worker or
micro-batch: silently a different number than in one process. (BatchNormalization is synchronized and no such layer.)
If the model's graph does not prove that outputs are independent of other rows (row_proof.py), the model is tried
(mixing_trial.py), by all workers together: each makes some of the attempts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.code_origin import is_of_keras
from tfdist.compat.tensorflow_random import draws_undone
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import any_worker
from tfdist.training.row_checks.added_losses import take_rows
from tfdist.training.row_checks.calm_layers import holds_function_over_rows, holds_own_function
from tfdist.training.row_checks.mixing_trial import ATTEMPTS, Attempt, Trial
from tfdist.training.row_checks.model_probe import Probe, Take
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import disturbed


def may_mix(model: keras.Model) -> bool:
    """Returns whether a model could mix rows. False for a model that consists of Keras' layers only, none of which
    works along the rows."""
    layers = keras_layers.all_layers(model)
    if any(_is_suspect(layer) for layer in layers):
        return True
    return any(not isinstance(each, keras.Layer) for layer in layers for each in getattr(layer, "operations", ()))


def _is_suspect(layer: keras.Layer) -> bool:
    holds = holds_own_function if isinstance(layer, keras.Model) else holds_function_over_rows
    return not is_of_keras(layer) or _works_along_rows(layer) or holds(layer)


def _works_along_rows(layer: keras.Layer) -> bool:
    axes = keras.tree.flatten([getattr(layer, name, None) for name in ("axis", "axes")])
    along = any(isinstance(axis, int) and _may_be_rows(axis, layer) for axis in axes)
    return along or isinstance(layer, keras.layers.MelSpectrogram) or _pads_to_rows(layer) or _mixes_always(layer)


def _may_be_rows(axis: int, layer: keras.Layer) -> bool:
    """Returns whether an axis of a layer's inputs may be the first. If their rank is unknown, -1 is not."""
    ranks = {len(tensor.shape) for tensor in keras_layers.inputs_of(layer)}
    return axis == 0 or any(axis == -rank for rank in ranks) or (not ranks and axis < -1)


def _pads_to_rows(layer: keras.Layer) -> bool:
    """Returns whether the layer pads all rows to the length of the longest."""
    if not isinstance(layer, keras.layers.TextVectorization):
        return False
    config = layer.get_config()
    return config["output_mode"] == "int" and config["output_sequence_length"] is None


def _mixes_always(layer: keras.Layer) -> bool:
    """Returns whether a layer mixes rows in a way that no trial shows: layers of Keras that work in training alone,
    which a trial leaves out (pairs that are drawn at random, one histogram of all images; RandAugment and AugMix hold
    an Equalization), and the scales of float8, which come from the largest number of all rows, of this step and
    previous ones."""
    in_training = isinstance(layer, (keras.layers.MixUp, keras.layers.CutMix, keras.layers.Equalization))
    return in_training or getattr(layer, "quantization_mode", None) == "float8"


def refuse_unknown_rows(model: keras.Model, where: str, fix: str) -> None:
    """Raises ConfigError for a model that must not be trained on batches whose number of rows is not known before they
    come. where: which batches these are; fix: what the user can do."""
    for layer in keras_layers.all_layers(model):
        if isinstance(layer, keras.layers.RandomElasticTransform):  # it takes the number for 1, and says nothing
            sentence = (
                f"Where the number of rows is not known before a batch comes, {where}, the layer {layer.name} of"
                f" {model.name}, a RandomElasticTransform of Keras, puts the first image in the place of others: {fix},"
                " or map it over the single images of the data."
            )
            raise keras_layers.keep_message(ConfigError(sentence))


class Share(NamedTuple):
    """A worker's share of the attempts. With as many workers as attempts, each makes one."""

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
    """Returns whether the outputs of `model` for a row, in inference or in training, change with the other rows.

    If the graph does not prove that they do not, runs the model a few times, not compiled. All of its variables and
    states stay unchanged. False if it draws random numbers that cannot be repeated (from NumPy's and Python's
    generators): then differences tell nothing.

    Args:
      proofs: of this model, if its graphs are of use elsewhere or its batches have more than a few rows.
      Others: as for `added_losses`.
    """
    if any(_mixes_always(layer) for layer in keras_layers.all_layers(model)):
        return True
    count = int(keras.tree.flatten(x)[0].shape[0]) if count is None else count
    proofs, attempts = proofs or Proofs(model), ATTEMPTS[share.index :: share.number]
    attempts = [attempt for attempt in attempts if not proofs.of(x, take, attempt.training).apart]
    if not attempts:
        return False
    probe = Probe(model, x, take, count)

    def find(alike: list[Attempt], weights: Sequence[np.ndarray]) -> bool:
        """Makes the attempts that use the same weights, which are copied to the device once and freed afterward."""
        there = [tf.constant(weight) for weight in weights]
        trials = (Trial(each, probe, there, proofs.of(x, take, each.training).draws) for each in alike)
        return any(trial.finds_mixing(proofs.tried, proofs.part) for trial in trials)

    with draws_undone(), probe.watching(), batch_norm.each_alone():
        return any(
            find(list(alike), disturbed(probe.weights, by))
            for by, alike in itertools.groupby(attempts, lambda attempt: attempt.disturbed)
        )


# Reasons why rows must not be mixed, for a sentence.
IN_PARTS = "workers and micro-batches have some of the rows each"
FILLED_UP = "several workers fill up the last batch of an evaluation"  # also workers that share one replica


def refuse(
    runtime: Runtime,
    model: keras.Model,
    rows: Callable[[], Any],
    proofs: Proofs | None = None,
    reason: str = IN_PARTS,
) -> None:
    """Raises ConfigError on all workers if one finds that the model mixes x = `rows()`. A collective call, if the model
    may mix rows."""
    if may_mix(model) and found_together(runtime, model, rows, proofs=proofs):
        fix = (
            "take statistics over rows with keras.layers.BatchNormalization, train on one device with"
            " --accumulation=1, or let such layers mix the rows of their micro-batch with --row_mixing=replica"
        )
        raise ConfigError(sentence(model, fix, reason))


def found_together(
    runtime: Runtime,
    model: keras.Model,
    rows: Callable[[], Any],
    take: Take = take_rows,
    count: int | None = None,
    proofs: Proofs | None = None,
) -> bool:
    """Returns whether one of the workers, which share the attempts, finds that the model mixes x = `rows()`. A
    collective call.

    False for a model that cannot be tried: a model that fails with another number of rows cannot be spread, and reports
    this itself.
    """
    workers = min(runtime.size, len(ATTEMPTS))
    share = Share(workers - 1 - runtime.rank, workers)  # the fewest attempts for the chief, which has more to do
    found = False
    with generators_kept():
        x = rows() if share.index >= 0 else None
        with contextlib.suppress(Exception):  # user code may raise anything
            found = share.index >= 0 and mixes(model, x, take, count, share, proofs)
    return any_worker(runtime, found)


def sentence(model: keras.Model, fix: str, reason: str = IN_PARTS) -> str:
    """Returns the message that refuses a model which mixes rows. fix: what the user can do."""
    layers = keras_layers.all_layers(model, include_self=False)
    suspects = [layer.name for layer in layers if _is_suspect(layer)]
    if padding := [layer.name for layer in layers if _pads_to_rows(layer)]:
        fix = f"give {', '.join(padding)} an output_sequence_length, or {fix}"
    looked_at = f" (look at {', '.join(suspects[:5])})" if suspects else ""
    return (
        f"What {type(model).__name__} {model.name} returns for a row depends on the other rows of its batch, on their"
        f" number or on its place among them, or its gradient does{looked_at}, but {reason}, so they would compute"
        f" something else than one process: {fix}."
    )
