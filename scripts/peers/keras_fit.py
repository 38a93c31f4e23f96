"""Peer: `model.fit` of Keras 3 on TensorFlow, one process. Variants: "" without XLA; "xla" with XLA (Keras' own
default); "tfdist": the same script with `tfdist.fit`, on several workers if there are several.

A window is one call of the compiled function: steps_per_execution = steps.
"""

from cell import BLOCK, Cell

cell = Cell()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from fit_windows import callbacks  # noqa: E402
from keras_models import build, count, forward_flops, make_optimizer  # noqa: E402

spread = cell.variant == "tfdist"
x, y = cell.global_batches() if spread else cell.batches()
model = build(cell.workload, keras)
model.compile(
    make_optimizer(cell.workload, keras),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    steps_per_execution=cell.steps,
    jit_compile=cell.variant == "xla",
)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(tf.data.AUTOTUNE)
if cell.resume:
    model.optimizer.build(model.trainable_variables)  # otherwise BackupAndRestore skips the optimizer's variables
if spread:
    from tfdist import fit
else:
    fit = keras.Model.fit
fit(
    model,
    dataset,
    steps_per_epoch=cell.windows * cell.steps,
    verbose=0,
    callbacks=callbacks(cell, keras, save_freq=BLOCK * cell.steps),
)
cell.finish(
    parameters=count(model),
    flops=forward_flops(model, cell.batch),
    versions=f"Keras {keras.__version__}, TensorFlow {tf.__version__}",
)
