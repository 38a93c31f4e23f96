"""What tfdist.fit must refuse, notice or fix; each finding is a line of output."""

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.e2e.sources import lookups
from tfdist.control.exit_codes import TfdistError
from tfdist.keras_fit import own_rows

rank = tfdist.init(heartbeat_timeout=30).rank
x = np.arange(1, 41, dtype="float32").reshape(40, 1)


def compiled(model):
    model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[keras.metrics.MeanSquaredError(name="target")])
    return model


def dense(units=1):
    return compiled(keras.Sequential([keras.Input((1,)), keras.layers.Dense(units)]))


def compiled_with(loss):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def refused(name, function):
    try:
        function()
        print(f"{name}: nothing happened", flush=True)
    except TfdistError as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)


class Seen(keras.metrics.Metric):
    """Sum and sum of squares of the targets: both are right only if each sample came once."""

    def __init__(self):
        super().__init__(name="seen")
        self.sums = self.add_weight(shape=(2,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign_add([tf.reduce_sum(y_true), tf.reduce_sum(y_true**2)])

    def result(self):
        return {"sum": self.sums[0], "squares": self.sums[1]}


class Ignores(keras.Sequential):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(data[0])}


class Erases(keras.Model):
    """Its train_step changes a number in the middle of the batch of the second input, differently on each worker."""

    def train_step(self, data):
        (a, b), y = data
        return super().train_step(((a, b - tf.reshape(tf.one_hot(17, 40), [40, 1]) * rank), y))


# No seed is set: arrays come in a new order each epoch, the same on all workers, every sample once.
model = dense()
model.compile("sgd", "mse", metrics=[Seen()])
after = []  # for each batch: the sum of squares over its samples and those before it in the epoch
history = tfdist.fit(
    model,
    x / 40,
    x,
    batch_size=7,
    epochs=3,
    verbose=0,
    callbacks=[
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after.append(float(logs["squares"])))
    ],
)
orders = {tuple(after[start : start + 6]) for start in range(0, len(after), 6)}  # 40 samples in batches of 7
print("once:", json.dumps([history.history["sum"], history.history["squares"], len(orders)]), flush=True)

# A dataset in another order on each worker: the chief's is taken.
dataset = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(40).batch(7)
print("chief's:", json.dumps(tfdist.fit(model, dataset, epochs=2, verbose=0).history["squares"]), flush=True)


def other(where):
    """Returns x; on workers other than the chief, x with another value."""
    changed = x.copy()
    changed[where] += rank
    return changed


# Only the targets differ, or one row in the middle, or arrays that are passed in: the chief's are taken.
for name, dataset in (
    ("targets", tf.data.Dataset.from_tensor_slices((x, other(20))).batch(40)),
    ("middle", tf.data.Dataset.from_tensor_slices((other(20), x)).batch(40)),
    ("weights", tf.data.Dataset.from_tensor_slices((x, x, other(30))).batch(40)),
    (
        "names",
        tf.data.Dataset.from_tensor_slices((x, x))
        .batch(40)
        .map(lambda a, b: (a, {"target": b + rank}))
        .map(lambda a, b: (a, b["target"])),
    ),
):
    print(f"taken {name}:", tfdist.fit(model, dataset, verbose=0).history["squares"], flush=True)
print("taken arrays:", tfdist.fit(model, other(3), other(39), batch_size=40, verbose=0).history["squares"], flush=True)

path = Path(sys.argv[1]) / "saved.txt"
if rank == 0:
    time.sleep(0.3)
    path.write_text("saved")
tfdist.barrier()
print("barrier:", path.read_text(), flush=True)

refused("other call", lambda: (tfdist.predict if rank else tfdist.evaluate)(dense(), x, batch_size=5))
refused("other epochs", lambda: tfdist.fit(dense(), x, x, epochs=1 + rank))
refused(
    "train_step", lambda: tfdist.fit(compiled(Ignores([keras.Input((1,)), keras.layers.Dense(1)])), x, x, verbose=0)
)
deeper = compiled(keras.Sequential([keras.Input((1,)), *(keras.layers.Dense(1) for _ in range(1 + rank))]))
refused("layers", lambda: tfdist.fit(deeper, x, x, verbose=0))
curved = compiled(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, activation=["relu", "tanh"][rank])]))
for name, use in (("fit", tfdist.fit), ("evaluate", tfdist.evaluate)):
    refused(f"curved, {name}", lambda use=use: use(curved, x, x, verbose=0))
refused("curved, predict", lambda: tfdist.predict(curved, x, verbose=0))
refused("lossy", lambda: tfdist.fit(compiled_with(["mse", "mae"][rank]), x, x, verbose=0))


