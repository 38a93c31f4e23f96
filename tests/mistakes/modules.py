"""The user's modules of a case, before anything is wrong with them."""

from __future__ import annotations

# What every case has in its folder as mine.py. Each function is separate, so that one of them can be replaced.
DATA = """
def data(split):
    random = np.random.default_rng(split == "train")
    count = 40 if split == "train" else 12
    y = random.integers(0, 3, count).astype("int32")
    x = (np.eye(3, 6)[y] + random.normal(scale=0.3, size=(count, 6))).astype("float32")
    return x, y
"""
OBJECT = """
class Items:
    def __init__(self, split):
        self.x, self.y = data(split)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]
"""
STREAM = """
def stream(split):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data(split))
"""
MODEL = """
def model(input_shape, num_outputs):
    import keras

    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(num_outputs or 3)])
"""
OBJECTIVE = """
def objective(outputs, y, w):
    import tensorflow as tf

    from tfdist.training.scores import Scores

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=outputs)
    return Scores(losses, w, {"hits": tf.cast(tf.argmax(outputs, -1, output_type=tf.int32) == y, tf.float32)})
"""
AUGMENT = """
def augment(x, y, seeds):
    return x * 1.5, y
"""
HEAD = "import numpy as np\n"
MINE = HEAD + "\n".join([DATA, OBJECT, STREAM, MODEL, OBJECTIVE, AUGMENT])

# A Keras script for two workers.
SCRIPT = """
import keras
import numpy as np
import tfdist

keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x = random.normal(size=(24, 6)).astype("float32")
y = random.integers(0, 3, 24)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
tfdist.fit(model, x, y, batch_size=8, epochs=2, verbose=0)
tfdist.evaluate(model, x, y, batch_size=8, verbose=0)
tfdist.predict(model, x, batch_size=8, verbose=0)
"""

TRAIN = (
    "train",
    "--source=mine:data",
    "--model=mlp",
    "--model_args=widths=(8,)",
    "--global_batch=8",
    "--steps=3",
    "--run_dir=run",
    "--export=none",
    "--noplot",
    "--trackers=none",
    "--save_minutes=0",
    "--log_every=1",
    "--startup_timeout=4",
)
