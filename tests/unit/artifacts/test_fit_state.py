"""What of callbacks and of the model is state, over the fits of a process that get the same objects."""

import keras
import pytest

from tfdist.artifacts import backup_file
from tfdist.artifacts.fit_state import FitState


class Best(keras.callbacks.Callback):
    """With state, two names of one list, and a setting."""

    def __init__(self):
        super().__init__()
        self.best, self.gone, self.patience, self.pending = None, True, 3, 0
        self.rows = self.same = [0]


def small():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.beta = 0.0
    return model


def begun(model, callback, backup=None):
    """A fit that has begun, and has restored the backup."""
    state = FitState([callback])
    state.begin(model, backup)
    if backup is not None:
        state.restore(model, backup)
    return state


def saved(state, model):
    return backup_file.parse(backup_file.to_bytes(state.fields(model)))


def with_a_best_value():
    """Objects of a fit, and its backup."""
    model, callback = small(), Best()
    state = begun(model, callback)
    callback.best, model.beta = 0.5, 0.1
    callback.rows.append(1)
    del callback.gone
    backup = saved(state, model)
    assert backup["callbacks"] == [{"best": 0.5, "rows": [0, 1], "same": [0, 1]}] and backup["deleted"] == [["gone"]]
    assert backup["attributes"] == {"0": {"beta": 0.1}}
    return model, callback, backup


@pytest.mark.parametrize("is_new", [False, True])
def test_what_was_restored_is_in_later_backups_if_it_does_not_change_again(is_new):
    """Also if the objects are those of the interrupted fit, which have it already: as in a notebook."""
    model, callback, backup = with_a_best_value()
    if is_new:
        model, callback = small(), Best()
    for _ in range(2):
        assert saved(begun(model, callback, backup), model) == backup


def test_the_second_backup_of_a_fit_holds_what_the_first_has_restored():
    _, _, backup = with_a_best_value()
    model, callback = small(), Best()
    begun(model, callback, backup)
    assert saved(begun(model, callback), model) == backup


def test_what_has_changed_once_is_held_when_it_is_again_what_it_was():
    model, callback = small(), Best()
    state = begun(model, callback)
    callback.pending = 2
    saved(state, model)
    callback.pending = 0
    backup = saved(state, model)
    callback.pending = 1  # later than the backup
    begun(model, callback, backup)
    assert callback.pending == 0


def test_what_an_interrupted_fit_has_changed_after_the_backup_is_put_back():
    model, callback = small(), Best()
    state = begun(model, callback)
    backup = saved(state, model)
    assert backup["callbacks"] == [{}]
    callback.best, callback.later, model.beta = 0.5, 1, 0.1
    callback.rows.append(1)
    del callback.gone
    state.look(model)  # at the end of an epoch
    callback.patience = 10  # the user, between the fits
    rows = callback.rows
    state = begun(model, callback, backup)
    assert (callback.best, callback.gone, callback.patience, model.beta) == (None, True, 10, 0.0)
    assert callback.rows is callback.same is rows and rows == [0] and not hasattr(callback, "later")
    assert "patience" not in saved(state, model)["callbacks"][0]


def test_a_fit_that_restores_nothing_begins_with_what_is_there():
    model, callback, _ = with_a_best_value()
    backup = saved(begun(model, callback), model)
    assert callback.best == 0.5 and model.beta == 0.1
    assert backup["callbacks"][0]["best"] == 0.5  # which a new callback would not have
