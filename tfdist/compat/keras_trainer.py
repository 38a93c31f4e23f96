"""Private parts of Keras' Trainer (`compile`, `fit`): how it builds a model, what was compiled, where a fit begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src import backend
from keras.src.losses.losses import LossFunctionWrapper

from tfdist.compat import keras_layers, keras_optimizers
from tfdist.compat.code_origin import module_of, package_of
from tfdist.compat.temporary_attributes import attribute_replaced


def build_for(model: keras.Model, batch: Any, step: str = "train_step", is_called: bool = True) -> None:
    """Builds the model, the compiled losses and metrics, and Keras' optimizer, as `fit` (or another loop with its
    `step`) would at its first batch. A step of the user's own may make other inputs and labels of the batch: it is
    called on symbolic tensors, and anything that it still lacks is made when it is traced, as in Keras; nothing more is
    built if the model itself is never called (is_called). Relies on `Trainer._symbolic_build` and keras.src's
    `compute_output_spec`; without them variables are made inside the first step, where workers cannot agree on them.
    """
    if getattr(type(model), step) is not getattr(keras.Model, step):
        for _ in range(1 if keras_layers.all_built(model) else 2):  # a tape sees no variables that are made under it
            step_on_symbols(model, batch, step)
        if keras_layers.all_built(model) or not is_called:
            return
    elif step == "train_step" and not keras_layers.all_built(model):
        with contextlib.suppress(Exception):  # Keras raises a better error below
            x = keras.utils.unpack_x_y_sample_weight(batch)[0]
            backend.compute_output_spec(model, x, training=True)  # some layers may be used only in training
    model._symbolic_build(data_batch=batch)


@contextlib.contextmanager
def _updating_nothing(model: keras.Model) -> Iterator[None]:
    """Context manager without updates: an optimizer that is built in a trace loses the values that it copies from the
    weights."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(attribute_replaced(optimizer, "apply", lambda *_, **__: None))
        yield


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the compiled optimizer, if any, and others that the model keeps, as a GAN does: as attributes, in lists
    and dicts, and those of inner models that can train; not those inside other optimizers. Relies on Keras keeping a
    model's attributes in its `__dict__`; without it the others do not start with the chief's values.
    """
    held = optimizers_in([getattr(model, "optimizer", None), list(vars(model).values()), compiled_inside(model)])
    found = {id(one): one for one in held}
    inside = {id(one) for each in found.values() for one in keras_optimizers.with_inner(each)[1:]}
    return [one for one in found.values() if id(one) not in inside]


def compiled_inside(model: keras.Model) -> list[keras.Optimizer]:
    """The compiled optimizers of inner models that can train."""
    inner = [layer for layer in keras_layers.all_layers(model, include_self=False) if isinstance(layer, keras.Model)]
    return list(optimizers_in([getattr(each, "optimizer", None) for each in inner if each.trainable_variables]))


def optimizers_in(value: Any, depth: int = 0) -> Iterator[keras.Optimizer]:
    """Yields the optimizers in a value and in its containers, in their order; not those inside other optimizers."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, dict | list | tuple) and depth < _DEEPEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from optimizers_in(each, depth + 1)


_DEEPEST = 4  # containers in containers


def step_on_symbols(model: keras.Model, batch: Any, step: str) -> bool:
    """Calls the model's own `step` on symbolic tensors like a batch. Returns whether this succeeded. Relies on
    keras.src's `compute_output_spec`; without it a step that calls inner models in place of the model is refused.
    """
    with contextlib.suppress(Exception), _updating_nothing(model):
        backend.compute_output_spec(getattr(model, step), batch)
        return True
    return False


def build_for_inputs(model: keras.Model, x: Any) -> None:
    """Builds only the model, by calling it on symbolic tensors like x. Relies on keras.src's `compute_output_spec`,
    which has no public name.
    """
    backend.compute_output_spec(model, x)


def compile_identity(model: keras.Model) -> Any:
    """An object that is a different one after each `compile`; None before the first. Relies on
    `Trainer._compile_config`; without it steps that were traced for an earlier `compile` would still be used.
    """
    return model._compile_config if model.compiled else None


