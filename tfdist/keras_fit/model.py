"""A Keras model spread over workers, while one of Keras' own loops runs over it.

Three things are replaced for that time, on the one model and its optimizer, and put back afterwards:
  model.call        takes the global batch, computes this worker's rows, returns all rows (rows.py)
  optimizer.apply   first takes the mean of the gradients over workers; what follows (clipping, loss scale,
                    accumulation, averages of weights) is Keras' own, on the same values everywhere
  BatchNormalization._moments     over the rows of all workers
Loss and metrics are computed by every worker from all rows, so they mean what they mean in one process, whatever their
formula, and are the same everywhere. `train_step`, `test_step` and `compute_loss` stay as they are, overridden or not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import own_rows, variables
from tfdist.keras_fit.batches import END, Batches
from tfdist.keras_fit.rows import Part, together
from tfdist.runtime import batch_norm
from tfdist.runtime.sockets import Sockets
from tfdist.training.optimizer import updates_rows
from tfdist.training.update import rows_once

_LOOPS = {"train": "train_function", "test": "test_function", "predict": "predict_function"}  # Keras' names
_KEPT_AS = "_tfdist_distributed"  # on the model itself: what was traced lives as long as it


class DistributedModel:
    """What belongs to one model: its replacements, and the functions traced with them."""

    def __init__(self, model: keras.Model, runtime: Sockets):
        self._model, self._runtime = model, runtime
        self._functions: dict[str, tuple[tuple, Callable]] = {}
        self._batches: dict[str, Batches] = {}
        self._spread = True  # False: `call` computes all rows itself
        self._training = False
        self._ready = False
        self._calls = self._updates = 0  # while a train_step is traced
        self._scaled = False  # the loss of this step
        self._share: tf.Tensor | None = None  # of the own rows, while only these are computed
        self._own_rows: dict[str, bool] = {}  # by kind: see own_rows.py

    @classmethod
    def of(cls, model: keras.Model, runtime: Sockets) -> DistributedModel:
        """The one of this model."""
        if _KEPT_AS not in model.__dict__:
            object.__setattr__(model, _KEPT_AS, cls(model, runtime))
        return model.__dict__[_KEPT_AS]

    @contextlib.contextmanager
    def installed(self, training: bool, optimizer: keras.Optimizer | None = None) -> Iterator[None]:
        """The replacements are in place inside; all workers hold the chief's variables. `optimizer`: the model's own if not given."""
        model = self._model
        self._optimizer = optimizer = optimizer or model.optimizer
        self._batches = {kind: Batches(self._runtime) for kind in _LOOPS}
        self._training, self._ready = training, False
        if model.built:
            self._start()
        with contextlib.ExitStack() as stack:
            self._call, call = model.call, self._call_together
            stack.enter_context(_replaced(model, "call", call))
            if optimizer is not None:
                self._apply = optimizer.apply
                stack.enter_context(_replaced(optimizer, "apply", self._apply_mean))
                self._scale_loss = optimizer.scale_loss
                stack.enter_context(_replaced(optimizer, "scale_loss", self._scale_loss_of_one))
            for layer in model._flatten_layers():
                if isinstance(layer, keras.layers.BatchNormalization):
                    stack.enter_context(_replaced(layer, "_moments", self._moments_of(layer)))
            for kind, name in _LOOPS.items():
                stack.enter_context(_replaced(model, name, self._function(kind)))
            yield
        if training:
            self.take_the_chiefs_variables()

    # -- the three replacements ------------------------------------------------------------------------------------

    def _call_together(self, *args: Any, **kwargs: Any) -> Any:
        if not self._spread:
            return self._call(*args, **kwargs)
        self._calls += 1
        if self._share is not None:  # these are our own rows
            outputs, losses = self._forward(args, kwargs)
        else:
            part = Part(self._runtime, args or kwargs)
            args, kwargs = part.take(args), part.take(kwargs)
            outputs, losses = together(self._runtime, part, lambda: self._forward(args, kwargs))
        for layer in self._model._flatten_layers():
            layer._losses.clear()
        self._model._losses.extend(losses)
        return outputs

    def _forward(self, args: tuple, kwargs: dict) -> tuple[Any, list]:
        """(outputs, recorded losses) of this worker's rows."""
        def forward(args, kwargs):
            outputs = self._call(*args, **kwargs)
            losses = [loss for layer in self._model._flatten_layers() for loss in layer._losses]
            return outputs, losses, [getattr(output, "_keras_mask", None) for output in keras.tree.flatten(outputs)]

        if not self._compiles(kwargs):
            outputs, losses, _ = forward(args, kwargs)
            return outputs, losses
        options = {name: value for name, value in kwargs.items() if not isinstance(value, tf.Tensor)}
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, tf.Tensor)}
        compiled = tf.function(lambda args, tensors: forward(args, {**tensors, **options}), jit_compile=True, autograph=False)
        outputs, losses, masks = compiled(args, tensors)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            if mask is not None:
                output._keras_mask = mask
        return outputs, losses

    def _compiles(self, kwargs: dict) -> bool:
        """XLA compiles the pass over the own rows; but not collectives inside it."""
        model = self._model
        inside = kwargs.get("training") and any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())
        return bool(model.jit_compile) and not inside and not tf.executing_eagerly()

    def _apply_mean(self, grads: Any, trainable_variables: Any = None) -> Any:
        self._updates += 1
        grads = list(grads)
        dense = {index: grad for index, grad in enumerate(grads) if isinstance(grad, tf.Tensor)}
        divisor, self._scaled = 1 if self._scaled else self._runtime.size, False
        for index, total in zip(dense, self._runtime.all_reduce(list(dense.values())), strict=True):
            grads[index] = total / tf.cast(divisor, total.dtype)
        for index, grad in enumerate(grads):
            # Rows stay rows: Keras treats the gradient of an embedding differently from a dense one.
            if isinstance(grad, tf.IndexedSlices):
                values, indices = self._runtime.gather([grad.values, grad.indices])
                mean = tf.IndexedSlices(values / tf.cast(divisor, values.dtype), indices, grad.dense_shape)
                grads[index] = rows_once(mean) if updates_rows(getattr(self._optimizer, "inner_optimizer", self._optimizer)) else mean
        return self._apply(grads, trainable_variables)

    def _scale_loss_of_one(self, loss: tf.Tensor) -> tf.Tensor:
        """Where the loss passes through here its part in the mean is taken here: gradients of float16 that are R times
        as large could overflow."""
        self._scaled = True
        share = 1.0 / self._runtime.size if self._share is None else self._share
        return self._scale_loss(loss) * tf.cast(share, loss.dtype)

    def _moments_of(self, layer: keras.layers.BatchNormalization) -> Callable:
        return lambda inputs, mask: batch_norm.moments(self._runtime, inputs, layer._reduction_axes, mask=mask)

    # -- Keras' step functions -------------------------------------------------------------------------------------

    def _function(self, kind: str) -> Callable:
        """Keras' train_function, test_function or predict_function; traced again when the model was compiled again."""
        model = self._model
        holds = (model._compile_config if model.compiled else None, model.run_eagerly, bool(model.jit_compile), *model.trainable_variables)
        known, function = self._functions.get(kind, ((), None))
        if function is None or len(known) != len(holds) or any(a is not b for a, b in zip(known, holds, strict=True)):
            self._own_rows.pop(kind, None)
            self._functions[kind] = (holds, self._make_function(kind))
        return self._functions[kind][1]

    def _make_function(self, kind: str) -> Callable:
        one_step: Callable = tf.autograph.experimental.do_not_convert(lambda data: getattr(self, f"_{kind}_step")(data))
        if not self._model.run_eagerly:
            one_step = tf.function(one_step, reduce_retracing=True)

        known = []

        def step(batch: Any, spec: Any = None) -> Any:
            self._prepare(batch)
            if kind not in self._own_rows and kind != "predict":
                self._own_rows[kind] = self._chooses_own_rows(kind, batch)
            if spec is not None and spec not in known and not self._model.run_eagerly:
                known.append(spec)
                # Traced as Keras traces it, with the batch dim unknown if it varies: some of its numbers depend on that.
                one_step.get_concrete_function(keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec))
            return one_step(batch)

        def over_iterator(iterator: Iterator) -> Any:
            logs = END
            for _ in range(self._model.steps_per_execution):
                batch = self._batches[kind].next(iterator)
                if batch is END:
                    break
                logs = step(batch, iterator.element_spec)
            if logs is END:
                raise StopIteration
            return logs

        def over_list(batches: list) -> Any:
            parts = [step(self._batches[kind].agree(batch)) for batch in batches]
            return keras.tree.map_structure(lambda *outputs: tf.concat(outputs, 0), *parts)

        return over_list if kind == "predict" else over_iterator

    def _train_step(self, batch: Any) -> Any:
        self._calls = self._updates = 0
        if self._own_rows["train"]:
            return self._step_of_own_rows(self._model.train_step, batch)
        logs = self._model.train_step(batch)
        if not self._calls or not self._updates:
            missing = "calls the model itself" if not self._calls else "updates through model.optimizer"
            raise ConfigError(f"The train_step of {type(self._model).__name__} never {missing}, so its work cannot be spread: let it use self(x) and self.optimizer.apply, or train it in one process.")
        return logs

    def _test_step(self, batch: Any) -> Any:
        return self._step_of_own_rows(self._model.test_step, batch) if self._own_rows["test"] else self._model.test_step(batch)

    def _step_of_own_rows(self, one_step: Callable, batch: Any) -> Any:
        part = Part(self._runtime, keras.utils.unpack_x_y_sample_weight(batch)[0])
        self._share = tf.cast(part.count, tf.float32) / tf.cast(part.n, tf.float32)
        try:
            return own_rows.step(self._runtime, self._model, part, one_step, batch)
        finally:
            self._share = None

    def _predict_step(self, batch: Any) -> Any:
        return self._model.predict_step(batch)

    # -- the same variables everywhere -----------------------------------------------------------------------------

    def _prepare(self, batch: Any) -> None:
        """Before the first step: builds what Keras would build inside it, where the workers could not agree any more."""
        if self._ready:
            return
        self._spread = False
        try:
            if self._training or self._model.compiled:
                self._model._symbolic_build(data_batch=batch)
            else:
                keras.src.backend.compute_output_spec(self._model, keras.utils.unpack_x_y_sample_weight(batch)[0])
        finally:
            self._spread = True
        self._start()
        self._ready = True  # a layer that is never used is never built

    def _chooses_own_rows(self, kind: str, batch: Any) -> bool:
        if self._model.run_eagerly:
            return False
        self._spread = False
        try:
            chosen = own_rows.suits(self._model, batch)
        finally:
            self._spread = True
        if chosen and self._runtime.rank == 0:
            print(f"tfdist: {kind}: the outputs of a batch are more than {own_rows.LARGEST >> 20} MiB, so each worker computes loss and metrics of its own rows, and sums are reduced.", file=sys.stderr, flush=True)
        return chosen

    def _start(self) -> None:
        model = self._model
        self._ready = all(layer.built for layer in model._flatten_layers())
        if self._ready and self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(model.trainable_variables)
        self.take_the_chiefs_variables()
        if self._training and self._ready:
            self.own_random_numbers()

    def take_the_chiefs_variables(self) -> None:
        """Every worker holds the chief's bits."""
        optimizer = self._optimizer.variables if self._optimizer is not None else []
        variables.take_the_chiefs(self._runtime, [*self._model.variables, *optimizer])

    def check_weights(self) -> None:
        """If something drifted apart all take the chief's."""
        variables.reconcile(self._runtime, self._model)

    def own_random_numbers(self) -> None:
        """Each worker has seeds of its own for dropout and the like."""
        variables.own_random_numbers(self._runtime, self._model)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` inside; past Keras' attribute tracking."""
    missing = object()
    before = owner.__dict__.get(name, missing)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)
