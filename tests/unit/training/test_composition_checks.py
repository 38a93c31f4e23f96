"""What a model must be like where several workers, or micro-batches, compute parts of a batch."""

from types import SimpleNamespace

import keras
import pytest

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.training import composition_checks

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
