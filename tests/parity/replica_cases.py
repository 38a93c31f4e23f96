"""Compares models with state, masks and added losses, on 1, 2 and 3 replicas of one process, with a plain Keras loop.

    python -m tests.parity.replica_cases OUT.json some|all [CASE...]

writes {case: {replicas: largest difference / what rounding allows}}.
`some` runs each case on the numbers of replicas that it names, `all` on one, two and three.
One process runs all cases: building and tracing a model takes about a second, starting TensorFlow takes four.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.parity import lean
from tfdist.compat import keras_layers
from tfdist.config import OptimizerConfig, PrecisionConfig
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime import batch_norm
from tfdist.runtime.mirrored import StrategyRuntime
from tfdist.runtime.one_device import OneDevice
from tfdist.training.objectives import regression
from tfdist.training.optimizer import make_optimizer
from tfdist.training.parallel.segments import recompute
from tfdist.training.precision import LossScale
from tfdist.training.row_checks.added_losses import added_losses
from tfdist.training.row_checks.sums_as_means import AddedLoss, SumsAsMeans
from tfdist.training.schedule import Schedule
from tfdist.training.step import TrainStep
from tfdist.training.step_options import Parallelism, StepOptions

BATCH, STEPS, RATE = 13, 3, 0.05  # 13 rows divide neither by two replicas nor by three
ROUNDING = 2e-5  # for weights and statistics of about 1, after some steps with float32 sums in another order


@dataclass(frozen=True)
class Case:
    """`model` is built again for each run; the data are the same for all runs."""

    model: Callable[[], keras.Model]
    x: np.ndarray
    replicas: tuple[int, ...]  # on which it runs by default; together the cases run each feature on two and three
    weighted: bool = False
    recompute: bool = False
    accumulation: int = 1
    bound: float = ROUNDING
    nan_step: int | None = None  # the step in which one sample is NaN; it is skipped
    options: dict = field(default_factory=dict)


def normal(*shape, scale=1.0, offset=0.0):
    return (offset + scale * np.random.default_rng(0).normal(size=(BATCH * STEPS, *shape))).astype("float32")


def tokens():
    """Returns ids [n, 4]. 0, which is masked, fills some rows from a position on, a few of them from the first on."""
    random = np.random.default_rng(1)
    ids = random.integers(1, 9, (BATCH * STEPS, 4))
    ids[np.arange(4) >= random.integers(0, 5, BATCH * STEPS)[:, None]] = 0
    return ids.astype("int32")


def chain(shape, *parts, dtype="float32"):
    x = y = layers.Input(shape, dtype=dtype)
    for part in parts:
        y = part(y)
    return keras.Model(x, y)


def masked_batch_norm():
    return chain(
        (4,),
        layers.Embedding(9, 5, mask_zero=True),
        layers.BatchNormalization(momentum=0.5),
        layers.SimpleRNN(4),
        layers.Dense(1),
        dtype="int32",
    )


def plain_batch_norm():
    return chain(
        (7,), layers.BatchNormalization(momentum=0.5, epsilon=1e-5), layers.Dense(3, activation="tanh"), layers.Dense(1)
    )


class Adds(keras.layers.Layer):
    """Adds a mean and a sum over rows, and a loss of its weights."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        each = keras.ops.sum(keras.ops.reshape(keras.ops.square(self.scale * x), (keras.ops.shape(x)[0], -1)), -1)
        self.add_loss(0.02 * keras.ops.mean(each))
        self.add_loss(0.005 * keras.ops.sum(each))
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(self.scale)))
        return self.scale * x


def adds_between_batch_norms():
    """Two of the layers have the names of a block, for `recompute`."""
    return chain(
        (7,),
        layers.Dense(5, activity_regularizer="l2", kernel_regularizer="l2"),
        layers.BatchNormalization(name="block_00_norm_1"),
        Adds(),
        layers.Dense(4, activity_regularizer="l1"),
        layers.BatchNormalization(name="block_00_mlp_add"),
        layers.Dense(1),
    )


