"""The public functions. With one worker they are Keras' own loops (except for SGD's rows of tables); with several,
Keras' loops run on every worker, over a model that computes a part of each batch (model.py)."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_epochs, keras_optimizers, keras_trainer
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.exit_codes import ConfigError, TfdistError
from tfdist.control.terminal import say
from tfdist.control.user_errors import failure, part_at_fault, said
from tfdist.data.tuning import untuned
from tfdist.keras_fit import silent_lookups, unsaved_state
from tfdist.keras_fit.arrays import shuffle_alike
from tfdist.keras_fit.callbacks import arrange, backup_held, backup_of
from tfdist.keras_fit.joining import agree_on, barrier, explained, has_peers, init, is_chief
from tfdist.keras_fit.kept_tensors import kept_by_calls
from tfdist.keras_fit.model import DistributedModel, build_optimizer, every_row_checked, rows_in_one_order
from tfdist.keras_fit.refusals import refuse_lists, refuse_no_rows, refuse_unsupported
from tfdist.keras_fit.signatures import checked_arguments
from tfdist.models.compiled_functions import in_steps
from tfdist.runtime.base import Runtime
from tfdist.runtime.errors import cause, message_of
from tfdist.training import same_model

__all__ = ["barrier", "evaluate", "fit", "init", "is_chief", "predict", "spread"]


# What Keras raises for arguments, data and models that it cannot use.
_MISTAKES = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
)

_compared: weakref.WeakSet[keras.Model] = weakref.WeakSet()  # models known to be the same on all workers


@contextlib.contextmanager
def _mistakes_explained(runtime: Runtime, purpose: str) -> Iterator[None]:
    """With several workers, raises ConfigError for anything that Keras refuses: a restart would not fix it."""
    try:
        yield
    except TfdistError:
        raise
    except _MISTAKES as error:
        if not has_peers(runtime):
            raise
        words = f"failed: {cause(message_of(error))}" if isinstance(error, tf.errors.OpError) else failure(error)
        if words.startswith("failed: "):  # the line in the user's code is unknown
            words = f"failed{part_at_fault(said(error))}: {words.removeprefix('failed: ')}"
        raise ConfigError(f"tfdist.{purpose} {words}") from error


def _join(model: Any, purpose: str) -> Runtime:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"tfdist.{purpose} takes a keras.Model, not {type(model).__name__}: pass the model first, then its data."
        )
    if purpose == "fit":
        _check_compiled(model, purpose)
    return init()


def _check_compiled(model: keras.Model, purpose: str) -> None:
    if not model.compiled:
        raise ConfigError(f"The model is not compiled: call model.compile(...) before tfdist.{purpose}.")


@checked_arguments
def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
) -> keras.callbacks.History:
    """Trains a compiled Keras model on all workers as `model.fit` would in one process; the arguments are those of
    `keras.Model.fit`.

    Batches are global: `batch_size`, and the batches of a dataset, PyDataset or generator, are split over the workers,
    each of which must be given the same data. Returns the history, the same on every worker; the model ends with the
    same weights on every worker.
    Raises: ConfigError for a model that cannot be spread, PeerLostError if a worker is gone, DataError if the workers'
    data differ, ClusterError and StartupError if the workers do not find each other.
    """
    runtime = _join(model, "fit")
    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "epochs": epochs,
        "validation_split": validation_split,
        "validation_data": validation_data,
        "shuffle": shuffle,
        "class_weight": class_weight,
        "sample_weight": sample_weight,
        "initial_epoch": initial_epoch,
        "steps_per_epoch": steps_per_epoch,
        "validation_steps": validation_steps,
        "validation_batch_size": validation_batch_size,
        "validation_freq": validation_freq,
    }
    with _mistakes_explained(runtime, "fit"):
        agree_on(runtime, "fit", arguments)
        refuse_lists("fit", model, x=x, y=y, sample_weight=sample_weight, validation_data=validation_data)
        with backup_held(callbacks, runtime), keras_trainer.beginning_anew(model):
            arranged = arrange(callbacks, runtime, model)
            backup = backup_of(arranged, {"x": x, "y": y, **arguments})
            if has_peers(runtime) or backup is not None:
                x, y = shuffle_alike(runtime, x, y, arguments, backup)
            kept = contextlib.nullcontext() if backup is None else unsaved_state.refused(model, runtime.rank == 0)
            with kept:
                return _over_workers(
                    runtime,
                    model,
                    "fit",
                    verbose,
                    lambda verbose: model.fit(x, y, verbose=verbose, callbacks=arranged, **arguments),
                )


@checked_arguments
def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.evaluate` on all workers: loss and metrics over every sample exactly once, with the same result on
    every worker.
    """
    runtime = _join(model, "evaluate")
    with _mistakes_explained(runtime, "evaluate"):
        agree_on(runtime, "evaluate", {"batch_size": batch_size, "steps": steps})
        _check_compiled(model, "evaluate")
        refuse_lists("evaluate", model, x=x, y=y, sample_weight=sample_weight)
        return _over_workers(
            runtime,
            model,
            "evaluate",
            verbose,
            lambda verbose: model.evaluate(
                x,
                y,
                batch_size=batch_size,
                verbose=verbose,
                sample_weight=sample_weight,
                steps=steps,
                callbacks=arrange(callbacks, runtime, model),
                return_dict=return_dict,
            ),
        )


