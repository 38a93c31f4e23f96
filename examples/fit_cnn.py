"""A Keras script on two workers: `tfdist.fit` replaces `model.fit`.

    source scripts/environment.sh && python -m tfdist.launch --workers=2 -- examples/fit_cnn.py

Expected, in under a minute on two cores: a validation accuracy of at least 0.92 (on digits by writers who are not in
the training data). It is the same, up to rounding, on any number of workers.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)  # 1,797 images of 8 x 8, in 0..16
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

# Batches are global: two workers compute 32 rows each.
tfdist.fit(model, x[:1440], y[:1440], batch_size=64, epochs=10, verbose=2)
_, accuracy = tfdist.evaluate(model, x[1440:], y[1440:], batch_size=357, verbose=0)

if tfdist.is_chief():
    print(f"validation accuracy {accuracy:.3f}")
