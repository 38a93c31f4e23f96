"""Finds the position of a running `keras.Model.fit` in its data, and takes a resumed one there.

With steps_per_epoch Keras keeps one iterator across epochs, and begins the next pass when the data ends, even in the
middle of an epoch. Without it, Keras makes an iterator for each epoch, and one more that it drops. Each new iterator
draws the next order of a shuffle, and data in Python may keep any state. So this module steps through the past epochs
with Keras' own EpochIterator, in its order, including validation, and discards what is read on the way. Nothing is read
where passes do not depend on what earlier ones have read (arrays, and datasets of the operations listed here): for
these, only the batches of the current pass are read.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_epochs, tensorflow_data, tensorflow_graphs
from tfdist.compat.keras_epochs import EpochIterator
from tfdist.control.exit_codes import CheckpointError

# Datasets whose iterators always start afresh, whatever earlier iterators have read. Not `repeat`: a shuffle in it
# draws an order whenever a pass ends. Not `cache`: it keeps the order of the first pass.
_INDEPENDENT = {
    "TensorDataset",
    "TensorSliceDataset",
    "RangeDataset",
    "ShuffleDataset",
    "BatchDataset",
    "ParallelBatchDataset",
    "PaddedBatchDataset",
    "MapDataset",
    "ParallelMapDataset",
    "PrefetchDataset",
    "TakeDataset",
    "SkipDataset",
    "ShardDataset",
    "FilterDataset",
    "OptionsDataset",
    "ZipDataset",
    "UnbatchDataset",
    "TFRecordDatasetV2",
    "TextLineDatasetV2",
    "FixedLengthRecordDatasetV2",
    "FlatMapDataset",
    "InterleaveDataset",
    "ParallelInterleaveDataset",
}
# Those with one element for each of their input.
_ONE_FOR_ONE = {"MapDataset", "ParallelMapDataset", "PrefetchDataset", "OptionsDataset"}
# Stateful operations allowed in their functions: calls, files, and random numbers, which start afresh with each
# iterator.
_ANEW = {
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "While",
    "Assert",
    "ReadFile",
    "TFRecordDataset",
    "TFRecordDatasetV2",
    "TextLineDataset",
    "TensorSliceDataset",
    "TensorDataset",
    "RangeDataset",
    "FixedLengthRecordDatasetV2",
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "Multinomial",
}


@dataclass(frozen=True)
class RunningFit:
    """The local variables of the running `fit` that has called a callback."""

    model: keras.Model
    values: Mapping[str, Any]

    @classmethod
    def of(cls, model: keras.Model) -> RunningFit:
        """Finds the running fit in the call stack. Raises CheckpointError if there is no Keras `fit` of this model."""
        frame = inspect.currentframe()
        while frame is not None:
            values = frame.f_locals if frame.f_code.co_name == "fit" else {}
            if values.get("self") is model and isinstance(values.get("epoch_iterator"), EpochIterator):
                return cls(model, dict(values))
            frame = frame.f_back
        raise CheckpointError(
            "The backup works with Keras' own fit, which this model does not use: save and restore in your own loop."
        )

    @property
    def iterator(self) -> EpochIterator:
        """The iterator over the training data; each fit makes one."""
        return self.values["epoch_iterator"]

    def begins_within_a_pass(self, epoch: int, ends: Mapping[str, int | None] | None = None) -> bool:
        """Whether this fit has an epoch of this number, and goes on in it with a pass over the data that an earlier
        epoch has begun. ends: see `go_to`."""
        steps, execution = self.iterator.steps_per_epoch, self.iterator.steps_per_execution
        past = epoch - self.values["initial_epoch"]
        if not steps or past <= 0 or epoch >= self.values["epochs"]:
            return False
        of_an_epoch = math.ceil(steps / execution) * execution  # batches
        adapter = self.iterator.data_adapter
        if length := adapter.num_batches or (ends or {}).get("training"):
            past %= math.ceil(length / of_an_epoch)  # when the data end, the epoch ends
        return bool(past * of_an_epoch % (_repeated(adapter) or length or math.inf))

    def saves_within_an_epoch(self, save_freq: int | str) -> bool:
        """Whether backups are saved, after so many batches or each epoch, in the middle of epochs."""
        steps = self.iterator.num_batches
        return isinstance(save_freq, int) and bool(not steps or save_freq % steps)

    def saves_within_a_pass(self, save_freq: int | str) -> bool:
        """The same for passes over the data: `steps_per_epoch` may end epochs in the middle of one."""
        ends_there = self.begins_within_a_pass(self.values["initial_epoch"] + 1)
        return ends_there or self.saves_within_an_epoch(save_freq)

    def ends(self) -> dict[str, int | None]:
        """The batch at which the data ended, if its length was not known before, and the one at which a callback has
        stopped the fit within its last epoch; JSON to be saved."""
        evaluated = keras_epochs.validation_iterator(self.model)
        is_cut_short = self.model.stop_training and keras_epochs.is_within_an_epoch(self.iterator)
        return {
            "training": keras_epochs.batches_in_an_epoch(self.iterator),
            "validation": evaluated and keras_epochs.batches_in_an_epoch(evaluated),
            "stopped": keras_epochs.batches_read(self.iterator) if is_cut_short else None,
        }

    def go_to(self, epoch: int, ends: Mapping[str, int | None]) -> bool:
        """Advances the data to its position at the beginning of `epoch`. Returns whether all of it had to be read.

        Call when training begins. ends: the result of `ends` in the run that is resumed.
        """
        values, training = self.values, _Passes(self.iterator, ends["training"])
        validation = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has seen before that data ran out
            for past in range(values["initial_epoch"], epoch):
                # An earlier version did not write where a fit was stopped.
                training.epoch(ends.get("stopped") if past == epoch - 1 else None)
                if values["validation_data"] is not None and keras_epochs.validates_after(
                    self.model, past, values["validation_freq"]
                ):
                    validation = validation or _Passes(self._validation(), ends["validation"])
                    validation.iterator.reset()
                    validation.epoch()
            training.read_the_rest()
        return training.reads or (validation is not None and validation.reads)

    def _validation(self) -> EpochIterator:
        """Makes the iterator that `fit` would make for its first validation and then reuse."""
        values, model = self.values, self.model
        iterator = EpochIterator(
            x=values["val_x"],
            y=values["val_y"],
            sample_weight=values["val_sample_weight"],
            batch_size=values["validation_batch_size"] or values["batch_size"],
            steps_per_epoch=values["validation_steps"],
            shuffle=False,
            distribute_strategy=model.distribute_strategy,
            steps_per_execution=model.steps_per_execution,
        )
        keras_epochs.set_validation_iterator(model, iterator)
        return iterator


class _Passes:
    """An EpochIterator of Keras that is stepped through epochs without training."""

    def __init__(self, iterator: EpochIterator, end: int | None):
        self.iterator, self._end = iterator, end
        # If nobody knows where the data end (a callback ended every validation early), only reading finds out.
        has_end = bool(end or iterator.data_adapter.num_batches or iterator.steps_per_epoch)
        self.reads = not has_end or not _are_independent(iterator.data_adapter)
        self._pass: Iterator | None = None  # iterator of the current pass, and its batches still to be read
        self._unread = 0

    def epoch(self, stopped: int | None = None) -> None:
        """stopped: the batch at which training was stopped within this epoch: Keras then does not begin the next pass,
        as it does at the end of an epoch."""
        with self.iterator.catch_stop_iteration():
            for _, _, batches in self.iterator:
                if self.reads:
                    _read(batches, self.iterator.steps_per_execution)
                else:
                    self._count(batches)
                if stopped is not None and keras_epochs.batches_read(self.iterator) >= stopped:
                    break

    def _count(self, batches: Iterator) -> None:
        if batches is not self._pass:
            self._pass, self._unread = batches, 0
        if (
            self._end is not None
            and self.iterator.data_adapter.num_batches is None
            and keras_epochs.batches_read(self.iterator) >= self._end
        ):
            raise StopIteration  # as reading would
        self._unread += self.iterator.steps_per_execution

    def read_the_rest(self) -> None:
        """Reads the remaining batches of the current pass, if it is to be continued."""
        present = keras_epochs.present_pass(self.iterator)
        if self.iterator.steps_per_epoch and not self.reads and self._pass is not None and self._pass is present:
            _read(self._pass, self._unread)


def _read(batches: Iterator, count: int) -> None:
    """Raises StopIteration, as Keras' loop does, if not even one batch is left."""
    for number in range(count):
        try:
            next(batches)
        except (StopIteration, tf.errors.OutOfRangeError):
            if number == 0:
                raise StopIteration from None
            return


def _are_independent(adapter: Any) -> bool:
    read = keras_epochs.dataset_of(adapter)
    if read is not None:
        return all(
            tensorflow_data.kind(dataset) in _INDEPENDENT and all(map(_begins_anew, tensorflow_data.functions(dataset)))
            for dataset in tensorflow_data.with_inputs(read)
        )
    return keras_epochs.reads_arrays(adapter)


def _begins_anew(function: Any) -> bool:
    """Whether a function of a dataset keeps no state from one iterator to the next."""
    graph = function.function.graph.as_graph_def()
    known = {called.signature.name for called in graph.library.function}
    operations = {node.op for node in tensorflow_graphs.nodes_of(graph)}
    return not any(map(tensorflow_graphs.is_stateful, operations - known - _ANEW))


def _repeated(adapter: Any) -> int | None:
    """The number of batches after which the data are repeated; None: not known, or they are not."""
    read = keras_epochs.dataset_of(adapter)
    found = iter(()) if read is None else tensorflow_data.with_inputs(read)
    for dataset in found:
        if tensorflow_data.kind(dataset) == "RepeatDataset":
            return max(int(next(found).cardinality()), 0) or None
        if tensorflow_data.kind(dataset) not in _ONE_FOR_ONE:
            break
    return None
