"""Peer: Orbit's StandardTrainer (of the TensorFlow Model Garden) under MultiWorkerMirroredStrategy, with a Keras 3
model.

The steps of a window run in Orbit's own tf.while_loop.
"""

from cell import Cell

cell = Cell()

from importlib.metadata import version  # noqa: E402

import keras  # noqa: E402
import orbit  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras_models import build, count, forward_flops, make_optimizer, mean_loss  # noqa: E402
from tf_snapshots import Snapshots  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy() if cell.world > 1 else tf.distribute.get_strategy()
x, y = cell.batches()


def batches(_=None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(tf.data.AUTOTUNE)


class Trainer(orbit.StandardTrainer):
    def __init__(self) -> None:
        with strategy.scope():
            self.model = build(cell.workload, keras)
            self.optimizer = make_optimizer(cell.workload, keras)
            self.optimizer.build(self.model.trainable_variables)
            self.total = tf.Variable(
                0.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        super().__init__(strategy.distribute_datasets_from_function(batches) if cell.world > 1 else batches())

    def train_loop_begin(self) -> None:
        self.total.assign(0.0)

    def train_step(self, iterator) -> None:
        def step(features, labels):
            with tf.GradientTape() as tape:
                # The optimizer sums (does not average) gradients over workers.
                loss = mean_loss(self.model(features, training=True), labels) / cell.world
            gradients = tape.gradient(loss, [variable.value for variable in self.model.trainable_variables])
            self.optimizer.apply(gradients, self.model.trainable_variables)
            self.total.assign_add(loss)

        strategy.run(step, args=next(iterator))

    def train_loop_end(self) -> dict:
        return {"loss": self.total.read_value() / cell.steps}


trainer = Trainer()
snapshots = Snapshots(cell, tf, trainer.model, trainer.optimizer)
for _ in range(cell.windows):
    cell.window(trainer.train(tf.constant(cell.steps))["loss"].numpy())
    snapshots.write()
cell.finish(
    parameters=count(trainer.model),
    flops=forward_flops(trainer.model, cell.batch),
    versions=(
        f"Orbit of tf-models-official {version('tf-models-official')}, Keras {keras.__version__}, TensorFlow"
        f" {tf.__version__}"
    ),
)
