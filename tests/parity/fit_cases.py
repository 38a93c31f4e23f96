"""Cases that tests/parity/test_fit.py runs with `model.fit` in one process and with `tfdist.fit` on several workers.

A case takes the three functions (fit, evaluate, predict) and a folder, and returns values to compare: numbers, texts,
lists and dicts of them. Models are small; data is generated, or scikit-learn's digits.
"""

from __future__ import annotations

import csv
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

CASES = {}
CROSSENTROPY = "sparse_categorical_crossentropy"


def case(function):
    CASES[function.__name__] = function
    return function


def samples(count, features=8, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)).astype("float32")
    return x, (x[:, :classes] + 0.3 * rng.normal(size=(count, classes))).argmax(1)


def dense(*between, units=16, optimizer="adam", loss=CROSSENTROPY, metrics=("accuracy",), **options):
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(units, activation="relu"), *between, layers.Dense(3, activation="softmax")]
    )
    model.compile(optimizer, loss, metrics=list(metrics), **options)
    return model


def tokens(count=50, length=12, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 20, (count, length))
    ids[np.arange(length) >= rng.integers(3, length + 1, count)[:, None]] = 0
    return ids, (ids * 7 + 3) % 5


# -- the six models ----------------------------------------------------------------------------------------------------


@case
def dense_with_class_weights(fit, evaluate, predict, folder):
    x, y = samples(101)
    model = dense(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    history = fit(
        model,
        x,
        y,
        batch_size=16,
        epochs=3,
        class_weight={0: 1.0, 1: 2.5, 2: 0.5},
        validation_split=0.2,
        validation_freq=2,
    )
    return {
        "history": history.history,
        "evaluate": evaluate(model, x, y, batch_size=30),
        "predict": predict(model, x, batch_size=17),
    }


@case
def probabilities_of_large_logits(fit, evaluate, predict, folder):
    """Below 1e-7, where a crossentropy of a probability alone would have no gradient."""
    x, y = samples(74)
    wanted = {"softmax": y, "sigmoid": np.eye(3)[y]}
    found = {}
    for jit_compile in (False, True):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((8,))
        model = keras.Model(inputs, {name: layers.Dense(3, name)(inputs) for name in wanted})
        losses = {"softmax": CROSSENTROPY, "sigmoid": "binary_crossentropy"}
        model.compile("sgd", losses, metrics=dict.fromkeys(wanted, ["accuracy"]), jit_compile=jit_compile)
        history = fit(model, 50 * x, wanted, batch_size=32, epochs=2, validation_data=(200 * x, wanted))
        found[f"jit_compile={jit_compile}"] = [
            history.history,
            evaluate(model, 100 * x, wanted, batch_size=32),
            predict(model, x, batch_size=32),
        ]
    return found


@case
def cnn_with_batchnorm(fit, evaluate, predict, folder):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x[:250] / 16).reshape(-1, 8, 8, 1).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(8, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = fit(model, x[:104], y[:104], batch_size=32, epochs=2, validation_data=(x[200:], y[200:250]))
    return {
        "history": history.history,
        "statistics": [np.asarray(weight).tolist() for weight in model.non_trainable_weights],
    }


@case
def two_inputs_two_outputs(fit, evaluate, predict, folder):
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    hidden = layers.Dense(12, activation="tanh", activity_regularizer="l2", kernel_regularizer="l2")(
        layers.concatenate([a, b])
    )
    model = keras.Model(
        {"a": a, "b": b},
        {
            "kind": layers.Dense(3, activation="softmax", name="kind")(hidden),
            "size": layers.Dense(1, name="size")(hidden),
        },
    )
    model.compile(
        "adam",
        loss={"kind": CROSSENTROPY, "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae", keras.metrics.R2Score()]},
    )
    x, y = samples(90)
    inputs, targets = {"a": x, "b": x[:, :4] ** 2}, {"kind": y, "size": x.sum(1, keepdims=True)}
    validation = {"validation_data": (inputs, targets), "validation_batch_size": 30}
    history = fit(model, inputs, targets, batch_size=32, epochs=3, **validation)
    return {
        "history": history.history,
        "evaluate": evaluate(model, inputs, targets, return_dict=True),
        # The last batch has as many rows as those of the validation, yet Keras weights its shown losses differently.
        "in 50 rows and 30": evaluate(
            model,
            {name: rows[:80] for name, rows in inputs.items()},
            {name: rows[:80] for name, rows in targets.items()},
            batch_size=50,
            return_dict=True,
        ),
        "predict": predict(model, inputs),
    }


