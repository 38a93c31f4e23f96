"""TensorFlow's tutorial "Multi-worker training with Keras", for Keras 3 and scikit-learn's digits; written for one
process.
"""

import json

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def digits_dataset(batch_size):
    x_train, y_train = load_digits(return_X_y=True)
    x_train = x_train.reshape(-1, 8, 8).astype(np.float32) / np.float32(16)
    return (
        tf.data.Dataset.from_tensor_slices((x_train, y_train.astype(np.int64))).shuffle(1797).repeat().batch(batch_size)
    )


def build_and_compile_cnn_model():
    model = keras.Sequential(
        [
            keras.layers.InputLayer(shape=(8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
    return model


multi_worker_dataset = digits_dataset(64)
multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=20)
print("history:", json.dumps(history.history))
