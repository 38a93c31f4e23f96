"""What fills the last batches of an evaluation counts for nothing, whatever an objective does with its weights."""

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import build
from tfdist.config import Config
from tfdist.control.exit_codes import DataError, PeerLostError
from tfdist.data.input_pipeline import eval_dataset
from tfdist.data.sources.split import array_split
from tfdist.runtime.one_device import OneDevice
from tfdist.training.dropped_tokens import with_dropped
from tfdist.training.evaluation import Evaluator
from tfdist.training.objectives import regression
from tfdist.training.own_objective import own_objective
from tfdist.training.scores import Scores

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(21, 6)).astype("float32")
Y = RANDOM.integers(0, 3, (21, 6)).astype("float32")


def parts(outputs, y):
    return tf.square(outputs - y), tf.cast(y != 0, tf.float32), tf.abs(outputs - y)


def own_mask(outputs, y, w):
    losses, mask, error = parts(outputs, y)
    return Scores(losses, mask, {"error": error})


def of_rows(outputs, y, w):
    losses, mask, error = parts(outputs, y)
    return Scores(tf.reduce_sum(losses * mask, -1), tf.ones_like(w), {"error": tf.reduce_mean(error, -1)})


def flat(outputs, y, w):
    losses, mask, error = (tf.reshape(part, [-1]) for part in parts(outputs, y))
    return Scores(losses, mask, {"error": error})


def chosen(outputs, y, w):
    """Those of the tokens that count."""
    losses, mask, error = parts(outputs, y)
    losses, error = tf.boolean_mask(losses, mask > 0), tf.boolean_mask(error, mask > 0)
    return Scores(losses, tf.ones_like(losses), {"error": error})


def evaluate(objective, arrays, workers, batch=4, filled=True, activation="linear"):
    """What the last worker finds."""
    model, gathered = keras.Sequential([keras.Input((6,)), keras.layers.Activation(activation)]), []

    def all_gather(own):
        gathered.append(own)
        return np.stack(gathered)

    for replica in range(workers):
        dataset, steps = eval_dataset(
            array_split("rows", arrays), batch=batch, replica=replica, replicas=workers, filled=filled
        )
        runtime = SimpleNamespace(
            counts_samples=1,
            size=1,
            per_replica=lambda batches: batches[0],
            run=lambda function, batch: function(*batch),
            local=lambda value: [value],
            all_gather=all_gather,
        )
        found = Evaluator(
            runtime,
            model,
            objective,
            lambda made=dataset, count=steps: ([made], count),
            averaged=contextlib.nullcontext,
        )()
    return found


@pytest.mark.parametrize("function", [own_mask, of_rows, flat, chosen])
@pytest.mark.parametrize("rows", [21, 3])  # of which the second worker has one in its last batch, or none
def test_padding_does_not_count(function, rows):
    objective, arrays = own_objective(function.__name__, function), (X[:rows], Y[:rows])
    together = objective(*map(tf.constant, (*arrays, np.ones(rows, "float32"))))
    weight = float(tf.reduce_sum(together.weights))
    wanted = {
        "loss": float(tf.reduce_sum(together.losses * together.weights)) / weight,
        "error": float(tf.reduce_sum(together.metrics["error"] * together.weights)) / weight,
        "samples": weight,
    }
    assert evaluate(objective, arrays, workers=2) == pytest.approx(wanted, rel=1e-5)


def test_an_objective_of_probabilities_sees_their_logits_where_padding_is_cut_off():
    def twice(outputs, y, w):
        return Scores(tf.repeat(keras.losses.categorical_crossentropy(y, outputs), 2), tf.repeat(w, 2), {})

    wanted = tf.nn.softmax_cross_entropy_with_logits(Y / Y.sum(-1, keepdims=True), 100 * X)
    found = evaluate(twice, (100 * X, Y / Y.sum(-1, keepdims=True)), workers=2, activation="softmax")
    assert found["loss"] == pytest.approx(float(tf.reduce_mean(wanted)), rel=1e-5) and found["loss"] > 20


def test_of_nothing_it_is_0():
    weights = np.zeros(21, "float32")
    found = evaluate(lambda outputs, y, w: Scores(outputs[:, 0], w, {}), (X, Y, weights), workers=1)
    assert found == {"loss": 0.0, "samples": 0.0}


