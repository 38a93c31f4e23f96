"""The update rule: a stock Keras optimizer that receives gradients which are already reduced and clipped.

Under tf.distribute a Keras optimizer clips *local* gradients and then reduces them itself. tfdist reduces first
(training/step.py), so the optimizer's own reduction is switched off, only here. If Keras renames the method,
`switch_off_reduction` raises an error; if Keras stops calling it, the parity tests with several replicas fail.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_optimizers
from tfdist.compat.tensorflow_variables import values_kept
from tfdist.config import OptimizerConfig, parse_args
from tfdist.config.optimizers import OPTIMIZERS
from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import check_switches, imported


class FusedAdam(keras.optimizers.Adam):
    """Keras' Adam, with one operation per variable in place of a dozen that each read and write memory.

    TensorFlow's ApplyAdam is the same rule (Kingma and Ba 2014, arXiv:1412.6980, in the form at the end of section 2):
    m += (g - m)(1 - b1), v += (g^2 - v)(1 - b2), w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon).
    """

    _shared: dict[str, tf.Tensor] | None = None  # numbers that all updates of one `apply` share

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Updates all variables once."""
        self._shared = self._numbers()
        try:
            return super().apply(grads, trainable_variables)
        finally:
            self._shared = None

    def _numbers(self) -> dict[str, tf.Tensor]:
        # Keras' type hints cover every backend.
        step = tf.cast(self.iterations + 1, tf.float32)  # type: ignore[reportCallIssue, reportOptionalOperand]
        beta1, beta2, epsilon = (tf.constant(each, tf.float32) for each in (self.beta_1, self.beta_2, self.epsilon))
        powers = {"beta1_power": tf.pow(beta1, step), "beta2_power": tf.pow(beta2, step)}
        return {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, **powers}

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable | tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Updates a float32 variable with ApplyAdam; other dtypes, slices and amsgrad are left to Keras."""
        if self.amsgrad or isinstance(gradient, tf.IndexedSlices) or tf.as_dtype(variable.dtype) != tf.float32:
            super().update_step(gradient, variable, learning_rate)
            return
        index = self._get_variable_index(variable)
        var, m, v = (
            (each.value if isinstance(each, keras.Variable) else each).handle
            for each in (variable, self._momentums[index], self._velocities[index])
        )
        tf.raw_ops.ResourceApplyAdam(
            var=var,
            m=m,
            v=v,
            grad=tf.cast(gradient, tf.float32),
            lr=tf.cast(learning_rate, tf.float32),
            use_locking=True,
            **(self._shared or self._numbers()),
        )


def rule_of(name: str) -> Callable[..., keras.optimizers.Optimizer]:
    """Returns the class of --optimizer=NAME, with the arguments that the name stands for."""
    return functools.partial(imported("optimizer", name, OPTIMIZERS[name].rule), **OPTIMIZERS[name].arguments)


# Keras arguments that would act on local gradients or deadlock, and the flag that does the same correctly.
OWN_FLAGS = {
    "learning_rate": "--learning_rate",
    "weight_decay": "--weight_decay",
    "clipnorm": "--clip_norm",
    "clipvalue": "--clip_norm",
    "global_clipnorm": "--clip_norm",
    "use_ema": "--ema",
    "ema_momentum": "--ema",
    "ema_overwrite_frequency": "--ema",
    "gradient_accumulation_steps": "--accumulation",
    "loss_scale_factor": "--precision=float16",
}


def make_optimizer(
    config: OptimizerConfig, learning_rate: keras.optimizers.schedules.LearningRateSchedule
) -> keras.Optimizer:
    """Builds the optimizer; call inside the runtime's scope. Raises ConfigError on options it does not accept."""
    options = parse_args("optimizer_args", config.optimizer_args)
    for name in options:
        if name in OWN_FLAGS:
            raise ConfigError(
                f"--optimizer_args={config.optimizer_args}: {name} is set with {OWN_FLAGS[name]}, not here."
            )
    check_switches("optimizer_args", options, rule_of(config.optimizer))
    _check_numbers(config, options)
    if config.optimizer == "muon":  # its rate for variables that it trains by Adam; Keras' default is 0.004
        options.setdefault("adam_weight_decay", config.weight_decay or None)
    if config.ema:
        options |= {"use_ema": True, "ema_momentum": config.ema, "ema_overwrite_frequency": None}
    try:
        optimizer = rule_of(config.optimizer)(
            learning_rate=learning_rate, weight_decay=config.weight_decay or None, **options
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--optimizer_args={config.optimizer_args} does not fit --optimizer={config.optimizer}: {error}"
        ) from None
    parts = _left_out(config)
    keras_optimizers.choose_decaying(optimizer, lambda path: not any(_is_in(part, path) for part in parts))
    return switch_off_reduction(optimizer)


