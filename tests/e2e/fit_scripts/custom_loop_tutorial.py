"""TensorFlow's tutorial "Custom training loop with Keras and MultiWorkerMirroredStrategy", for Keras 3 and
scikit-learn's digits; written for one process."""

import json

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

num_epochs, num_steps_per_epoch, global_batch_size = 3, 20, 64


def dataset_fn():
    x_train, y_train = load_digits(return_X_y=True)
    x_train = x_train.reshape(-1, 8, 8).astype(np.float32) / np.float32(16)
    return (
        tf.data.Dataset.from_tensor_slices((x_train, y_train.astype(np.int64)))
        .shuffle(1797)
        .repeat()
        .batch(global_batch_size)
    )


def build_cnn_model():
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


keras.utils.set_random_seed(7)
multi_worker_dataset = dataset_fn()
multi_worker_model = build_cnn_model()
optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(iterator):
    x, y = next(iterator)
    with tf.GradientTape() as tape:
        predictions = multi_worker_model(x, training=True)
        loss = loss_object(y, predictions) + tf.add_n(multi_worker_model.losses)
    gradients = tape.gradient(loss, multi_worker_model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, multi_worker_model.trainable_variables, strict=True))
    train_accuracy.update_state(y, predictions)
    return loss


def train():
    history = {"accuracy": [], "loss": []}
    iterator = iter(multi_worker_dataset)
    for epoch in range(num_epochs):
        total_loss = 0.0
        for _ in range(num_steps_per_epoch):
            total_loss += float(train_step(iterator))
        history["loss"].append(total_loss / num_steps_per_epoch)
        history["accuracy"].append(float(train_accuracy.result()))
        print(f"Epoch: {epoch}, accuracy: {history['accuracy'][-1]:f}, train_loss: {history['loss'][-1]:f}.")
        train_accuracy.reset_state()
    return history


history = train()
print("history:", json.dumps(history))
