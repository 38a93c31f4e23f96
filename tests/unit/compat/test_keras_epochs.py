"""How far Keras' loops read what they are given."""

import itertools
import time

import keras
import numpy as np

from tfdist.compat import keras_epochs


def test_a_generator_is_read_no_further_than_it_is_needed():
    """What Keras has read ahead at the end of a validation is lost; how much that is differs from worker to worker."""
    read = {"train": 0, "validation": 0}

    def batches(kind):
        for number in itertools.count():
            read[kind] += 1
            yield np.full((4, 3), number, "float32"), np.zeros((4, 1), "float32")

    class Slow(keras.callbacks.Callback):
        """Gives whatever reads ahead the time for it."""

        def on_test_batch_end(self, batch, logs=None):
            time.sleep(0.05)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with keras_epochs.data_changed(lambda dataset: dataset):
        model.fit(
            batches("train"),
            steps_per_epoch=5,
            epochs=3,
            validation_data=batches("validation"),
            validation_steps=3,
            callbacks=[Slow()],
            verbose=0,
        )
    # Of each validation Keras takes the two batches again that it has looked at in the beginning.
    assert read == {"train": 15, "validation": 2 + 3 * 1}
