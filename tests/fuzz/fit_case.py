"""A case of tfdist.fit: the same program with Keras' functions, which is the oracle, and with tfdist's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz import data, given, keras_settings, layers, loops, models, space, train_steps
from tests.fuzz.callbacks import Ledger, Temper
from tests.fuzz.oracle import MORE, POLICIES, is_number, once, shake
from tfdist.compat.keras_addition import add_rows_to_rows

FLOAT = {False: "float32", True: "float64"}


def masked_mean(y, outputs):
    """A user's loss that is not a mean over all rows: it is the mean over the rows with a class above 0."""
    inside = tf.cast(tf.reshape(y, [-1]) > 0, outputs.dtype)
    losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    return tf.reduce_sum(losses * tf.reshape(inside, tf.shape(losses))) / (tf.reduce_sum(inside) + 1e-3)


def focal(y, outputs):
    """A user's loss in which rows count less if the model is certain."""
    losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    return losses * tf.square(1 - tf.exp(-losses))


def largest(y, outputs):
    """A metric that is one number for the whole batch."""
    return tf.reduce_max(outputs)


class Annealed(keras.losses.Loss):
    """A loss with state: it counts how often it was called, and grows with that."""

    def __init__(self, loss: keras.losses.Loss):
        super().__init__(name="annealed")
        self.loss = loss
        self.asked = keras.Variable(0.0, dtype=keras.config.floatx(), trainable=False)

    def __call__(self, y_true, y_pred, sample_weight=None):
        self.asked.assign_add(1.0)
        return self.loss(y_true, y_pred, sample_weight) * (1.0 + 0.1 * self.asked)


class Spread(keras.metrics.Metric):
    """How much the outputs seen so far vary; a metric written from scratch."""

    def __init__(self):
        super().__init__(name="spread", dtype=keras.config.floatx())
        self.count, self.total, self.squares = (
            self.add_weight(name=name, initializer="zeros") for name in ("count", "total", "squares")
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = tf.cast(y_pred, self.dtype)
        self.count.assign_add(tf.cast(tf.size(values), self.dtype))
        self.total.assign_add(tf.reduce_sum(values))
        self.squares.assign_add(tf.reduce_sum(tf.square(values)))

    def result(self):
        return self.squares / self.count - tf.square(self.total / self.count)


class OneClass(keras.metrics.AUC):
    """The area under the curve of class 1."""

    def __init__(self):
        super().__init__(num_thresholds=20, from_logits=True, name="auc")

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.reshape(y_true, [-1]) == 1, y_pred[:, 1], sample_weight)


class Tempered(keras.losses.Loss):
    """The squared error times a plain attribute, which the callback `temper` changes."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def call(self, y_true, y_pred):
        return self.scale * keras.losses.mean_squared_error(y_true, y_pred)


LOSSES: dict[str, Callable[[], Any]] = {
    "entropy": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "entropy_of_probabilities": lambda: keras.losses.SparseCategoricalCrossentropy(),
    "entropy_sum": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    "ignore_class": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    "masked_mean": lambda: masked_mean,
    "mse": lambda: "mse",
    "huber": lambda: keras.losses.Huber(),
    "cosine": lambda: keras.losses.CosineSimilarity(),
    "dice": lambda: keras.losses.Dice(),
    "tversky": lambda: keras.losses.Tversky(),
    "annealed": lambda: Annealed(keras.losses.MeanSquaredError()),
    "annealed_entropy": lambda: Annealed(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "focal": lambda: focal,
    "log_cosh": lambda: keras.losses.LogCosh(),
    "tempered": Tempered,
}


class TopKOfDoubles(keras.metrics.SparseTopKCategoricalAccuracy):
    """For the oracle in float64: TensorFlow has no such operation for that type."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, tf.cast(y_pred, tf.float32), sample_weight)


def top_k() -> keras.metrics.Metric:
    kind = TopKOfDoubles if keras.config.floatx() == "float64" else keras.metrics.SparseTopKCategoricalAccuracy
    return kind(2, name="top_k")


METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: "accuracy",
    "top_k": top_k,
    "largest": lambda: largest,
    "iou": lambda: keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou"),
    "mae": lambda: "mae",
    "r2": lambda: keras.metrics.R2Score(name="r2"),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    "auc": OneClass,
    "cosine": lambda: keras.metrics.CosineSimilarity(name="cosine"),
    "spread": Spread,
}
CALLBACKS: dict[str, Callable[[], Any]] = {
    "early_stopping": lambda: keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=0.05),
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=0.1),
    "scheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
    "swap_ema": lambda: keras.callbacks.SwapEMAWeights(),
    "ledger": Ledger,
    "temper": Temper,
}