@case
def lstm_with_masking(fit, evaluate, predict, folder):
    ids, tags = tokens()
    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
            layers.Dense(5, activation="softmax"),
        ]
    )
    model.compile(
        "adam",
        CROSSENTROPY,
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="weighted")],
    )
    return {
        "history": fit(model, ids, tags, batch_size=16, epochs=3, validation_split=0.2).history,
        "evaluate": evaluate(model, ids, tags, batch_size=20),
    }


@case
def transformer_with_sample_weights(fit, evaluate, predict, folder):
    ids, tags = tokens()
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs) + layers.Embedding(12, 16)(np.arange(12))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    model.compile(
        keras.optimizers.AdamW(3e-3, weight_decay=0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    weights = np.linspace(0, 2, len(ids))
    history = fit(
        model,
        ids,
        tags[:, 0],
        batch_size=16,
        epochs=3,
        sample_weight=weights,
        validation_data=(ids, tags[:, 0], weights),
    )
    return {"history": history.history}


class WithComputeLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(16, activation="relu"), layers.Dense(3)
        self.penalty = keras.metrics.Mean(name="penalty")

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        penalty = ops.mean(ops.square(self.out.kernel)) + 0.1 * ops.std(
            y_pred
        )  # of the weights, and not a mean over samples
        self.penalty.update_state(penalty)
        return (
            ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
            + penalty
            + 0.01 * ops.mean(ops.square(x))
        )


@case
def subclass_with_compute_loss(fit, evaluate, predict, folder):
    x, y = samples(70)
    model = WithComputeLoss()
    model.compile("adam", metrics=["sparse_categorical_accuracy"])
    return {
        "history": fit(model, x, y, batch_size=16, epochs=3, validation_data=(x, y)).history,
        "predict": predict(model, x, batch_size=16),
    }


class WithLayersOfItsOwn(keras.Model):
    def __init__(self, builds=False):
        super().__init__()
        self.hidden, self.norm, self.out = (
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(3),
        )
        self.unused = layers.Dense(4)
        self.builds = builds

    def build(self, shape):
        if self.builds:
            self.hidden.build(shape)
            self.built = True
        else:
            super().build(shape)

    def call(self, x, training=False):
        return self.out(self.norm(self.hidden(x), training=training))


@case
def subclass_built_by_shape(fit, evaluate, predict, folder):
    x, y = samples(70)
    found = {}
    for builds in (False, True):  # if True, only some of the layers are built then
        model = WithLayersOfItsOwn(builds)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.build((None, 8))
        found[str(builds)] = {
            "history": fit(model, x, y, batch_size=16, epochs=2).history,
            "predict": predict(model, x, batch_size=16),
        }
    return {**found, "evaluate": evaluate(model, x, y, batch_size=16)}


# -- what was compiled -------------------------------------------------------------------------------------------------


@case
def optimizer_settings(fit, evaluate, predict, folder):
    x, y = samples(96)
    found = {}
    for name, options, steps in (  # a mistake in either of two combined settings shows in the weights
        ("clipnorm, ema", {"clipnorm": 0.05, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}, 2),
        (
            "global, accumulation",
            {"global_clipnorm": 0.05, "gradient_accumulation_steps": 3, "weight_decay": 0.01},
            1,
        ),
        ("schedule free", {}, 1),
    ):
        kind = keras.optimizers.ScheduleFreeAdamW if name == "schedule free" else keras.optimizers.Adam
        model = dense(optimizer=kind(0.01, **options), steps_per_execution=steps)
        model.optimizer.build(model.trainable_variables)  # else Keras' ScheduleFreeAdamW loses its first weights
        found[name] = {
            "history": fit(model, x, y, batch_size=8, epochs=2).history,
            "weights": [weight.tolist() for weight in model.get_weights()],
        }
    return found


@case
def jit_compile(fit, evaluate, predict, folder):
    x, y = samples(64)
    return {"history": fit(dense(jit_compile=True), x, y, batch_size=16, epochs=2, validation_data=(x, y)).history}


@case
def float16_loss_scale(fit, evaluate, predict, folder):
    x, y = samples(64)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = dense()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    x[40] = 6e4  # overflows: every worker must skip the update
    history = fit(model, x, y, batch_size=16, epochs=2, shuffle=False)
    return {
        "scale": float(model.optimizer.dynamic_scale),
        "iterations": int(model.optimizer.inner_optimizer.iterations),
        "epochs": len(history.history["loss"]),
    }


class OwnTrainStep(WithComputeLoss):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self._loss_tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


@case
def custom_train_step(fit, evaluate, predict, folder):
    x, y = samples(70)
    model = OwnTrainStep()
    model.compile("adam")
    return {"history": fit(model, x, y, batch_size=16, epochs=2).history}


@case
def large_outputs(fit, evaluate, predict, folder):
    """Treats outputs as too large to be gathered: each worker computes loss and metrics of its own rows."""
    from tfdist.keras_fit import own_rows

    before, own_rows.LARGEST = own_rows.LARGEST, -1
    try:
        x, y = samples(75)
        model = dense(
            layers.BatchNormalization(),
            layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"),
            metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="entropy")],
            weighted_metrics=["accuracy"],
        )
        history = fit(
            model, x, y, batch_size=16, epochs=3, sample_weight=np.linspace(0, 2, 75), validation_data=(x[:1], y[:1])
        )
        # The last batch has rows for one worker only. With weights, too: the graph is that of the first call.
        uneven = fit(model, x[:49], y[:49], batch_size=16, epochs=1, sample_weight=np.linspace(0, 2, 49))
    finally:
        own_rows.LARGEST = before
    return {
        "history": history.history,
        "uneven": uneven.history,
        "evaluate": evaluate(model, x, y, batch_size=20),
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


@case
def large_outputs_compiled(fit, evaluate, predict, folder):
    from tfdist.keras_fit import own_rows

    before, own_rows.LARGEST = own_rows.LARGEST, -1
    try:
        x, y = samples(32)
        model = dense(layers.Dense(8, activity_regularizer="l2"), jit_compile=True)
        return {"history": fit(model, x, y, batch_size=16, epochs=2).history}
    finally:
        own_rows.LARGEST = before


def masked_mean(y_true, y_pred):
    """The mean over the samples of one class only, which is not a mean over all rows."""
    chosen = ops.cast(ops.equal(ops.reshape(y_true, (-1,)), 1), y_pred.dtype)
    return ops.sum(chosen * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)) / (ops.sum(chosen) + 0.1)


