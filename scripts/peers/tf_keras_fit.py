"""Peer: `fit` of tf-keras (Keras 2) under MultiWorkerMirroredStrategy, as it worked until TensorFlow 2.15.

Needs TF_USE_LEGACY_KERAS=1 and, for several workers, TF_CONFIG. A window is one call of the compiled function.
"""

from cell import BLOCK, Cell

cell = Cell()

import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402
from fit_windows import callbacks  # noqa: E402
from keras_models import build, count, forward_flops, make_optimizer  # noqa: E402

keras = tf.keras
strategy = tf.distribute.MultiWorkerMirroredStrategy() if cell.world > 1 else tf.distribute.get_strategy()
x, y = cell.batches()


def batches(_=None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(tf.data.AUTOTUNE)


with strategy.scope():
    model = build(cell.workload, keras)
    model.compile(
        make_optimizer(cell.workload, keras),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=cell.steps,
    )
    model.distribute_reduction_method = "first"  # the default reports the sum of the workers' means as the loss
dataset = strategy.distribute_datasets_from_function(batches) if cell.world > 1 else batches()
model.fit(
    dataset,
    steps_per_epoch=100 * cell.windows * cell.steps,
    verbose=0,
    callbacks=callbacks(cell, keras, save_freq=BLOCK),
)
cell.finish(
    parameters=count(model),
    flops=forward_flops(model, cell.batch),
    versions=f"tf-keras {tf_keras.__version__}, TensorFlow {tf.__version__}",
)
