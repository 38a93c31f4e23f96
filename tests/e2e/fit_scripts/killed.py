"""A script that is killed once: FOLDER [worker to kill]. Its backup is in FOLDER, or in $BACKUP_DIR.

Run again unchanged, it must end as if nothing had happened.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

folder, victim = Path(sys.argv[1]), sys.argv[2:]


class KilledOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        marker = folder / "killed"
        if (
            victim
            and str(tfdist.init().rank) == victim[0]
            and self.model.optimizer.iterations == 18
            and not marker.exists()
        ):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(60, 8)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).shuffle(60, seed=5).batch(6)
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = tfdist.fit(
    model,
    dataset,
    epochs=7,
    steps_per_epoch=4,
    validation_data=dataset.take(2),
    verbose=0,
    callbacks=[
        KilledOnce(),
        keras.callbacks.BackupAndRestore(os.environ.get("BACKUP_DIR") or folder / "backup"),
        keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=0.3, factor=0.5),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ],
)
print(
    "history:",
    json.dumps({name: np.asarray(values).tolist() for name, values in history.history.items()}),
    history.epoch,
    float(abs(model.get_weights()[0]).sum()),
)
