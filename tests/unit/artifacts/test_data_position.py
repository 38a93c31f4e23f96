"""Where a fit is in its data: in the middle of a pass over them or not."""

import keras
import pytest
import tensorflow as tf

from tfdist.artifacts.data_position import RunningFit
from tfdist.compat.keras_epochs import EpochIterator, batches_in_an_epoch

NUMBERS = tf.data.Dataset.range(7).batch(1)
DATA = {
    "known length": NUMBERS,
    "unknown length": NUMBERS.filter(lambda x: True),
    "repeated": NUMBERS.repeat().map(lambda x: x).prefetch(1),
    "repeated twice": NUMBERS.repeat(2),
    "repeated rows": NUMBERS.unbatch().repeat().batch(1),
}


def running(initial_epoch=0, epochs=99, steps_per_execution=1, **given):
    iterator = EpochIterator(
        **given, steps_per_execution=steps_per_execution, distribute_strategy=tf.distribute.get_strategy()
    )
    return RunningFit(
        keras.Sequential(), {"epoch_iterator": iterator, "initial_epoch": initial_epoch, "epochs": epochs}
    )


def epoch_of(iterator):
    """The numbers that Keras' fit reads in an epoch."""
    found = []
    with iterator.catch_stop_iteration():
        for _, _, batches in iterator:
            read = [int(batch[0]) for _, batch in zip(range(iterator.steps_per_execution), batches, strict=False)]
            found += read
            if not read:
                raise StopIteration
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps, execution", [(2, 1), (3, 1), (7, 1), (9, 1), (14, 1), (4, 2), (3, 2), (None, 2)])
@pytest.mark.parametrize("name", DATA)
def test_an_epoch_begins_within_a_pass_if_its_first_batch_is_not_that_of_a_pass(name, steps, execution):
    if steps is None and name in ("repeated", "repeated rows"):
        return  # such an epoch does not end
    given = {"x": DATA[name], "steps_per_epoch": steps, "steps_per_execution": execution}
    iterator = running(**given).iterator
    epoch_of(iterator)
    for past in range(1, 9):
        ends = {"training": batches_in_an_epoch(iterator), "validation": None}
        said = running(initial_epoch=2, **given).begins_within_a_pass(2 + past, ends)
        read = epoch_of(iterator)
        if name == "repeated rows":  # where a pass over the rows begins is not looked for
            assert said
        elif read:
            assert said == (read[0] != 0), past


def test_where_backups_are_saved_within_a_pass():
    for given, save_freq, within in (
        ({"x": NUMBERS}, "epoch", False),
        ({"x": NUMBERS}, 14, False),
        ({"x": NUMBERS}, 5, True),
        ({"x": DATA["unknown length"]}, 7, True),
        ({"x": NUMBERS, "steps_per_epoch": 5}, "epoch", True),
        ({"x": NUMBERS, "steps_per_epoch": 5}, 5, True),
        ({"x": NUMBERS, "steps_per_epoch": 7}, 7, False),
        ({"x": NUMBERS, "steps_per_epoch": 5, "epochs": 1}, "epoch", False),  # no epoch goes on
        ({"x": NUMBERS, "steps_per_epoch": 5, "initial_epoch": 4, "epochs": 6}, "epoch", True),
    ):
        assert running(**given).saves_within_a_pass(save_freq) == within, (given, save_freq)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stopped_after", [1, 3, 7, None])
@pytest.mark.parametrize("steps", [None, 5])
def test_what_reads_the_data_after_a_fit_that_was_stopped_finds_the_next_order(steps, stopped_after):
    """Stopped within its last epoch, also at the last batch, Keras does not begin one more pass."""

    def begun():
        dataset = tf.data.Dataset.range(7).shuffle(7, seed=1).batch(1)
        fit = running(x=dataset, steps_per_epoch=steps)
        fit.values["validation_data"] = None
        return dataset, fit

    dataset, fit = begun()
    epoch_of(fit.iterator)
    for number, _ in enumerate(fit.iterator, 1):
        if number == stopped_after:
            break
    fit.model.stop_training = True
    expected = [int(batch[0]) for batch in dataset]
    ends = fit.ends()
    dataset, fit = begun()
    fit.go_to(2, ends)
    assert [int(batch[0]) for batch in dataset] == expected