def spread_of_outputs(y_true, y_pred):
    return ops.std(y_pred)  # a scalar


@case
def large_outputs_of_losses_that_are_no_means(fit, evaluate, predict, folder):
    """The first two cases must not be computed from own rows, however large the outputs.

    tests/unit/keras_fit/test_pieces.py checks this for each of Keras' other losses and metrics of that kind.
    """
    from tfdist.keras_fit import own_rows

    before, own_rows.LARGEST = own_rows.LARGEST, -1
    x, y = samples(41)
    one_hot = np.eye(3, dtype="float32")[y]
    images, labels = x.reshape(41, 2, 4, 1), np.random.default_rng(3).integers(0, 3, (41, 2, 4))
    pixels = np.eye(3, dtype="float32")[labels]
    weights = np.linspace(0, 2, 41)

    def segmentation(loss, metrics=(), activation="softmax"):
        model = keras.Sequential(
            [
                keras.Input((2, 4, 1)),
                layers.Conv2D(4, 2, padding="same", activation="relu"),
                layers.Conv2D(3, 1, activation=activation),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics))
        return model

    def flat(loss, **options):
        return dense(optimizer=keras.optimizers.SGD(0.1), loss=loss, **options)

    losses, metrics = keras.losses, keras.metrics
    cases = {
        "dice": (segmentation(losses.Dice(), activation="sigmoid"), images, pixels, {}),
        "own metrics": (
            flat(CROSSENTROPY, metrics=[spread_of_outputs, metrics.MeanMetricWrapper(masked_mean, name="masked")]),
            x,
            y,
            {},
        ),
        # These are computed from own rows: all rows count alike, and their weights multiply.
        "class_weight": (flat("crossentropy"), x, y[:, None], {"class_weight": {0: 1.0, 1: 2.5, 2: 0.5}}),
        "sample_weight": (
            flat(
                "mse",
                loss_weights=[0.3],
                metrics=["mae"],
                weighted_metrics=[metrics.RootMeanSquaredError(), metrics.AUC(), metrics.F1Score(), metrics.R2Score()],
            ),
            x,
            one_hot,
            {"sample_weight": weights},
        ),
        "weighted_pixels": (
            segmentation(
                CROSSENTROPY, [metrics.MeanIoU(3, sparse_y_pred=False), metrics.SparseTopKCategoricalAccuracy(2)]
            ),
            images,
            labels,
            {"sample_weight": np.abs(images[..., 0])},
        ),
    }
    try:
        found = {}
        for name, (model, inputs, targets, options) in cases.items():
            if name != "class_weight":  # which is for training alone
                options["validation_data"] = inputs[:7], targets[:7]
            history = fit(model, inputs, targets, batch_size=16, epochs=2, shuffle=False, **options).history
            found[name] = {"history": history, "weights": [weight.tolist() for weight in model.get_weights()]}
    finally:
        own_rows.LARGEST = before
    return found


