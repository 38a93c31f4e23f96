"""The epoch in which a plain fit resumes: batches are passed over, and other callbacks do not see them (backup.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.generators_again import GeneratorsAgain
from tfdist.compat import keras_epochs, keras_trainer

_BATCHES = ("on_train_batch_begin", "on_train_batch_end")


class Backup(Protocol):
    """What AfterOthers calls, when all other callbacks of the fit have been called."""

    model: Any
    params: Any
    generators: GeneratorsAgain

    def begin_with(self, others: Sequence[keras.callbacks.Callback]) -> None: ...
    def after_batch(self, batch: int) -> None: ...
    def after_skipping(self) -> None: ...
    def after_epoch(self, epoch: int) -> None: ...
    def after_all(self) -> None: ...


class AfterOthers(keras.callbacks.Callback):
    """Stands behind all other callbacks of a fit, so that a backup holds what they have made of the same batch."""

    def __init__(self, backup: Backup):
        super().__init__()
        self._backup, self._all = backup, keras.callbacks.CallbackList()
        self.has_restored = False
        self.generators_of_epoch: Mapping[str, Any] = {}  # their states when the present epoch began
        self._begin_passing: Callable[[], None] = lambda: None

    def join(self, callbacks: keras.callbacks.CallbackList) -> bool:
        """Takes its place, while `on_train_begin` of the list runs. Returns whether this is the backup to restore: the
        first of the fit that has one."""
        self._all = callbacks
        # The list may be the user's own, and an earlier fit may have failed. In place: Keras iterates over it.
        for each in [each for each in callbacks.callbacks if isinstance(each, AfterOthers)]:
            if each._backup is self._backup:
                callbacks.callbacks.remove(each)
        model = self._backup.model
        self.set_model(model)
        self.set_params(self._backup.params)
        others = [each for each in callbacks.callbacks if isinstance(each, AfterOthers)]
        callbacks.callbacks.append(self)
        if any(each.has_restored for each in others):
            return False
        self._unmute()
        pass_over_nothing(model)
        keras_trainer.begin_at(model, None)
        self._forget_where_to_begin(model)
        return True

    def _forget_where_to_begin(self, model: keras.Model) -> None:
        """Undoes `begin_at` as soon as Keras has read it: if this fit fails, a later one must begin as it says."""

        def on_epoch_begin(epoch: int, logs: Mapping | None = None) -> None:
            vars(self._all).pop("on_epoch_begin")
            keras_trainer.begin_at(model, None)
            self._all.on_epoch_begin(epoch, logs)

        setattr(self._all, "on_epoch_begin", on_epoch_begin)  # noqa: B010 - it replaces a method

    def pass_over(self, count: int, metrics: Sequence[np.ndarray], check: Callable[[], None]) -> None:
        """Lets the first epoch begin with its batch number `count`; callbacks do not see the batches before it.
        metrics, check: see the function `pass_over`."""
        self._mute(count)

        def begin() -> None:
            self._backup.generators.begin_epoch()
            pass_over(self.model, count, metrics, check)

        self._begin_passing = begin

    def _mute(self, count: int) -> None:
        """Keeps the first `count` batches of an epoch, which are not trained on, from all callbacks."""

        def after_batch(batch: int, logs: Mapping | None = None) -> None:
            if batch + 1 >= count:
                self._unmute()
                self._backup.after_skipping()

        for name, function in zip(_BATCHES, (lambda batch, logs=None: None, after_batch), strict=True):
            setattr(self._all, name, function)

    def _unmute(self) -> None:
        for name in _BATCHES:
            vars(self._all).pop(name, None)

    def on_train_begin(self, logs: Mapping | None = None) -> None:
        # Keras' History is restored by itself; those of other classes have a state of their own.
        kept = [each for each in self._all.callbacks if type(each) is not keras.callbacks.History]
        left_out = (keras.callbacks.BackupAndRestore, keras.callbacks.ProgbarLogger, AfterOthers)
        self._backup.begin_with([each for each in kept if not isinstance(each, left_out)])

    def on_epoch_begin(self, epoch: int, logs: Mapping | None = None) -> None:
        # No earlier: if another callback fails before, later fits of the model would pass over their batches.
        self._begin_passing()
        self._begin_passing = lambda: None
        self.generators_of_epoch = state.generator_states()

    def on_train_batch_end(self, batch: int, logs: Mapping | None = None) -> None:
        self._backup.after_batch(batch)

    def on_epoch_end(self, epoch: int, logs: Mapping | None = None) -> None:
        self._unmute()  # where the data has ended before all batches were passed over
        self._backup.after_epoch(epoch)

    def on_train_end(self, logs: Mapping | None = None) -> None:
        self._all.callbacks = [each for each in self._all.callbacks if each is not self]
        self._backup.after_all()


def pass_over(model: Any, count: int, metrics: Sequence[np.ndarray], check: Callable[[], None]) -> None:
    """Lets the model read its next `count` batches without training on them. metrics: the values of its metrics after
    these batches. check: raises an error if they are those of other metrics."""
    train_function, left = model.train_function, count

    def passing(iterator: Any) -> Mapping[str, float]:
        nonlocal left
        model.train_function = train_function  # also if reading fails
        for place in range(min(model.steps_per_execution, left)):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                left = 0
                if not place:
                    raise
                break  # the last call of an epoch may have fewer batches
            if left == count:
                batch = keras.tree.map_structure(keras_epochs.none_for_placeholder, batch)
                keras_trainer.build_for(model, batch)  # Keras creates the metrics' variables at the first batch
                check()
                for variable, value in zip(model.metrics_variables, metrics, strict=True):
                    variable.assign(value)
            left -= 1
        if left:
            model.train_function = passing
        return model.get_metrics_result()

    passing.instead_of = train_function  # pyright: ignore[reportFunctionMemberAccess]
    model.train_function = passing


def pass_over_nothing(model: Any) -> None:
    """Undoes `pass_over`, which a fit that has failed leaves behind."""
    model.train_function = getattr(model.train_function, "instead_of", model.train_function)
