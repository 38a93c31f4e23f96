"""A long fit for scripts/bench_leaks.py: FOLDER STEPS COMMUNICATION. The chief writes what it holds every 50 steps."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist
from tests.e2e.usage import FILE, usage

folder, steps, communication = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEPS_PER_EPOCH, BATCH = 50, 16


class Recorder(keras.callbacks.Callback):
    """Writes after each epoch, on the chief."""

    def on_epoch_end(self, epoch, logs=None):
        if tfdist.is_chief():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": (epoch + 1) * STEPS_PER_EPOCH, **usage()}) + "\n")


tfdist.init(communication=communication)
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(STEPS_PER_EPOCH * BATCH, 8)).astype("float32")
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
tfdist.fit(
    model,
    x,
    x[:, :3].argmax(1),
    batch_size=BATCH,
    epochs=steps // STEPS_PER_EPOCH,
    validation_data=(x[:BATCH], x[:BATCH, :3].argmax(1)),
    validation_freq=10,
    callbacks=[Recorder(), keras.callbacks.BackupAndRestore(folder / "backup")],
    verbose=0,
)
