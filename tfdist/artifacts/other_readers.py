"""Refuses callbacks that read the shuffled datasets of their own fit, if the fit has a backup. For validation this
matters where a validation ends before its dataset.

Each iterator of a shuffle with a seed takes the next order from the seed, also one that a callback makes, as by
`self.model.evaluate(dataset)`. A resumed fit does not call the callbacks of past epochs again, so its own iterators
would come in other orders.
"""

from __future__ import annotations

import inspect
import weakref

import keras
import tensorflow as tf

from tfdist.artifacts.data_order import reads_all_rows, seeded_shuffles, seeded_shuffles_in
from tfdist.artifacts.data_position import RunningFit
from tfdist.compat import keras_epochs, tensorflow_data
from tfdist.compat.keras_epochs import EpochIterator
from tfdist.control.exit_codes import ConfigError

# The iterators of fits with a backup -> the shuffles of which nobody else may make iterators.
_fits: weakref.WeakKeyDictionary[EpochIterator, list[tf.data.Dataset]] = weakref.WeakKeyDictionary()
_CALLED_AGAIN = ("on_train_begin", "on_train_end")  # in a resumed fit, so their iterators are made again, too


def refuse_other_readers(fit: RunningFit) -> None:
    """Raises ConfigError, from now on, where a callback makes an iterator of the fit's shuffled datasets."""
    shuffles, validated = seeded_shuffles(fit.iterator.data_adapter), fit.values.get("val_x")
    if isinstance(validated, tf.data.Dataset) and (fit.values["validation_steps"] or not reads_all_rows(validated)):
        shuffles += seeded_shuffles_in(validated)
    if shuffles:
        _fits[fit.iterator] = shuffles
        tensorflow_data.tell_of_iterators(_refuse_another_reader)


def _refuse_another_reader(dataset: tf.data.Dataset) -> None:
    """dataset: the one of which an iterator is about to be made."""
    parts = set(map(id, tensorflow_data.with_inputs(dataset)))
    fits = [fit for fit, shuffles in _fits.items() if any(id(each) in parts for each in shuffles)]
    reader, epochs, is_called_again = "code that is called in it", None, False
    frame = inspect.currentframe() if fits else None
    while frame is not None:
        name, values = frame.f_code.co_name.lstrip("_"), frame.f_locals
        is_called_again = is_called_again or name in _CALLED_AGAIN
        epochs = keras_epochs.epochs_of(frame) if epochs is None else epochs
        callback = values.get("callback") if name.startswith("on_") else None
        if isinstance(callback, keras.callbacks.Callback):  # Keras' list of callbacks calls it
            reader = f"{type(callback).__name__}.{name}"
        fit = values.get("epoch_iterator") if name == "fit" else None
        is_ours = any(fit is each for each in fits)
        if is_ours and not is_called_again and not _reads(RunningFit(values["self"], values), epochs):
            raise ConfigError(
                f"The dataset of this fit is shuffled with a seed, and {reader} reads it, too: each reader takes the"
                " next order from the seed, so that BackupAndRestore could not resume the fit in the same order: let it"
                " read a dataset of its own (call shuffle once more for it), or train without BackupAndRestore; data"
                " for validation need no shuffle (shuffle=False)."
            )
        is_called_again = is_called_again and fit is None  # a fit around it may be in another of its calls
        frame = frame.f_back


def _reads(fit: RunningFit, epochs: EpochIterator | None) -> bool:
    """Whether these are epochs of the fit itself, or of its validations."""
    return epochs is not None and epochs in (fit.iterator, keras_epochs.validation_iterator(fit.model))
