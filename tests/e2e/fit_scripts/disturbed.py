"""The job of `scripts/chaos.py --job=fit`: FOLDER EPOCHS. Run again after a fault, it resumes from its backup.

In FOLDER: logs/rank-0.jsonl, a record for each epoch, in the form of tfdist.train; end.npz, all that the model and its
optimizer hold at the end. While FOLDER/faults/pace exists, every batch takes longer by the seconds given in that file.
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.telemetry.events import Event
from tfdist.telemetry.jsonl import JsonlObserver, next_attempt

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
log, pace = folder / "logs" / "rank-0.jsonl", folder / "faults" / "pace"


class Recorder(keras.callbacks.Callback):
    """Records each epoch, on the chief."""

    def __init__(self):
        super().__init__()
        self.tell = lambda event: None
        if tfdist.is_chief():
            self.tell = JsonlObserver(log, run_id="fit", attempt=next_attempt(log), rank=0)

    def on_train_begin(self, logs=None):
        self.tell(Event("start", 0, {}))

    def on_epoch_end(self, epoch, logs=None):
        self.tell(Event("train", epoch + 1, {name: float(value) for name, value in logs.items()}))

    def on_train_batch_end(self, batch, logs=None):
        if pace.exists():
            time.sleep(float(pace.read_text()))


tfdist.init(heartbeat_timeout=3)
keras.utils.set_random_seed(3)
tf.config.experimental.enable_op_determinism()
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.01, use_ema=True), "sparse_categorical_crossentropy", metrics=["accuracy"])
tfdist.fit(
    model,
    x,
    x[:, :3].argmax(1),
    batch_size=24,
    epochs=epochs,
    validation_split=0.25,
    verbose=0,
    callbacks=[Recorder(), keras.callbacks.BackupAndRestore(folder / "backup")],
)
if tfdist.is_chief():
    held = [*model.weights, *model.optimizer.variables]
    np.savez(folder / "end.npz", **{f"{place} {value.path}": np.asarray(value) for place, value in enumerate(held)})
tfdist.barrier()