def adds_behind_a_mask():
    return chain(
        (4,),
        layers.Embedding(9, 5, mask_zero=True),
        layers.BatchNormalization(),
        layers.SimpleRNN(4, return_sequences=True, activity_regularizer="l2"),
        layers.BatchNormalization(),
        Adds(),
        layers.SimpleRNN(3),
        layers.Dense(1),
        dtype="int32",
    )


def adds():
    return chain(
        (7,),
        layers.Dense(5, activation="tanh", activity_regularizer="l2"),
        Adds(),
        layers.Dense(1, kernel_regularizer="l2"),
    )


CASES: dict[str, Case] = {
    "adds_between_batch_norms": Case(adds_between_batch_norms, normal(7), (3,)),
    "adds_between_batch_norms_weighted": Case(adds_between_batch_norms, normal(7), (2,), weighted=True),
    "adds_recomputed": Case(adds_between_batch_norms, normal(7), (2,), recompute=True),
    "adds_recomputed_weighted": Case(adds_between_batch_norms, normal(7), (1, 3), weighted=True, recompute=True),
    "adds_behind_a_mask": Case(adds_behind_a_mask, tokens(), (2,), bound=5e-5),
    "adds_accumulation": Case(adds, normal(7), (3,), accumulation=2),
    "adds_accumulation_weighted": Case(adds, normal(7), (1, 2), accumulation=2, weighted=True),
    "adds_weighted_jit": Case(adds, normal(7), (2,), weighted=True, options={"jit_compile": True}),
    "nan_skip_batch_norm": Case(plain_batch_norm, normal(7), (2,), nan_step=1, options={"skip_non_finite": True}),
    "nan_skip_weighted": Case(
        adds_between_batch_norms, normal(7), (3,), nan_step=1, weighted=True, options={"skip_non_finite": True}
    ),
    "batch_norm_mask": Case(masked_batch_norm, tokens(), (3,)),
    "batch_norm_offset": Case(
        plain_batch_norm, normal(7, offset=2000.0), (1, 2), bound=3e-4
    ),  # float32 has a resolution of 1e-4 for numbers of 2000
    "batch_norm": Case(plain_batch_norm, normal(7), (3,)),
}


def data_of(case):
    y = np.random.default_rng(2).normal(size=(len(case.x), 1)).astype("float32")
    w = (
        np.random.default_rng(3).choice([0.0, 0.2, 1.0, 7.0], len(case.x)).astype("float32")
        if case.weighted
        else np.ones(len(case.x), "float32")
    )
    if case.nan_step is not None:
        y[case.nan_step * BATCH + 3], w[case.nan_step * BATCH + 3] = np.nan, 1.0
        case.x[case.nan_step * BATCH + 3] = np.nan
    return case.x, y, w


def synchronized(model):
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.synchronized = True
    return model


def state(model):
    return [variable.numpy().astype("float64") for variable in model.variables if "seed" not in variable.path]


def by_keras(case):
    """Trains on one device, on the whole batch at once, without tfdist."""
    keras.utils.set_random_seed(1)
    model, optimizer = case.model(), keras.optimizers.SGD(RATE)
    shown = []
    for step in range(STEPS):
        if step == case.nan_step:
            shown.append([0.0, 0.0])
            continue
        x, y, w = (part[step * BATCH : (step + 1) * BATCH] for part in data_of(case))
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((tf.cast(model(x, training=True), tf.float32) - y) ** 2, 1)
            loss = tf.reduce_sum(w * error) / tf.reduce_sum(w)
            added = tf.add_n([tf.cast(term, tf.float32) for term in model.losses]) if model.losses else tf.constant(0.0)
            total = loss + added
        sources = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(total, sources), model.trainable_variables)
        shown.append([float(loss), float(added)])
    return state(model), shown


_added: dict[Callable, list[tuple]] = {}


