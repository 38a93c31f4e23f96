"""Workers whose tensors travel through TensorFlow's collectives; rank 1 is lost in its fourth step: HOW WHERE.

HOW: kill (SIGKILL), stop (SIGSTOP), or stick (in Python, while its heartbeats continue). WHERE: fit, or reduce: a loop
that does nothing but reduce, so that no exchange over the ring of connections notices which rank is missing.
"""

import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.keras_fit.joining import explained

how, where = sys.argv[1:]
runtime = tfdist.init(communication="ring", heartbeat_timeout=2, collective_timeout=4 if how == "stick" else 600)


class Lost(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if runtime.rank == 1 and batch == 3:
            if how == "stick":
                time.sleep(3600)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def reduce():
    total = tf.function(lambda x: runtime.all_reduce([x])[0], autograph=False)
    with explained(runtime):
        for step in range(1000):
            total(tf.ones([1000]))
            Lost().on_train_batch_end(step)


def fit():
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    tfdist.fit(model, x, x[:, 0], batch_size=8, epochs=100, verbose=0, callbacks=[Lost()])


{"fit": fit, "reduce": reduce}[where]()