def traced_for(model: keras.Model) -> tuple:
    """Returns how the model was compiled, and how it is run: once this changes, functions traced of it are stale."""
    return compile_identity(model), model.run_eagerly, bool(model.jit_compile)


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss | None]:
    """The losses that `compile` was given, as a flat list; None for outputs without one. Relies on
    `Trainer._compile_loss` and `CompileLoss._flat_losses`; without them every worker gathers all outputs.
    """
    compiled = model._compile_loss
    return [] if compiled is None else [loss for _, loss, _, _ in compiled._flat_losses or []]


def public_name(attribute: str) -> str:
    """The name that `compile` gives to what a model keeps as this attribute. Relies on "_compile_loss" and
    "_compile_metrics"; without them a message has a name that no user has written."""
    return {"_compile_loss": "loss", "_compile_metrics": "metrics"}.get(attribute, attribute)


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that `compile` was given. Relies on `Trainer._compile_metrics`."""
    compiled = model._compile_metrics
    return [] if compiled is None else compiled.metrics


def given_metrics(model: keras.Model) -> list[Any]:
    """The functions and metrics that `compile` was given, built or not. Relies on `CompileMetrics._user_metrics` and
    `_user_weighted_metrics`; without them no backup holds what a user's own metric keeps over epochs.
    """
    compiled: Any = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [each for each in given if callable(each)]


def made_at_the_first_batch(metric: Any) -> bool:
    """Whether Keras makes all variables of this metric at its first batch, and resets all of them itself at each epoch:
    those derived from F1Score, FBetaScore and R2Score. A backup with them would fit only the process that wrote it.
    """
    is_one = isinstance(metric, keras.metrics.FBetaScore | keras.metrics.R2Score)
    return is_one and package_of(module_of(type(metric).reset_state)) == "keras"


def begin_an_epoch_of_metrics(model: keras.Model) -> None:
    """Resets metrics as Keras does at the start of each epoch, and also those that are not built yet: Keras has nothing
    to reset in them, but after a restore they hold values. Relies on what `given_metrics` relies on."""
    for metric in given_metrics(model):
        if isinstance(metric, keras.metrics.Metric):
            metric.reset_state()


def metrics_of_compile(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that Keras makes for `compile`: the mean of the loss, those of several losses, and the one around the
    metrics that `compile` was given. Relies on `Trainer._loss_tracker`, `_compile_metrics` and `_compile_loss`; without
    them they count as metrics that the model updates itself, and every worker gathers all outputs.
    """
    loss: Any = getattr(model, "_compile_loss", None)
    made = [getattr(model, name, None) for name in ("_loss_tracker", "_compile_metrics")]
    return [each for each in (*made, *([] if loss is None else loss.metrics)) if each is not None]


def is_made_of_a_function(value: Any) -> bool:
    """Whether `value` is exactly the object that Keras makes of a function given as a loss. Relies on keras.src's
    `LossFunctionWrapper`, which has no public name.
    """
    return type(value) is LossFunctionWrapper


def function_and_options(wrapper: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (the function, its options) of a loss or metric that wraps a function. Relies on `fn` (losses), `_fn`
    (metrics) and `_fn_kwargs`.
    """
    function = wrapper._fn if isinstance(wrapper, keras.metrics.MeanMetricWrapper) else getattr(wrapper, "fn", None)
    return function, wrapper._fn_kwargs


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Tells the running `fit`, from a callback's on_train_begin, at which epoch to begin; None: as its arguments say.
    Relies on `Trainer._initial_epoch`, which Keras' own BackupAndRestore sets; without it a resumed fit starts over.
    """
    model._initial_epoch = epoch


@contextlib.contextmanager
def beginning_anew(model: keras.Model) -> Iterator[None]:
    """Context manager around a `fit`: what `begin_at` was given in an earlier one that failed does not count in it, nor
    does what it is given in this one count in a later one."""
    begin_at(model, None)
    try:
        yield
    finally:
        begin_at(model, None)


def built_under_a_strategy(model: keras.Model) -> bool:
    """Whether the model was made inside the scope of a tf.distribute strategy. Relies on `_distribute_strategy`;
    without it such a model fails inside TensorFlow instead of with a clear message.
    """
    return getattr(model, "_distribute_strategy", None) is not None