def run(
    case: Mapping[str, Any],
    functions: Any,
    double: bool = False,
    eager: bool = False,
    shaken: int = 0,
    more: Sequence[keras.callbacks.Callback] = (),
    before: Sequence[keras.callbacks.Callback] = (),
) -> list[dict[str, np.ndarray]]:
    """Fits one model to each of the case's data, one after the other.

    functions: has fit, evaluate and predict: tfdist, or keras.Model. eager: traces only what must be traced. shaken: if
    above 0, the seed of perturbations of the initial weights in the last place of the type. before, more: callbacks
    before and after those of the case.
    """
    add_rows_to_rows()  # as tfdist.init does: eagerly, plain Keras mixes rows if there are as many of them as channels
    with keras_settings.restored():
        keras_settings.forget_names()
        model = _model(case, double)
        if shaken:
            shake(model, np.random.default_rng(shaken), case["compile"].get("precision", "float32"))
        eager = eager or bool(case["compile"].get("run_eagerly"))
        _compile(case, model, eager)
        if "loop" in case:
            return [_looped(part, model, functions, double, eager) for part in space.parts(case)]
        return [_fitted(part, model, functions, double, before, more) for part in space.parts(case)]


def _looped(
    case: Mapping[str, Any], model: keras.Model, functions: Any, double: bool, eager: bool
) -> dict[str, np.ndarray]:
    parts, rows = _cast(data.arrays(case), double), case["fit"]["batch_size"]
    batches = [
        keras.tree.map_structure(tf.constant, _rows(parts, start, start + rows))
        for start in range(0, case["data"]["size"], rows)
    ]
    return loops.run(case, model, functions, batches * case["fit"]["epochs"], eager) | _weights(model)


def _weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {
        f"model/{index:04d}": np.asarray(variable.value).astype(np.float64)
        for index, variable in enumerate(once(model.variables))
        if is_number(variable)
    }


def _fitted(
    case: Mapping[str, Any],
    model: keras.Model,
    functions: Any,
    double: bool,
    before: Sequence[keras.callbacks.Callback],
    more: Sequence[keras.callbacks.Callback],
) -> dict[str, np.ndarray]:
    fit, parts = case["fit"], _cast(data.arrays(case, rank=0 if functions is keras.Model else given.rank), double)
    validation = _cast(data.arrays(case, "eval"), double)
    options: dict[str, Any] = {
        name: fit[name] for name in ("epochs", "initial_epoch", "steps_per_epoch", "validation_freq") if name in fit
    }
    if fit.get("validation") == "data":
        options["validation_data"] = validation
    elif fit.get("validation") == "split":
        options["validation_split"] = 0.3
    if "class_weight" in fit:
        options["class_weight"] = loops.CLASS_WEIGHT
    options["callbacks"] = [*before, *(CALLBACKS[name]() for name in fit.get("callbacks", ())), *more]
    (keras.utils.set_random_seed if fit.get("shuffle") else keras_settings.seed)(case["seed"])
    history = functions.fit(model, **_given(case, parts), **options, verbose=0)
    found = {f"loss/{name}": np.array(values, np.float64) for name, values in history.history.items()}
    found |= _weights(model)
    if fit.get("evaluate") and case.get("evaluate", True):
        x, y, *w = validation
        scores = functions.evaluate(
            model, x, y, sample_weight=w[0] if w else None, batch_size=5, return_dict=True, verbose=0
        )
        found |= {f"eval/{name}": np.array(value, np.float64) for name, value in scores.items()}
        predicted = functions.predict(model, x, batch_size=6, verbose=0)
        found |= {
            f"predict/{index}": np.asarray(value, np.float64)
            for index, value in enumerate(keras.tree.flatten(predicted))
        }
    return found


def _model(case: Mapping[str, Any], double: bool) -> keras.Model:
    keras.config.set_floatx("float32")
    policy = POLICIES[case["compile"].get("precision", "float32")]

    def build(double: bool) -> keras.Model:
        keras_settings.seed(case["seed"])
        keras.config.set_dtype_policy("float64" if double else policy)
        return models.build(case["model"], double)

    single = build(False)
    if not double:
        return single
    keras.config.set_floatx("float64")
    model = build(True)
    for variable, value in zip(model.variables, single.variables, strict=True):
        variable.assign(tf.cast(value.value, variable.dtype))
    return model


OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "sgd": keras.optimizers.SGD,
    "momentum": lambda rate, **more: keras.optimizers.SGD(rate, momentum=0.9, **more),
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "adadelta": keras.optimizers.Adadelta,
    "adafactor": keras.optimizers.Adafactor,
    "adagrad": keras.optimizers.Adagrad,
    "adamax": keras.optimizers.Adamax,
    "ftrl": keras.optimizers.Ftrl,
    "lamb": keras.optimizers.Lamb,
    "lion": keras.optimizers.Lion,
    "muon": keras.optimizers.Muon,
    "nadam": keras.optimizers.Nadam,
    "nesterov": lambda rate, **more: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, **more),
    "rmsprop": lambda rate, **more: keras.optimizers.RMSprop(rate, momentum=0.5, centered=True, **more),
}


