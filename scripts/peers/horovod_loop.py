"""Peer: Horovod with TensorFlow and a Keras 3 model, in a hand-written loop around DistributedGradientTape.

Horovod's Keras wrappers do not work with Keras 3. The steps of a window are one loop inside one tf.function.
"""

from cell import Cell

cell = Cell()

import horovod  # noqa: E402
import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras_models import build, count, forward_flops, make_optimizer, mean_loss  # noqa: E402
from tf_snapshots import Snapshots  # noqa: E402

hvd.init()
x, y = cell.batches()
iterator = iter(tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(tf.data.AUTOTUNE))
model = build(cell.workload, keras)
optimizer = make_optimizer(cell.workload, keras)
optimizer.build(model.trainable_variables)
variables = [variable.value for variable in model.trainable_variables]
snapshots = Snapshots(cell, tf, model, optimizer, alone=True)
hvd.broadcast_variables([variable.value for variable in (*model.variables, *optimizer.variables)], root_rank=0)


@tf.function
def train(steps: tf.Tensor) -> tf.Tensor:
    total = 0.0
    for _ in tf.range(steps):
        features, labels = next(iterator)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = mean_loss(model(features, training=True), labels)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        total += loss
    return total


for _ in range(cell.windows):
    cell.window(train(tf.constant(cell.steps)).numpy() / cell.steps)
    snapshots.write()
cell.finish(
    parameters=count(model),
    flops=forward_flops(model, cell.batch),
    versions=f"Horovod {horovod.__version__}, Keras {keras.__version__}, TensorFlow {tf.__version__}",
)
hvd.shutdown()