# -- inputs ------------------------------------------------------------------------------------------------------------


def metrics():
    return ["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="entropy")]


@case
def dataset_of_unknown_length(fit, evaluate, predict, folder):
    x, y = samples(103)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: x[0] > -1.5).batch(7)
    # Not Adam: Keras counts one iteration too many each time it meets the end of such data, which shows in Adam's next
    # steps.
    model = dense(optimizer=keras.optimizers.SGD(0.1), metrics=metrics())
    return {
        "length": int(dataset.cardinality()),
        "history": fit(model, dataset, epochs=3, validation_data=dataset).history,
        "evaluate": evaluate(model, dataset),
        "predict": predict(model, dataset),
    }


@case
def infinite_dataset(fit, evaluate, predict, folder):
    # Not the same dataset for both: iterators of one shuffled dataset take their seeds from one generator, in the order
    # in which prefetching happens to reach the end of a pass, so plain Keras is not repeatable either.
    trained, validated = (
        tf.data.Dataset.from_tensor_slices(samples(50)).shuffle(50, seed=seed).repeat().batch(8) for seed in (3, 4)
    )
    return {
        "history": (
            fit(dense(), trained, epochs=3, steps_per_epoch=5, validation_data=validated, validation_steps=3).history
        )
    }


@case
def last_batches_smaller_than_the_cluster(fit, evaluate, predict, folder):
    x, y = samples(9)
    model = dense(layers.BatchNormalization(), metrics=metrics())
    return {
        "history": fit(model, x, y, batch_size=8, epochs=2).history,
        "evaluate": evaluate(model, x[:1], y[:1]),
        "predict": predict(model, x, batch_size=2),
    }


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = samples(45)
        return x[index * 10 : index * 10 + 10], y[index * 10 : index * 10 + 10]


@case
def pydataset_and_generator(fit, evaluate, predict, folder):
    def generator():
        for index in range(40):
            yield samples(9, seed=index)

    model = dense()
    return {
        "pages": fit(model, Pages(), epochs=2, shuffle=False).history,
        "generator": fit(model, generator(), epochs=2, steps_per_epoch=10).history,
    }


# -- callbacks ---------------------------------------------------------------------------------------------------------