class Widened(keras.layers.Layer):
    """Has more weights on the second worker, but nothing in its description shows that."""

    def build(self, shape):
        self.rows = [self.add_weight(shape=(1,), name=f"row_{number}") for number in range(1 + rank)]

    def call(self, x):
        return x + sum(self.rows)


widened = compiled(keras.Sequential([keras.Input((1,)), Widened()]))
refused("variables", lambda: tfdist.fit(widened, x, x, verbose=0))
refused("not a model", lambda: tfdist.fit(x, x))
for name, arguments in {
    "class weight": {"class_weight": np.ones(3)},
    "callback": {"callbacks": [None]},
    "frequency": {"validation_freq": "1", "validation_data": (x, x)},
    "validation": {"validation_data": 3},
    "rows": {"sample_weight": np.ones((40, 2, 2))},
}.items():
    refused(f"mistaken {name}", lambda arguments=arguments: tfdist.fit(dense(), x, x, verbose=0, **arguments))
refused("mistaken data", lambda: tfdist.evaluate(dense(), 3, verbose=0))


class Unbuilt(keras.Model):
    def __init__(self, times=1):
        super().__init__()
        self.inner, self.times = keras.layers.Dense(1), times

    def call(self, x):
        return tf.concat([self.inner(x)] * self.times, 0)


print("unbuilt:", tfdist.predict(compiled(Unbuilt()), x, verbose=0).shape, flush=True)
refused("twice the rows", lambda: tfdist.fit(compiled(Unbuilt(2)), x, x, verbose=0))
parts = ((x[start:stop], x[start:stop]) for start, stop in ((0, 8), (8, 8), (8, 16)))
print("no rows:", int(tfdist.evaluate(dense(), parts, verbose=0, return_dict=True)["loss"] >= 0), flush=True)
toggled = dense()
tfdist.fit(toggled, x, x, verbose=0)
toggled.layers[0].trainable = False
refused("toggled", lambda: tfdist.fit(toggled, x, x, verbose=0))
ids = np.arange(48, dtype="int32").reshape(8, 6) % 10
ids[3, 3], ids[6, 1] = 10, -11  # each worker has one id without a row
for kind in ("frozen embedding", "take", "whole numbers"):
    looking_up = lookups(kind)
    looking_up.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    found = [
        float(tfdist.evaluate(looking_up, ids, ids[:, 0] % 4, verbose=0)),
        tfdist.predict(looking_up, ids, verbose=0),
    ]
    try:
        found += tfdist.fit(looking_up, ids, ids[:, 0] % 4, verbose=0).history["loss"]
    except TfdistError as error:
        found.append(np.nan)
        print(f"missing rows: {type(error).__name__}: {error}", flush=True)
    print(f"missing rows, {kind}:", [bool(np.isnan(each).any()) for each in found], flush=True)
shorter = tf.data.Dataset.from_tensor_slices((x, x)).batch(4).take(5 - rank)
refused("length", lambda: tfdist.fit(dense(), shorter.filter(lambda *_: True), verbose=0))


def later(index, row):
    return row + tf.cast(index == 26, tf.float32) * rank  # in the middle of the fifth batch


rows = tf.data.Dataset.from_tensor_slices((x, x))
for name, dataset in (
    ("order", rows.map(lambda a, b: (later(a, a), b))),
    ("targets", rows.map(lambda a, b: (a, later(a, b)))),
    ("weights", rows.map(lambda a, b: (a, b, later(a, b)))),
):
    refused(name, lambda dataset=dataset: tfdist.fit(dense(), dataset.batch(5), verbose=0))
inputs = keras.Input((1,)), keras.Input((1,))
erases = compiled(Erases(inputs, keras.layers.Dense(1)(keras.layers.concatenate(inputs))))
refused("train_step's rows", lambda: tfdist.fit(erases, (x, x), x, batch_size=40, shuffle=False, verbose=0))
own_rows.LARGEST = -1
refused("own rows", lambda: tfdist.fit(dense(), rows.map(lambda a, b: (a, later(a, b))).batch(5), verbose=0))
refused("evaluate", lambda: tfdist.evaluate(dense(), rows.map(lambda a, b: (a, later(a, b))).batch(5), verbose=0))
own_rows.LARGEST = 1 << 24
refused("predict", lambda: tfdist.predict(dense(), rows.map(lambda a, b: later(a, a)).batch(5), verbose=0))
if rank == 0:
    refused("chief only", lambda: tfdist.evaluate(dense(), x, x, verbose=0))