def test_negative_weights_of_an_objective_are_seen():
    objective = own_objective("mine:signed", lambda outputs, y, w: Scores(outputs[:, 0], tf.sign(outputs[:, 1]), {}))
    assert np.isnan(evaluate(objective, (X, Y), workers=1)["loss"])


class Worker:
    """One of two, of which the second one's flag is `second`; its gathers are written down. lost: there is no other."""

    counts_samples, rank = 1, 0

    def __init__(self, second=0, holds_whole_model=True, size=2, lost=False):
        self.size, self.holds_whole_model, self.second, self.lost = size, holds_whole_model, second, lost
        self.gathered = []

    def all_gather(self, array):
        self.gathered.append(array.tolist())
        if self.lost:
            raise tf.errors.UnavailableError(None, None, "gone")
        return np.stack([array, np.full_like(array, self.second)])


def fails():
    raise DataError("a bad record")


@pytest.mark.parametrize(
    "worker, together, gathered",
    [
        (Worker(size=1), True, []),
        (Worker(second=0), True, [[1]]),
        (Worker(second=1), True, [[1]]),
        (Worker(lost=True), False, [[1]]),
        (Worker(holds_whole_model=False), False, []),  # the other may be inside the model, and wait there
    ],
)
def test_a_failure_is_told_to_the_others_if_they_listen(worker, together, gathered):
    evaluator = Evaluator(worker, None, None, fails, averaged=contextlib.nullcontext)
    with pytest.raises(DataError, match="a bad record"):
        evaluator()
    assert evaluator.failed_together is together and worker.gathered == gathered


def test_who_hears_of_a_failure_waits_for_no_sums():
    dataset, steps = eval_dataset(array_split("rows", (X, Y)), batch=4, replica=0, replicas=1)
    worker = Worker(second=1)
    worker.per_replica, worker.run, worker.local = lambda each: each[0], lambda call, given: call(*given), lambda v: [v]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Activation("linear")])
    evaluator = Evaluator(
        worker, model, own_objective("own_mask", own_mask), lambda: ([dataset], steps), averaged=contextlib.nullcontext
    )
    with pytest.raises(PeerLostError, match="failed on rank 1"):
        evaluator()
    assert evaluator.failed_together and worker.gathered == [[0]]


def test_another_model_is_scored_by_what_it_drops_itself():
    """An export of the job's mixture of experts, as `python -m tfdist.evaluate --model_file` reads it."""

    def model():
        return keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Identity(name="block_00_router_dropped")])

    split, of_job = array_split("rows", (X, Y)), model()
    job: Any = SimpleNamespace(
        eval_split=split,
        train_split=split,
        runtime=OneDevice(),
        config=Config(),
        plan=SimpleNamespace(micro_batch=4),
        model=of_job,
        objective=with_dropped(regression(), of_job),
    )
    evaluator = build.Job.evaluator(job, model())
    assert evaluator is not None and evaluator()["dropped_fraction"] == pytest.approx(X.mean())


def test_a_stream_is_counted_once():
    """TensorFlow does not know how long it is; each evaluation reads it, and none has to count it again."""
    begun = []

    def stream(*_):
        def rows():
            begun.append(1)
            yield from zip(X, Y, strict=True)

        spec = (tf.TensorSpec(X.shape[1:], X.dtype), tf.TensorSpec(Y.shape[1:], Y.dtype))
        return tf.data.Dataset.from_generator(rows, output_signature=spec)

    split = dataclasses.replace(array_split("rows", (X, Y)), size=None, fetch=None, stream=stream)
    job = SimpleNamespace(
        eval_split=split,
        runtime=SimpleNamespace(size=1, replicas=1, local_replicas=1, first_replica=0),
        config=Config(),
        plan=SimpleNamespace(micro_batch=4),
        model=keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Dense(2)]),
        objective=None,
        step=SimpleNamespace(update=SimpleNamespace(averaged=contextlib.nullcontext)),
    )
    evaluator = build.Job.evaluator(job)
    for _ in range(3):
        (data,), steps = evaluator.datasets()
        assert steps == -(-len(X) // 4) and sum(len(w) for _, _, w, _ in data.as_numpy_iterator()) >= len(X)
    assert len(begun) == 1 + 3
