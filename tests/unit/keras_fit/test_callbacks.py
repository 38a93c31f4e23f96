"""The callbacks of a fit on several workers: who runs them, and what the workers agree on after them."""

import types

import keras
import numpy as np
import pytest

from tfdist.artifacts.hidden_state import state_beside_layers
from tfdist.compat import keras_optimizers, keras_trainer
from tfdist.keras_fit import model as keras_fit_model
from tfdist.keras_fit.callbacks import SameDecisions, SameLogs, arrange

BEGIN, END = "on_train_batch_begin", "on_train_batch_end"


class Worker:
    """One of two workers. chiefs: what the chief sends, if this is the other; None: it sends the same as this one."""

    size = 2

    def __init__(self, rank=0, chiefs=None):
        self.rank, self.chiefs = rank, chiefs

    def all_gather(self, array):
        return np.stack([array if self.chiefs is None else np.array(self.chiefs, array.dtype), array])

    def broadcast_object(self, value, name=""):
        return value if self.chiefs is None else self.chiefs


def network(optimizer="sgd", policy="float32"):
    dtype = keras.DTypePolicy(policy)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=dtype)], name="network")
    model.compile(optimizer, "mse")
    return model


def deciding(model, worker, hooks=()):
    callback = SameDecisions(worker, types.SimpleNamespace(check_weights=lambda: None), hooks)
    callback.set_model(model)
    callback.on_train_begin()
    return callback


def sgd(rate):
    return keras.optimizers.SGD(rate)


def several(rate):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd(1.0), {".*kernel": sgd(rate)}))


OPTIMIZERS = {
    "plain": (lambda: sgd(0.5), [0.25], [0.25]),
    "float16": (lambda: keras.optimizers.LossScaleOptimizer(sgd(0.5)), [0, 0.25], [0, 0.25]),
    "a schedule": (lambda: sgd(keras.optimizers.schedules.CosineDecay(0.5, 9)), [np.nan], [np.nan]),
    "several": (
        lambda: several(0.5),
        [0, 0.25, 0.125],
        [0, 0.25, 0.125],
    ),
}


def rates_of(model):
    found = [keras_optimizers.learning_rate_variable(each) for each in keras_optimizers.with_inner(model.optimizer)]
    return [np.nan if rate is None else float(rate.value) for rate in found]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_worker_takes_the_chiefs_learning_rate(name):
    make, chiefs, expected = OPTIMIZERS[name]
    model = network(make())
    deciding(model, Worker(1, [False, *chiefs])).on_epoch_begin(0)
    np.testing.assert_array_equal(rates_of(model), expected)
    assert not model.stop_training


def test_also_if_keras_scales_the_loss_by_itself():
    keras.config.set_dtype_policy("mixed_float16")
    model = network(policy="mixed_float16")
    keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    deciding(model, Worker(1, [True, 0, 0.25])).on_epoch_begin(0)
    assert float(model.optimizer.learning_rate) == 0.25 and model.stop_training


def test_also_of_other_optimizers_that_the_model_keeps():
    model = network()
    model.other = keras.optimizers.Adam(1.0)
    deciding(model, Worker(1, [False, 0.5, 0.25])).on_epoch_begin(0)
    assert (float(model.optimizer.learning_rate), float(model.other.learning_rate)) == (0.5, 0.25)
    model.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.5, 9)  # as a callback may
    deciding(model, Worker(1, [False, np.nan, 0.125])).on_epoch_begin(0)
    assert float(model.other.learning_rate) == 0.125


def test_an_optimizer_inside_another_is_not_beside_it():
    inner = sgd(0.5)
    model = network(keras.optimizers.LossScaleOptimizer(inner))
    model.given = inner
    assert keras_trainer.optimizers_of(model) == [model.optimizer]


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """With a variable of its own."""

    def __init__(self):
        super().__init__()
        self.factor = keras.Variable(1.0)

    def __call__(self, step):
        return 0.1 * self.factor


def test_optimizers_inside_others_are_seen_everywhere():
    schedule = Schedule()
    optimizer = several(schedule)
    optimizer.optimizers[0].weight_decay = 0.1
    model = network(optimizer)
    optimizer.build(model.trainable_variables)
    assert [each is schedule.factor.value for each in state_beside_layers(model, [])] == [True]
    assert keras_optimizers.weights_that_decay(optimizer, model.trainable_variables) == [[0, 1]]
    before = [each.update_step for each in optimizer.optimizers]
    with keras_fit_model.rows_in_one_order(optimizer):
        assert all(each.update_step != one for each, one in zip(optimizer.optimizers, before, strict=True))


class Stops(keras.callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


class Warms(keras.callbacks.TensorBoard):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1


def lambdas(**hooks):
    return keras.callbacks.LambdaCallback(**hooks)


@pytest.mark.parametrize(
    ("callbacks", "hooks"),
    [
        ([], []),
        ([keras.callbacks.EarlyStopping(), keras.callbacks.ModelCheckpoint("a.keras", save_freq=2)], []),
        ([keras.callbacks.TensorBoard(), keras.callbacks.CSVLogger("a"), keras.callbacks.ProgbarLogger()], []),
        ([keras.callbacks.TerminateOnNaN()], [END]),
        ([lambdas(on_train_batch_begin=print)], [BEGIN]),
        ([Stops("a.keras")], [END]),
        ([keras.callbacks.EarlyStopping(), Warms()], [BEGIN]),
        ([Stops("a.keras"), Warms()], [BEGIN, END]),
    ],
)
def test_workers_agree_in_a_batch_if_a_callback_may_decide_there(callbacks, hooks):
    """Also one that runs on the chief only."""
    for rank in (0, 1):
        arranged = arrange(callbacks, Worker(rank), network())
        assert isinstance(arranged[0], SameLogs) and isinstance(arranged[-1], SameDecisions)
        assert [
            hook for hook in (BEGIN, END) if not keras.src.utils.python_utils.is_default(getattr(arranged[-1], hook))
        ] == hooks
        assert len(arranged) == 2 + sum(not (rank and isinstance(each, WRITERS)) for each in callbacks)


WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
)


def test_workers_also_agree_if_only_another_has_such_a_callback():
    arranged = arrange([], Worker(1, [False, True]), network())
    agreed = []
    arranged[-1]._agree = lambda: agreed.append(1)
    arranged[-1].on_train_batch_begin(0)
    arranged[-1].on_train_batch_end(0)
    assert agreed == [1]


def test_what_a_callback_of_the_chief_puts_into_the_logs_the_others_have_too():
    told = object()
    chief = {"loss": 1.0, "rate": 0.5, "told": told}
    sent = []

    class Chief(Worker):
        def broadcast_object(self, value, name=""):
            sent.append(value)
            return value

    deciding(network(), Chief()).on_epoch_end(0, chief)
    assert chief == {"loss": 1.0, "rate": 0.5, "told": told}

    class Other(Chief):
        rank = 1

        def broadcast_object(self, value, name=""):
            return sent[0]

    logs = {"loss": 2.0, "own": 3, "told": 4}
    deciding(network(), Other(1)).on_epoch_end(0, logs)
    assert logs == {"loss": 1.0, "rate": 0.5, "told": 4}, "what cannot be sent stays"
