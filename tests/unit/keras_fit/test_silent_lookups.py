"""Rows that a table does not have under XLA: NaN in tfdist.fit and its kin; with rows that are there, Keras' bits."""

import keras
import numpy as np
import pytest

import tfdist
from tests.e2e.sources import OWN_LOOKUPS, lookups
from tests.fuzz import keras_settings
from tests.marks import slow_but

KINDS = ("embedding", "frozen embedding", *OWN_LOOKUPS)
IDS = np.arange(48, dtype=np.int32).reshape(8, 6) % 10
MISSING = np.where(np.arange(48).reshape(8, 6) == 21, 10, IDS).astype(np.int32)  # in row 3
LABELS = np.arange(8) % 4


def compiled(kind, jit_compile=True):
    keras_settings.seed(0)
    model = lookups(kind)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
    return model


@pytest.mark.parametrize("kind", slow_but(KINDS, "take", "embedding"))
def test_rows_that_are_there_give_what_keras_gives_and_others_nan(kind):
    """One model for both, since most of the time is XLA's."""
    model, plain = compiled(kind), compiled(kind, jit_compile=False)
    predicted = tfdist.predict(model, MISSING, batch_size=4, verbose=0)
    assert np.isfinite(predicted[4:]).all() and np.isnan(predicted[3]).all()
    # Of all rows of the batch, but where what is looked up in a function of the model's does not come out of it.
    assert np.isnan(predicted[:3]).all() == (kind != "traced before")
    assert np.isnan(tfdist.evaluate(model, MISSING, LABELS, batch_size=4, verbose=0))

    found = []
    for each, fit, predict in ((model, tfdist.fit, tfdist.predict), (plain, keras.Model.fit, keras.Model.predict)):
        history = fit(each, IDS, LABELS, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([np.asarray(history), predict(each, IDS, batch_size=4, verbose=0), *each.get_weights()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    history = tfdist.fit(model, MISSING, LABELS, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    assert np.isnan(history["loss"]).all()
    assert np.isfinite(keras.Model.evaluate(compiled(kind), MISSING, LABELS, verbose=0))  # else this needs nothing


@pytest.mark.slow
def test_what_keras_has_traced_is_not_used():
    model, loss = compiled("take"), []
    for own in (False, True, False, True):
        module = tfdist if own else keras.Model
        loss.append(module.evaluate(model, MISSING, LABELS, verbose=0))
        module.predict(model, IDS, verbose=0)
    assert np.isnan(loss[1::2]).all() and np.isfinite(loss[::2]).all()
    with tfdist.spread(model):
        assert np.isnan(model.train_on_batch(MISSING, LABELS))


def test_nothing_stays_behind():
    model = compiled("take")
    tfdist.predict(model, IDS, verbose=0)
    assert not {"call", "train_step", "test_step", "predict_step"} & set(model.__dict__)
    model = compiled("take")
    keras.Model.predict(model, MISSING, verbose=0)
    assert np.isfinite(keras.Model.predict(model, MISSING, verbose=0)).all()
