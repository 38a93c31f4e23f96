"""Arguments that a function does not take."""

import pytest

import tfdist
from tfdist.control.exit_codes import ConfigError


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: tfdist.fit(None, batchsize=3), "tfdist.fit has no argument 'batchsize': did you mean batch_size?"),
        (lambda: tfdist.predict(None, zzz=3), "has no argument 'zzz': it takes model, x, batch_size, verbose, steps"),
        (lambda: tfdist.fit(), "tfdist.fit: missing a required argument: 'model': pass the model first"),
        (lambda: tfdist.evaluate(None, *range(20)), "tfdist.evaluate: too many positional arguments"),
    ],
)
def test_a_sentence_for_arguments_that_are_not_there(call, sentence):
    with pytest.raises(ConfigError) as raised:
        call()
    assert sentence in str(raised.value)


def test_errors_of_the_function_are_its_own():
    with pytest.raises(ConfigError, match="takes a keras.Model, not str"):
        tfdist.fit("model", x=1)
