"""Whether all workers compute the same."""

import collections
import copy
import dataclasses
import enum
import functools
import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit.kept_tensors import KeptTensors, kept_by_calls
from tfdist.training.same_model import facts_of, must_be_same_model


class Scaled(keras.layers.Layer):
    def __init__(self, by=1.0):
        super().__init__()
        self.by = by

    def call(self, x):
        return x * self.by


def model(activation="relu", rate=0.1, by=2.0, more=()):
    stack = [keras.layers.Dense(3, activation), keras.layers.Dropout(rate), Scaled(by), keras.layers.Lambda(abs), *more]
    return keras.Sequential([keras.Input((2,)), *stack])


def mean(y, outputs):
    return keras.ops.mean(y - outputs)


def together(*facts):
    """What each of so many workers is told; "" if nothing."""
    rows, barrier = [None] * len(facts), threading.Barrier(len(facts))

    def told(rank):
        def all_gather(array):
            rows[rank] = array
            barrier.wait(10)
            found = np.stack(rows)
            barrier.wait(10)
            return found

        try:
            must_be_same_model(SimpleNamespace(size=len(facts), all_gather=all_gather), facts[rank])
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(told, range(len(facts))))


def test_the_same_model_whatever_was_made_before_and_whatever_its_layers_are_called():
    first = facts_of(model(), [mean])
    keras.layers.Dense(1)  # the next one has another name
    assert together(first, facts_of(model(), [mean])) == ["", ""]


@pytest.mark.parametrize(
    "other, words",
    [
        ({"activation": "tanh"}, "layer 2, dense"),
        ({"rate": 0.2}, "layer 3, dropout"),
        ({"by": 3.0}, "layer 4, scaled"),
        ({"more": [keras.layers.ReLU()]}, "how many layers"),
    ],
)
def test_a_worker_with_another_model_is_told_by_all(other, words):
    keras.utils.clear_session(False)
    mine = facts_of(model())
    keras.utils.clear_session(False)
    said = together(mine, mine, facts_of(model(**other)))
    assert said[0].startswith("Rank 2 trains something else than rank 0; they differ first in ") and words in said[0]
    assert said == said[:1] * 3


def test_a_worker_with_other_settings_or_another_version_of_a_file_is_told_by_all(tmp_path, monkeypatch):
    adam = {"what compile(...) was given": {"optimizer": keras.optimizers.Adam(0.1)}}
    sgd = {"what compile(...) was given": {"optimizer": keras.optimizers.Adam(0.2)}}
    assert "what compile(...) was given" in together(facts_of(model(), (), adam), facts_of(model(), (), sgd))[0]
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "of_the_user.py"
    file.write_text("def loss(y, outputs):\n    return y - outputs\n")
    loss = importlib.import_module("of_the_user").loss
    before = facts_of(model(), [loss])
    file.write_bytes(b"def loss(y, outputs):\r\n    return y - outputs\r\n")  # as Windows writes it
    assert together(before, facts_of(model(), [loss])) == ["", ""]
    file.write_text("def loss(y, outputs):\n    return y - 2 * outputs\n")
    assert "the file of_the_user.py" in together(before, facts_of(model(), [loss]))[0]


class Loss:
    """Of the user's own."""

    def __init__(self, weight, made=0.0):
        self.weight, self.made, self.calls = weight, made, int(made)

    def __call__(self, y, outputs):
        return self.weight * mean(y, outputs)


def closing_over(factor):
    return lambda y, outputs: factor * mean(y, outputs)


@dataclasses.dataclass
class Settings:
    rate: float
    folder: str = ""
    rank: int = 0


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate


class Privately:
    __slots__ = ("__rate",)

    def __init__(self, rate):
        self.__rate = rate


class Kind(enum.Enum):
    SOFT, HARD = 0.1, 0.9


class Count(enum.IntEnum):
    ONE, TWO = 1, 2


def tagged(rate):
    function = closing_over(1.0)
    function.rate = rate
    return function


def holding(value):
    layer = Scaled()
    layer.held = value
    return model(more=[layer])


# Two of what an object of the user's may hold, and how they are told.
HELD = [
    (Settings(0.1, "/a", 1), Settings(0.2, "/b", 2), 'held ({"rate": 0.1} against {"rate": 0.2})'),
    (SimpleNamespace(rate=0.1), SimpleNamespace(rate=0.2), 'held ({"rate": 0.1} against {"rate": 0.2})'),
    (Slotted(0.1), Slotted(0.2), 'held ({"rate": 0.1} against {"rate": 0.2})'),
    (Privately(0.1), Privately(0.2), 'held ({"_Privately__rate": 0.1} against'),
    ({"a": {"b": (1, 0.1)}}, {"a": {"b": (1, 0.2)}}, '{"a": {"b": {"1": 0.1}}}'),
    ([0.1], [0.2], "held"),
    ({0.1}, {0.2}, "held"),
    (collections.deque([0.1]), collections.deque([0.2]), "held"),
    (Kind.SOFT, Kind.HARD, "held (0.1 against 0.9)"),
    (1j, 2j, "held"),
    (np.ones(2), np.zeros(2), "held"),
    (tf.constant(1.0), tf.constant(2.0), "held"),
    (np.sqrt, np.exp, 'held ("sqrt" against "exp")'),
    (Loss(0.1).__call__, Loss(0.2).__call__, "held"),
    (functools.cache(closing_over(0.1)), functools.cache(closing_over(0.2)), "held"),
    (tagged(0.1), tagged(0.2), "held"),
    (keras.regularizers.L2(0.1), keras.regularizers.L2(0.2), "held"),
]


