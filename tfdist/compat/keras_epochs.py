"""The epoch iterators of Keras' TensorFlow trainer, which are passed to no callback, and the data that they read."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator as EpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.exit_codes import UnsupportedError

__all__ = ["EpochIterator"]
_DATA = "_get_iterator"  # the method () -> the data that the epochs read


@contextlib.contextmanager
def data_changed(change: Callable[[tf.data.Dataset], tf.data.Dataset], read_ahead: bool = False) -> Iterator[None]:
    """Context manager in which Keras reads `change(dataset)` in place of each dataset, and reads generators no further
    than needed unless `read_ahead`. Relies on `TFEpochIterator._get_iterator`."""
    keras_own: Callable[[EpochIterator], Any] | None = getattr(EpochIterator, _DATA, None)
    if keras_own is None:
        raise UnsupportedError(f"This version of Keras reads data in another way: {_DATA} of its epochs is gone.")

    def data(epochs: EpochIterator) -> Any:
        found = keras_own(epochs)
        if not isinstance(found, tf.data.Dataset):
            return found
        whole = read_ahead or not isinstance(epochs.data_adapter, GeneratorDataAdapter)
        return change(found if whole else _not_ahead(found))

    with attribute_replaced(EpochIterator, _DATA, data):
        yield


def _not_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset of a generator without Keras' prefetching. Prefetched batches that are left at the end of a
    validation are lost, a different number on each worker, and from then on the workers hold different batches. Relies
    on `_input_dataset` of the dataset that `prefetch` returns; without it such workers are refused in the middle of a
    run."""
    inner = getattr(dataset, "_input_dataset", None)
    if inner is None or "Prefetch" not in type(dataset).__name__:
        return dataset
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return inner.with_options(options)


def none_for_placeholder(leaf: Any) -> Any:
    """A part of a batch, with None again where Keras' iterators have a placeholder for it: an Optional of TensorFlow's,
    which nothing else in a batch is."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def validation_iterator(model: keras.Model) -> EpochIterator | None:
    """Returns the iterator that `fit` has made for its validations, if any. Relies on `Trainer._eval_epoch_iterator`;
    without it the validation data of a resumed run starts from the beginning.
    """
    return getattr(model, "_eval_epoch_iterator", None)


def set_validation_iterator(model: keras.Model, iterator: EpochIterator) -> None:
    """Sets the iterator that `fit` uses for its next validations. Relies on `Trainer._eval_epoch_iterator`."""
    model._eval_epoch_iterator = iterator


def validates_after(model: keras.Model, epoch: int, frequency: Any) -> bool:
    """Whether `fit` validates after this epoch. Relies on `Trainer._should_eval`."""
    return model._should_eval(epoch, frequency)


def batches_in_an_epoch(iterator: EpochIterator) -> int | None:
    """The number of batches after which the data ended; None: not known yet. Relies on `EpochIterator._num_batches`."""
    return iterator._num_batches


def batches_read(iterator: EpochIterator) -> int:
    """The number of batches read in this epoch. Relies on `EpochIterator._steps_seen`."""
    return iterator._steps_seen


def epochs_of(frame: types.FrameType) -> EpochIterator | None:
    """The iterator whose epoch this frame runs, if it does. Relies on `EpochIterator._enumerate_iterator`, whose frame
    makes the iterators of the data; without it a fit's own reading is refused as that of a callback."""
    return frame.f_locals["self"] if frame.f_code is EpochIterator._enumerate_iterator.__code__ else None


def is_within_an_epoch(iterator: EpochIterator) -> bool:
    """Whether an epoch has begun whose batches have not all been taken. Relies on `EpochIterator._epoch_iterator`, a
    generator; without it a fit that was stopped within an epoch counts as stopped at its end."""
    return getattr(iterator._epoch_iterator, "gi_frame", None) is not None


def present_pass(iterator: EpochIterator) -> Iterator | None:
    """The iterator over the data that continues into the next epoch. Relies on `EpochIterator._current_iterator`."""
    return iterator._current_iterator


def dataset_of(adapter: Any) -> tf.data.Dataset | None:
    """The dataset that a fit reads; None for other data. Relies on keras.src's `TFDatasetAdapter._dataset`."""
    return adapter._dataset if isinstance(adapter, TFDatasetAdapter) else None


def reads_arrays(adapter: Any) -> bool:
    """Whether a fit reads arrays in memory. Relies on keras.src's `ArrayDataAdapter`."""
    return isinstance(adapter, ArrayDataAdapter)


def shuffles_arrays(adapter: Any) -> bool:
    """Whether a fit reads arrays and shuffles them. Relies on `ArrayDataAdapter._shuffle`."""
    return reads_arrays(adapter) and bool(adapter._shuffle)


def shuffles_pages(adapter: Any) -> bool:
    """Whether a fit reads the batches of a PyDataset in an order that Keras draws. Relies on keras.src's
    `PyDatasetAdapter.shuffle`."""
    return isinstance(adapter, PyDatasetAdapter) and bool(adapter.shuffle) and adapter.num_batches is not None