def with_callback(fit, *callbacks, epochs=6, rate=0.05, patience_data=False, **options):
    x, y = samples(64)
    model = dense(optimizer=keras.optimizers.Adam(rate, **options))
    history = fit(
        model,
        x,
        np.roll(y, 1),
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        validation_data=(x[:20], y[:20]),
        callbacks=list(callbacks),
    )
    return model, {
        "history": history.history,
        "epochs": history.epoch,
        "rate": float(model.optimizer.learning_rate),
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


@case
def callbacks_that_save_and_stop(fit, evaluate, predict, folder):
    stopping = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    saving = keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", save_best_only=True)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
    found = with_callback(fit, stopping, saving, backup, epochs=12)[1]
    loaded = keras.models.load_model(f"{folder}/best.keras") if files(folder) else None
    return {
        **found,
        "stopped": stopping.stopped_epoch,
        "best": stopping.best,
        "chief": {
            "files": files(folder),  # no backup is left
            "predict": loaded.predict(samples(64)[0], verbose=0).tolist() if loaded else None,
        },
    }


@case
def callback_reduce_lr_on_plateau(fit, evaluate, predict, folder):
    return with_callback(fit, keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.01))[1]


@case
def callback_learning_rate_scheduler(fit, evaluate, predict, folder):
    return with_callback(fit, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7))[1]


@case
def callback_tensorboard(fit, evaluate, predict, folder):
    found = with_callback(fit, keras.callbacks.TensorBoard(folder, histogram_freq=1, update_freq=2), epochs=2)[1]
    values = []
    for path in sorted(Path(folder).rglob("*tfevents*")):
        values += [
            (event.step, value.tag, tf.make_ndarray(value.tensor).tolist())
            for event in tf.compat.v1.train.summary_iterator(str(path))
            for value in event.summary.value
            if value.metadata.plugin_data.plugin_name == "scalars"
        ]
    return {**found, "chief": {"scalars": [list(value) for value in sorted(values)]}}


@case
def callback_csv_logger(fit, evaluate, predict, folder):
    found = with_callback(fit, keras.callbacks.CSVLogger(f"{folder}/log.csv"))[1]
    rows = (
        [
            [float(cell) for cell in row]
            for row in list(csv.reader(Path(f"{folder}/log.csv").read_text().splitlines()))[1:]
        ]
        if files(folder)
        else None
    )
    return {**found, "chief": {"rows": rows}}


@case
def callback_terminate_on_nan(fit, evaluate, predict, folder):
    found = with_callback(
        fit,
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LearningRateScheduler(lambda epoch: float("nan") if epoch == 2 else 0.01),
    )[1]
    return {"epochs": found["epochs"], "first": found["history"]["loss"][:2]}


@case
def callback_lambda(fit, evaluate, predict, folder):
    seen = []
    found = with_callback(
        fit,
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append([batch, float(logs["loss"])]),
            on_epoch_begin=lambda epoch, logs: seen.append(epoch),
        ),
        epochs=2,
    )[1]
    return {**found, "seen": seen}


@case
def callback_stops_in_a_batch_on_one_worker(fit, evaluate, predict, folder):
    """In one process there is one worker."""
    from tfdist import is_chief

    class Stop(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if is_chief() and self.params["epochs"] and self.model.optimizer.iterations >= 6:
                self.model.stop_training = True

    stop = Stop()
    return {**with_callback(fit, stop)[1], "batches": stop.batches}


@case
def callback_that_writes_and_decides(fit, evaluate, predict, folder):
    """A user's subclass of a callback that runs on the chief only."""

    class Warming(keras.callbacks.ModelCheckpoint):
        batches = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.batches += 1
            self.model.optimizer.learning_rate = 0.01 * self.batches

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.batches == 6

        def on_epoch_end(self, epoch, logs=None):
            logs["batches"] = self.batches

    return with_callback(fit, Warming(f"{folder}/model.keras"))[1]


@case
def callback_swap_ema_weights(fit, evaluate, predict, folder):
    return with_callback(fit, keras.callbacks.SwapEMAWeights(), use_ema=True, ema_momentum=0.8)[1]


@case
def callback_history_and_progress(fit, evaluate, predict, folder):
    own = keras.callbacks.History()
    found = with_callback(fit, own, keras.callbacks.ProgbarLogger(), epochs=2)[1]
    return {**found, "own": own.history}