def _compile(case: Mapping[str, Any], model: keras.Model, eager: bool) -> None:
    options = case["compile"]
    optimizer = OPTIMIZERS[options["optimizer"]]
    arguments = {
        name: options[name]
        for name in (
            "clipnorm",
            "global_clipnorm",
            "clipvalue",
            "gradient_accumulation_steps",
            "use_ema",
            "ema_momentum",
            "weight_decay",
        )
        if name in options
    }
    loss, metrics = LOSSES[options["loss"]](), [METRICS[name]() for name in options["metrics"]]
    if case["model"]["head"] == "dict":
        loss, metrics = {"kind": LOSSES["entropy"](), "size": "mse"}, {"kind": ["accuracy"], "size": ["mae"]}
    rate = options["learning_rate"]
    model.compile(
        optimizer(layers.CountingRate(rate) if options.get("counting_rate") else rate, **arguments),
        loss=loss,
        loss_weights={"kind": 0.4, "size": 2.5} if options.get("loss_weights") else None,
        # Keras makes a metric even of an empty list, which a custom train_step would have to build.
        metrics=(metrics or None) if not options.get("weighted_metrics") else None,
        weighted_metrics=(metrics or None) if options.get("weighted_metrics") else None,
        run_eagerly=eager,
        jit_compile=bool(options.get("jit_compile")) and not eager,
        steps_per_execution=1 if eager else options.get("steps_per_execution", 1),
    )


def _cast(parts: tuple, double: bool) -> tuple:
    return keras.tree.map_structure(
        lambda value: value.astype(FLOAT[double]) if value.dtype.kind == "f" else value, parts
    )


class Pages(keras.utils.PyDataset):
    """Batches of rows in their order."""

    def __init__(self, parts: tuple, batch: int):
        super().__init__()
        self.parts, self.batch = parts, batch

    def __len__(self) -> int:
        return -(-len(keras.tree.flatten(self.parts)[0]) // self.batch)

    def __getitem__(self, index: int) -> tuple:
        return _rows(self.parts, index * self.batch, (index + 1) * self.batch)


def _rows(parts: tuple, start: int, stop: int) -> tuple:
    return keras.tree.map_structure(lambda value: value[start:stop], parts)


def _given(case: Mapping[str, Any], parts: tuple) -> dict[str, Any]:
    """Returns x, y, sample_weight and related arguments of fit, for each kind of data."""
    kind, batch, shuffle = case["data"]["source"], case["fit"]["batch_size"], case["fit"].get("shuffle", False)
    endless = "steps_per_epoch" in case["fit"]
    if kind == "arrays":
        x, y, *w = parts
        return {"x": x, "y": y, "sample_weight": w[0] if w else None, "batch_size": batch, "shuffle": shuffle}
    if kind == "dataset":
        dataset = tf.data.Dataset.from_tensor_slices(parts)
        dataset = dataset.shuffle(100, seed=5) if shuffle else dataset
        return {"x": (dataset.repeat() if endless else dataset).batch(batch)}
    if kind == "pages":
        return {"x": Pages(parts, batch), "shuffle": False}
    return {"x": _generator(parts, batch)}


def _generator(parts: tuple, batch: int) -> Iterator[tuple]:
    size = len(keras.tree.flatten(parts)[0])
    while True:
        for start in range(0, size, batch):
            yield _rows(parts, start, start + batch)


@contextlib.contextmanager
def large_outputs(wanted: bool) -> Iterator[None]:
    """Context manager. wanted: outputs of any size count as too large to be passed around."""
    from tfdist.keras_fit import own_rows

    before = own_rows.LARGEST
    own_rows.LARGEST = 0 if wanted else before
    try:
        yield
    finally:
        own_rows.LARGEST = before


def on_workers(case: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    """Runs the case with tfdist's functions, in a worker."""
    import tfdist
    from tfdist.keras_fit import joining

    joining._runtime = runtime  # this process has then joined already
    train_steps.Noisy.rank = runtime.rank
    if "plain_backup" in case["fit"]:
        from tests.fuzz import fit_backed_up

        return {"parts": [fit_backed_up.run(case, runtime)]}
    with large_outputs(bool(case["fit"].get("large"))):
        if "backup" in case["fit"]:
            from tests.fuzz import fit_resumed

            return {"parts": [fit_resumed.run(case, tfdist, runtime)]}
        return {"parts": [{"arrays": arrays, "replicas": []} for arrays in run(case, tfdist)]}


def runs(kind: str, case: Mapping[str, Any]) -> list[list[dict[str, np.ndarray]]]:
    """Returns, for each run, the results of plain Keras for each of the case's data. Kinds as in oracle.py."""
    # In half precision, one run in eight may have a different largest logit somewhere, and so another accuracy.
    more = MORE if case["compile"].get("precision", "float32") == "float32" else 4 * MORE
    # Keras 3.15 counts the first batch twice in the shown losses of several outputs, when it runs eagerly.
    eager = case["model"]["head"] != "dict"
    ways: list[tuple[bool, int]] = {
        "double": [(True, 0)],
        "single": [(False, 0)],
        "some": [(True, seed) for seed in (1, 2, 3)],
        "more": [(False, seed) for seed in range(4, 4 + more)],
    }[kind]
    return [run(case, keras.Model, double=double, eager=eager, shaken=shaken) for double, shaken in ways]