def _left_out(config: OptimizerConfig) -> list[str]:
    """Returns the parts of names in --weight_decay_exclude."""
    return [part for each in config.weight_decay_exclude.split(",") if (part := each.strip())]


def _is_in(part: str, path: str) -> bool:
    """Whether a part of --weight_decay_exclude stands in a path. The usual parts are those of variables' own names: a
    model may be called beta_vae, and a layer debias."""
    return part in (path.rpartition("/")[2] if part in _left_out(OptimizerConfig()) else path)


def unused_parts(config: OptimizerConfig, variables: Iterable[keras.Variable]) -> list[str]:
    """Returns a warning for each part of the user's --weight_decay_exclude that is in no variable's path."""
    paths, usual = [variable.path for variable in variables], _left_out(OptimizerConfig())
    if not config.weight_decay or not paths:
        return []
    return [
        f"--weight_decay_exclude={config.weight_decay_exclude}: {part} is in no variable's path, so it leaves nothing"
        f" out of weight decay. Paths are like {paths[0]}."
        for part in _left_out(config)
        if part not in usual and not any(_is_in(part, path) for path in paths)
    ]


def _check_numbers(config: OptimizerConfig, options: dict[str, Any]) -> None:
    """Raises ConfigError for numbers out of range: Keras accepts anything, and fails when the step is traced."""
    for name, parameter in inspect.signature(rule_of(config.optimizer)).parameters.items():
        usual, value = parameter.default, options.get(name)
        if name not in options or not isinstance(usual, float):
            continue
        below = 1.0 if name.startswith(("beta", "momentum", "rho")) else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or (usual >= 0 and not 0 <= value < below):
            limits = "" if usual < 0 else " of at least 0" if below > 1 else " of at least 0 and below 1"
            raise ConfigError(
                f"--optimizer_args={config.optimizer_args}: {name}={value} must be a number{limits}; without the option"
                f" it is {usual:g}."
            )
        options[name] = float(value)


def check_variables(config: OptimizerConfig, optimizer: keras.Optimizer, model: keras.Model) -> list[str]:
    """Returns warnings. Raises ConfigError for variables that the optimizer cannot update."""
    check_decays(optimizer, model.trainable_variables)
    return unused_parts(config, model.variables)


def check_decays(optimizer: keras.Optimizer, variables: Iterable[keras.Variable]) -> None:
    """Raises ConfigError if a decay of the optimizer rounds to 1 in the dtype of a variable, in which Keras computes
    the update: with beta_2 = 0.999, which is 1 in bfloat16, Adam never changes the variable.
    """
    decays = {
        name: (getattr(optimizer, name), "it", f"--optimizer_args={name}=0.99")
        for name in ("beta_2", "adam_beta_2")  # the latter: of Muon, which updates vectors and embeddings by Adam
        if hasattr(optimizer, name)
    }
    if optimizer.use_ema:
        decays["--ema"] = optimizer.ema_momentum, "its moving average", "a smaller --ema"
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)
        if dtype != tf.float32 and keras_optimizers.updates_by_muon(optimizer, variable):
            raise ConfigError(
                f"--optimizer=muon cannot update {variable.path}, which is {dtype.name}: Keras computes its update in"
                " float32. Give its layer dtype='float32', or choose another --optimizer."
            )
        for name, (decay, what, instead) in decays.items():
            if decay < 1 and dtype.as_numpy_dtype(decay) == 1:
                raise ConfigError(
                    f"{name}={decay:g} is 1 in {dtype.name}, the type of {variable.path}: {what} would never change."
                    f" Give its layer dtype='mixed_{dtype.name}', or {instead}."
                )


def switch_off_reduction(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Makes `optimizer.apply` accept gradients that are already summed over all replicas."""
    keras_optimizers.switch_off_reduction(optimizer)
    return optimizer


def updates_rows(optimizer: keras.Optimizer) -> bool:
    """Returns whether the optimizer leaves rows of a table with gradient 0 unchanged, and accepts gradients as slices.
    All other rules change every row."""
    return type(optimizer) is keras.optimizers.SGD and not optimizer.momentum


def ema_variables(optimizer: keras.Optimizer) -> list:
    """Returns the moving averages of the trainable variables, in their order; empty without --ema, and before the first
    update, with which Keras begins them."""
    steps: Any = optimizer.iterations  # of several replicas, too
    return keras_optimizers.moving_averages(optimizer) if int(steps.numpy()) else []


@contextlib.contextmanager
def swapped_in(variables: Sequence, values: Sequence) -> Iterator[None]:
    """Context manager in which `variables` hold `values` (for example moving averages); restores them at exit."""
    with values_kept(variables):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value.numpy())
        yield
