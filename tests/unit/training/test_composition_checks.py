"""What a model must be like where several workers, or micro-batches, compute parts of a batch."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfdist import build
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.one_device import OneDevice
from tfdist.training import composition_checks
from tfdist.training.model_cost import forward_flops

ALONE, TWO = SimpleNamespace(replicas=1, size=1), SimpleNamespace(replicas=2, size=1)


def recurrent(stateful, **of_input):
    return keras.Sequential([keras.Input((3, 2), **of_input), keras.layers.GRU(4, stateful=stateful)])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: recurrent(True, batch_size=4), "takes batches of 4 rows only, .* leave batch_size out"),
        (lambda: recurrent(False, batch_size=4), "takes batches of 4 rows only, .* leave batch_size out"),
        (lambda: keras.Sequential([keras.layers.GRU(4, stateful=True)]), "the layer gru.* is stateful"),
    ],
)
@pytest.mark.parametrize(("runtime", "accumulation"), [(TWO, 1), (ALONE, 2)], ids=["two workers", "micro-batches"])
def test_whole_batches_are_refused_where_there_are_parts(model, words, runtime, accumulation):
    with pytest.raises(ConfigError, match=words):
        composition_checks.check_model(Config().replace(accumulation=accumulation), runtime, model())
    composition_checks.check_model(Config(), ALONE, model())
    composition_checks.check_model(Config(), TWO, recurrent(False))


def carrying(num_outputs):
    """For batches of 4 only: the states of an RNN have as many rows."""
    return keras.Sequential(
        [keras.Input((6, 1), batch_size=4), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(num_outputs)]
    )


def ten(split):
    x = np.arange(60, dtype="float32").reshape(10, 6, 1) / 60
    return x, np.arange(10) % 2


def test_one_device_evaluates_a_stateful_rnn_in_whole_batches():
    config = Config().replace(
        source=f"{__name__}:ten", model=f"{__name__}:carrying", steps=2, global_batch=4, optimizer="sgd"
    )
    job = build.compose(config, OneDevice())
    job.step(job.iterators(0), 2)
    assert forward_flops(job.model, job.train_split.element_spec[0], 4) == 0  # not known: in a loop
    evaluator = job.evaluator()
    assert evaluator is not None and evaluator()["samples"] == 10  # in batches of 4, 4 and 2