@pytest.mark.parametrize("one, other, words", HELD)
def test_what_a_layer_and_a_loss_hold_at_any_depth(one, other, words):
    said = together(facts_of(holding(one)), facts_of(holding(other)))[0]
    assert "they differ first in layer 6, scaled" in said and words in said
    own = [closing_over(each) for each in (one, other)]
    assert "<lambda> holds: variable factor" in together(*(facts_of(model(), [each]) for each in own))[0]
    own = [closing_over(each) for each in (one, copy.copy(one))]
    assert together(*(facts_of(holding(one), [each]) for each in own)) == ["", ""]


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda y, outputs: mean(y, outputs), lambda y, outputs: 2 * mean(y, outputs)),
        (closing_over(1.0), closing_over(2.0)),
        (closing_over(np.ones(2)), closing_over(np.zeros(2))),
        (closing_over(Count.ONE), closing_over(Count.TWO)),
        (closing_over(Kind.SOFT), closing_over(Kind.HARD)),
        (functools.partial(keras.losses.huber, delta=1.0), functools.partial(keras.losses.huber, delta=2.0)),
        (Loss(1.0), Loss(2.0)),
        (keras.losses.Huber(1.0), keras.losses.Huber(2.0)),
    ],
)
def test_losses_that_hold_something_else(one, other):
    assert "they differ first in what " in together(facts_of(model(), [one]), facts_of(model(), [other]))[0]
    assert together(facts_of(model(), [one]), facts_of(model(), [one])) == ["", ""]


@pytest.mark.parametrize(
    "one, other, words",
    [
        (keras.layers.Lambda(lambda x: x), keras.layers.Lambda(lambda x: 2 * x), ": function"),
        (keras.layers.Dense(2, kernel_regularizer=Loss(1.0)), keras.layers.Dense(2, kernel_regularizer=Loss(2.0)), ""),
        (keras.layers.Dense(2), keras.layers.Dense(2, dtype="mixed_bfloat16"), 'policy ("float32" against "mixed'),
        (keras.layers.Dropout(0.1), keras.layers.Dropout(0.3), "rate (0.1 against 0.3)"),
    ],
)
def test_a_layer_that_holds_something_else_is_told_with_it(one, other, words):
    said = together(facts_of(model(more=[one])), facts_of(model(more=[other])))[0]
    assert "they differ first in layer 6, " in said and words in said


class Answers:
    """Whatever is asked."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_what_may_differ_of_what_is_held():
    def honest(number):
        return {
            "lock": threading.Lock(),
            "made": time.time() + number,
            f"/tmp/{number}": 1.0,
            "settings": Settings(0.1, f"/tmp/{number}", number),
            "asked": Answers(),
            "flag": bool(number),
            "variable": keras.Variable([float(number)]),
        }

    assert together(facts_of(holding(honest(0))), facts_of(holding(honest(1)))) == ["", ""]
    own = [closing_over(time.time() + number) for number in range(2)]
    assert together(facts_of(model(), own[:1]), facts_of(model(), own[1:])) == ["", ""]


def test_what_may_differ():
    """Points in time, counts and ranks, and folders of a machine."""
    one, other = Scaled(1.0), Scaled(1.0)
    one.folder, other.folder, one.rank, other.rank, one.made, other.made = "/a/b", "/c", 0, 1, 1.7e9, 1.8e9
    losses = [Loss(1.0, 1.7e9)], [Loss(1.0, 1.8e9)]
    assert together(*(facts_of(model(more=[layer]), own) for layer, own in zip((one, other), losses, strict=True))) == [
        "",
        "",
    ]
    eager = model()
    eager.compile("sgd", "mse", run_eagerly=True)
    before = facts_of(eager)
    eager.predict(np.ones((1, 2)), verbose=0)  # as the chief alone may have done
    assert together(before, facts_of(eager)) == ["", ""]
    held_by_itself, items = Loss(1.0), []
    held_by_itself.other, many = held_by_itself, list(range(10**6))
    items.append(items)
    facts_of(model(), [held_by_itself, lambda y, outputs: (items, many)])
    generated = {"__name__": "of no module"}
    exec("import keras\nclass Own(keras.layers.Layer):\n    def call(self, x):\n        return x", generated)
    assert facts_of(model(more=[generated["Own"]()]))


def test_what_a_layer_keeps_of_its_batches_is_no_difference():
    """As in a second fit with run_eagerly=True, where workers have had unlike rows."""

    class Keeping(keras.layers.Layer):
        def call(self, x):
            self.kept = {"parts": [x]}
            return x

    built = keras.Sequential([keras.Input((2,)), Keeping()])
    found = []
    for rows in (2, 3):
        kept = KeptTensors(built)
        with kept.hidden_afterwards():
            built(np.ones((rows, 2), "float32"))
        kept.show()
        found.append([facts_of(built, of_batches=each) for each in (kept_by_calls, lambda _: ())])
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