def losses_of(case, model):
    """What found_by_the_chief makes of the losses that `model` adds. It tries the model, which takes as long as all
    else; so this is done once for all models that one function builds."""
    all_layers = list(keras_layers.all_layers(model))
    if case.model not in _added:
        found = added_losses(model, case.x[:4])
        _added[case.model] = [(all_layers.index(one.layer), one.place, one.reduction) for one in found]
    return SumsAsMeans([AddedLoss(all_layers[number], *others) for number, *others in _added[case.model]])


def by_tfdist(case, runtime):
    keras.utils.set_random_seed(1)
    batch_norm.synchronize_with(runtime)
    plan = BatchPlan(BATCH, case.accumulation, runtime.replicas)
    with runtime.scope():
        model = synchronized(case.model())
        optimizer = make_optimizer(OptimizerConfig(optimizer="sgd"), Schedule("constant", RATE, 0, 10, 0.1, 0.0))
        scale = LossScale(PrecisionConfig())
        optimizer.build(model.trainable_variables)
    parts = data_of(case)
    spec = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in parts)

    def batches(replica):
        for step in range(STEPS):
            for micro in range(plan.accumulation):
                start, stop = (step * BATCH + bound for bound in plan.slice(micro, replica))
                yield tuple(part[start:stop] for part in parts)

    added = losses_of(case, model)
    if case.recompute:
        recompute(model, "block", {})
    step = TrainStep(
        runtime,
        model,
        optimizer,
        regression(),
        scale,
        StepOptions(plan, 0, weighted=case.weighted, **case.options),
        spec,
        Parallelism(added=added),
    )
    iterators = [
        iter(tf.data.Dataset.from_generator(lambda replica=replica: batches(replica), output_signature=spec))
        for replica in range(runtime.replicas)
    ]
    outputs = [step(iterators, 1) for _ in range(STEPS)]
    # Which workers tell each other, a step later: once, not for each replica.
    np.testing.assert_allclose(outputs[-1].step_s, outputs[-2].call.wall_s, rtol=1e-5)
    return state(model), [
        (
            np.nan_to_num([means["loss"], means.get("regularization", 0.0)])
            if number == case.nan_step
            else [means["loss"], means.get("regularization", 0.0)]
        )
        for number, means in enumerate(output.means for output in outputs)
    ]


class Mirrored(tf.distribute.MirroredStrategy):
    """Numbers its device groups apart: TensorFlow counts them from 1 on for every strategy of a process."""

    def __init__(self, count):
        self._collective_key_base = 1000 * count
        super().__init__([f"CPU:{index}" for index in range(count)])


def mirrored(count):
    return StrategyRuntime(Mirrored(count), tf.distribute.experimental.CommunicationOptions(), rank=0, size=1)


def difference(case, found, expected):
    """Returns the largest difference, in units of the bound."""
    pairs = [*zip(found[0], expected[0], strict=True), (np.array(found[1]), np.array(expected[1]))]
    return (
        float(np.max([np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b))) for a, b in pairs])) / case.bound
    )  # NaN if any is


def main(out: Path, every: bool, names: list[str]) -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
    )
    runtimes = {1: OneDevice(), 2: mirrored(2), 3: mirrored(3)}
    # Rewriting graphs takes a fifth of the time; by default other processes do it, of one replica each.
    lean.prepare(oracle=not every)
    results, by_plain_keras = {}, {}
    for name in names or CASES:
        case, results[name] = CASES[name], {}
        given = case.model, case.x.tobytes(), case.weighted, case.nan_step  # all that plain Keras needs
        if given not in by_plain_keras:
            by_plain_keras[given] = by_keras(case)
        expected = by_plain_keras[given]
        for count in runtimes if every else case.replicas:
            try:
                results[name][count] = difference(case, by_tfdist(case, runtimes[count]), expected)
            except Exception:  # noqa: BLE001 - one case must not hide the others
                results[name][count] = traceback.format_exc(limit=-3)[-2000:]
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "all", sys.argv[3:])
