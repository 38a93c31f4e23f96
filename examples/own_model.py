r"""Your own model and data in `tfdist.train`: two functions. Here: on which of two spirals does a point lie?

    source scripts/environment.sh && python -m tfdist.launch --workers=2 -- --model=examples/own_model.py:model \
      --source=examples/own_model.py:data --global_batch=64 --epochs=10 --learning_rate=0.01 --run_dir=runs/own_model

Expected, in half a minute on two cores: an accuracy of at least 0.98 in the evaluation at the end.
"""

import keras
import numpy as np


def model(num_outputs, width=64):
    """May declare these arguments: num_outputs (from the data), x_spec, and the names in --model_args (width=128)."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((2,)), layers.Dense(width, "relu"), layers.Dense(width, "relu"), layers.Dense(num_outputs)]
    )


def data(split):
    """Returns (x, y) of the split "train" or "eval". It must return the same on all workers."""
    random = np.random.default_rng({"train": 0, "eval": 1}[split])
    label = random.integers(0, 2, 2000)
    turn = random.uniform(0.5, 2 * np.pi, 2000)
    angle = turn + np.pi * label
    x = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + random.normal(0, 0.1, (2000, 2))
    return x.astype("float32"), label.astype("int32")
