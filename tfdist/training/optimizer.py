"""The update rule: a stock Keras optimizer that is handed gradients which are already reduced and clipped.

Under tf.distribute a Keras optimizer clips *local* gradients and then reduces them itself. tfdist reduces first
(training/step.py), so the optimizer's own reduction is switched off here, in this one place. If Keras renames the
method, `switch_off_reduction` refuses; if it stops calling it, the parity tests with several replicas fail.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.config import OptimizerConfig, parse_args
from tfdist.control.exit_codes import ConfigError, UnsupportedError

OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "momentum": functools.partial(keras.optimizers.SGD, momentum=0.9),
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.Adam,  # Keras' AdamW is its Adam, but refuses to be without weight decay
    "lion": keras.optimizers.Lion,
    "lamb": keras.optimizers.Lamb,
    "adafactor": keras.optimizers.Adafactor,
    "muon": keras.optimizers.Muon,
}

# Keras arguments that would act on local gradients or deadlock, and the flag that does the same right.
OWN_FLAGS = {
    "learning_rate": "--learning_rate", "weight_decay": "--weight_decay", "clipnorm": "--clip_norm", "clipvalue": "--clip_norm",
    "global_clipnorm": "--clip_norm", "use_ema": "--ema", "ema_momentum": "--ema", "ema_overwrite_frequency": "--ema",
    "gradient_accumulation_steps": "--accumulation", "loss_scale_factor": "--precision=float16",
}


def make_optimizer(config: OptimizerConfig, learning_rate: keras.optimizers.schedules.LearningRateSchedule) -> keras.Optimizer:
    """Builds the optimizer; call inside the runtime's scope. Raises ConfigError on options it does not take."""
    options = parse_args("optimizer_args", config.optimizer_args)
    for name in options:
        if name in OWN_FLAGS:
            raise ConfigError(f"--optimizer_args={config.optimizer_args}: {name} is set with {OWN_FLAGS[name]}, not here.")
    if config.ema:
        options |= {"use_ema": True, "ema_momentum": config.ema, "ema_overwrite_frequency": None}
    try:
        optimizer = OPTIMIZERS[config.optimizer](learning_rate=learning_rate, weight_decay=config.weight_decay or None, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--optimizer_args={config.optimizer_args} does not fit --optimizer={config.optimizer}: {error}") from None
    excluded = [name for name in config.weight_decay_exclude.split(",") if name]
    if config.weight_decay and excluded:
        optimizer.exclude_from_weight_decay(var_names=excluded)
    return switch_off_reduction(optimizer)


def switch_off_reduction(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Makes `optimizer.apply` take gradients that are already summed over all replicas."""
    if not callable(getattr(optimizer, "_all_reduce_sum_gradients", None)):
        raise UnsupportedError(f"Keras {keras.__version__} reduces gradients in an unknown way: install keras~=3.15.")
    optimizer._all_reduce_sum_gradients = list
    return optimizer


def updates_rows(optimizer: keras.Optimizer) -> bool:
    """Whether it leaves the rows of a table alone whose gradient is 0, and takes gradients as slices. All others of Keras
    that are in OPTIMIZERS change every row."""
    return type(optimizer) is keras.optimizers.SGD and not optimizer.momentum


def subtract_by_assignment(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer that updates rows read those of a table, subtract, and write them: the same bits as TensorFlow's
    scatter_sub in half its time. For gradients with no row twice, and once per optimizer."""
    whole = optimizer.assign_sub

    def assign_sub(variable: keras.Variable | tf.Variable, value: tf.Tensor | tf.IndexedSlices) -> None:
        if not isinstance(value, tf.IndexedSlices):
            whole(variable, value)
            return
        table = variable.value if isinstance(variable, keras.Variable) else variable
        table.scatter_update(tf.IndexedSlices(tf.gather(table, value.indices) - tf.cast(value.values, table.dtype), value.indices))

    optimizer.assign_sub = assign_sub


def ema_variables(optimizer: keras.Optimizer) -> list:
    """The moving averages of the trainable variables, in their order; empty without --ema."""
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


@contextlib.contextmanager
def swapped_in(variables: Sequence, values: Sequence) -> Iterator[None]:
    """Within the context, `variables` hold `values` (for example the moving average); afterwards their own again."""
    own = [variable.numpy() for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.numpy())
    try:
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
