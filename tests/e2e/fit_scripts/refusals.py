"""What tfdist.fit must refuse, notice or mend; each finding is a line of output."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.control.exit_codes import TfdistError

rank = tfdist.init(heartbeat_timeout=30).rank
x = np.arange(1, 41, dtype="float32").reshape(40, 1)


def compiled(model):
    model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[keras.metrics.MeanSquaredError(name="target")])
    return model


def dense(units=1):
    return compiled(keras.Sequential([keras.Input((1,)), keras.layers.Dense(units)]))


def refused(name, function):
    try:
        function()
        print(f"{name}: nothing happened", flush=True)
    except TfdistError as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)


class Seen(keras.metrics.Metric):
    """Sum, and sum of squares, of the targets: both are right only if each sample came once."""

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


# Nobody has set a seed: arrays come in a new order each epoch, the same on all workers, every sample once.
model = dense()
model.compile("sgd", "mse", metrics=[Seen()])
after = []  # each batch: of its samples and those before in the epoch
history = tfdist.fit(model, x / 40, x, batch_size=7, epochs=3, verbose=0, callbacks=[keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: after.append(float(logs["squares"])))])
orders = {tuple(after[start:start + 6]) for start in range(0, len(after), 6)}  # 40 samples in batches of 7
print("once:", json.dumps([history.history["sum"], history.history["squares"], len(orders)]), flush=True)

# A dataset in another order on each worker: the chief's is taken.
dataset = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(40).batch(7)
print("chief's:", json.dumps(tfdist.fit(model, dataset, epochs=2, verbose=0).history["squares"]), flush=True)

refused("train_step", lambda: tfdist.fit(compiled(Ignores([keras.Input((1,)), keras.layers.Dense(1)])), x, x, verbose=0))
deeper = compiled(keras.Sequential([keras.Input((1,)), *(keras.layers.Dense(1) for _ in range(1 + rank))]))
refused("variables", lambda: tfdist.fit(deeper, x, x, verbose=0))
refused("not a model", lambda: tfdist.fit(x, x))
# From here on the connection is spoiled.
if sys.argv[1] == "length":
    shorter = tf.data.Dataset.from_tensor_slices((x, x)).batch(4).take(5 - rank)
    refused("length", lambda: tfdist.fit(dense(), shorter.filter(lambda *_: True), verbose=0))
else:
    def later(index):
        return index + tf.cast(index > 20, tf.float32) * rank  # the first batches are alike

    refused("order", lambda: tfdist.fit(dense(), tf.data.Dataset.from_tensor_slices((x, x)).map(lambda a, b: (later(a), b)).batch(4), verbose=0))
