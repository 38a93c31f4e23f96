"""A custom training loop on two workers: the usual loop, inside `tfdist.spread`.

    source scripts/environment.sh && python -m tfdist.launch --workers=2 -- examples/custom_loop.py

Expected, in half a minute on two cores: an accuracy of at least 0.95 in the last epoch. It is the same, up to rounding,
on any number of workers.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
batches = tf.data.Dataset.from_tensor_slices((x.astype("float32") / 16, y)).shuffle(1797, seed=0).batch(64)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(3e-3)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)  # of all rows; each worker computes only its own rows
        loss = loss_of(y, outputs)
    gradients = tape.gradient(loss, model.trainable_variables)  # over the rows of all workers
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    accuracy.update_state(y, outputs)


with tfdist.spread(model, optimizer):
    for epoch in range(6):
        accuracy.reset_state()
        for x, y in batches:
            step(x, y)
        if tfdist.is_chief():
            print(f"epoch {epoch + 1}: accuracy {float(accuracy.result()):.3f}")