@checked_arguments
def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """`keras.Model.predict` on all workers: every worker returns all predictions, in the order of the input."""
    runtime = _join(model, "predict")
    with _mistakes_explained(runtime, "predict"):
        agree_on(runtime, "predict", {"batch_size": batch_size, "steps": steps})
        refuse_lists("predict", model, x=x)
        refuse_no_rows("predict", x)
        return _over_workers(
            runtime,
            model,
            "predict",
            verbose,
            lambda verbose: model.predict(
                x,
                batch_size=batch_size,
                verbose=verbose,
                steps=steps,
                callbacks=arrange(callbacks, runtime, model),
            ),
        )


@contextlib.contextmanager
def spread(model: keras.Model, optimizer: keras.Optimizer | None = None) -> Iterator[None]:
    """Distributes a loop of your own: inside, `model(x)` computes this worker's rows of x and returns all rows, and
    `tape.gradient` returns the gradients over the rows of all workers.

    Give every worker the same batches; functions that use the model must be traced inside. Loss and metrics of all rows
    are then the same on every worker. `optimizer`: by default the compiled one.
    Raises: ConfigError if the model is not built, and the errors that `fit` raises.
    """
    runtime = _join(model, "spread")
    if not isinstance(optimizer, keras.optimizers.Optimizer | None):
        raise ConfigError(f"tfdist.spread takes a keras optimizer, not {optimizer!r:.80}: give the object.")
    agree_on(runtime, "spread", {})
    if not has_peers(runtime):
        with silent_lookups.watched(model):
            yield
        return
    refuse_unsupported(model)
    if not model.built:
        raise ConfigError("tfdist.spread needs a built model: give it an Input, or call it on a batch, first.")
    with explained(runtime):
        _compare(runtime, model, {"the optimizer": optimizer or getattr(model, "optimizer", None)})
        with DistributedModel.of(model, runtime).installed(training=True, optimizer=optimizer):
            yield


def _over_workers(runtime: Runtime, model: keras.Model, purpose: str, verbose: Any, loop: Callable[[Any], Any]) -> Any:
    """Runs one of Keras' loops, over the workers if there are several; only the chief shows progress. loop: takes
    Keras' argument `verbose`."""
    verbose = verbose if runtime.rank == 0 else 0
    try:
        with explained(runtime):
            return _spread_over(runtime, model, purpose, lambda: loop(verbose))
    except BaseException:
        if verbose in (1, "auto"):
            print(flush=True)  # Keras' progress bar has left the cursor in the middle of a line
        raise


def _spread_over(runtime: Runtime, model: keras.Model, purpose: str, loop: Callable[[], Any]) -> Any:
    if not has_peers(runtime):
        with silent_lookups.watched(model), keras_epochs.data_changed(untuned, read_ahead=True):
            return _alone(model, purpose, loop)
    refuse_unsupported(model)
    if runtime.rank == 0:
        say(
            f"{purpose} over {runtime.size} workers: each reads every global batch and computes an equal,"
            " contiguous part of its rows."
        )
    if purpose == "fit" or model not in _compared:  # not again before each of many predictions
        settings = None
        with contextlib.suppress(Exception), warnings.catch_warnings():  # for parts that Keras cannot serialize
            warnings.simplefilter("ignore")
            settings = model.get_compile_config()
        _compare(runtime, model, {"what compile(...) was given": settings})
    with DistributedModel.of(model, runtime).installed(training=purpose == "fit"):
        return loop()


def _compare(runtime: Runtime, model: keras.Model, settings: dict[str, Any]) -> None:
    """Raises ConfigError unless all workers have this model and these settings."""
    optimizer = getattr(model, "optimizer", None)
    own_parts = [each for each in (*keras.tree.flatten(getattr(model, "loss", None)), optimizer) if each is not None]
    if optimizer is not None and model.built:
        decaying = keras_optimizers.weights_that_decay(optimizer, model.trainable_variables)
        settings = settings | {"which weights decay": decaying}
    same_model.must_be_same_model(runtime, same_model.facts_of(model, own_parts, settings, kept_by_calls))
    _compared.add(model)


def _alone(model: keras.Model, purpose: str, loop: Callable[[], Any]) -> Any:
    if purpose == "fit" and not keras_trainer.built_under_a_strategy(model):
        build_optimizer(model)  # as with several workers: else Keras' ScheduleFreeAdamW computes differently
        # Keras' own update is as good where XLA compiles the whole step, and faster on a GPU.
        keeps_keras = model.jit_compile or bool(tf.config.list_logical_devices("GPU"))
        ordered = contextlib.nullcontext() if keeps_keras else rows_in_one_order(model.optimizer)
        train_step = unsaved_state.looked_for(model, in_steps()(model.train_step))
        test_step = unsaved_state.looked_for(model, model.test_step)
        with (
            ordered,
            every_row_checked(model.optimizer),
            attribute_replaced(model, "train_step", train_step),
            attribute_replaced(model, "test_step", test_step),
        ):
            return loop()
    return loop()
